"""Score completions in child processes with time and memory limits, and run tools and environments in them.

artel never executes completions, but a user's function may: its process has these limits, and the user's permissions.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from artel.config import RewardTerm
from artel.errors import InputError, Problem
from artel.registry import REWARDS
from artel.rewards.completion import Completion
from artel.rewards.process import OUT_OF_MEMORY, ProcessLost, ProcessTimeout, Result, RewardProcess, time_reason

_CONCURRENT_CALLS = 16
"""Maximum number of concurrent calls of a coroutine function, per process."""
_START_SECONDS = 300.0
"""Time for a process to start and import the rewards; torch takes 20 s on a busy disk."""
_RESERVED_NAMES = ("environment", "overlong", "tools", "template")
"""Names in a round's file that are not those of a reward."""
_GRACE_SECONDS = 2.0
"""Time for a process to report which of its concurrent calls timed out, before all are repeated one by one."""


class Failure(NamedTuple):
    """A reward that failed on one completion."""

    completion: int
    """Index of the completion."""
    term: str
    reason: str


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of completions."""

    names: list[str]
    """One name per term, for tables and metrics."""
    values: NDArray[np.float64]
    """Unweighted scores (completions, terms). NaN if the reward does not apply, or failed."""
    totals: NDArray[np.float64]
    """Weighted sum per completion, ignoring NaN. NaN if a completion has no score."""
    failures: list[Failure]

    def of(self, completion: int) -> tuple[dict[str, float | None], float | None]:
        """Return the scores of a completion by name, and its total. None: no score."""
        by_name = zip(self.names, map(_nan_to_none, self.values[completion]), strict=True)
        return dict(by_name), _nan_to_none(self.totals[completion])


def _nan_to_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


class Job(NamedTuple):
    """Requests to tools or to an environment (`environments.py`), for one answer."""

    answer: int
    """Number of the answer. Its environment lives in the process that this number selects."""
    requests: list[dict[str, Any]]


class _Call(NamedTuple):
    term: int
    completions: range


class RewardPool:
    """Child processes that score completions, started on demand and reused.

    A call that times out, raises or ends its process takes at most its time limit. Its completion (or batch) gets no
    score, and the reason is in `Scores.failures`. A lost process is replaced, and everything in its process group is
    killed. If it ended or ran out of memory after earlier calls, the call is repeated once in a new process. Results
    therefore do not depend on earlier calls or on the number of processes.

    Args:
        plugins: modules that register rewards; imported in each process.
        seconds: time limit of a call (wall clock).
        memory_bytes: maximum that a process may allocate after its start.
        workers: number of processes.
        key: key of the terms in the run file, for errors.
        start_seconds: limit of a process's start, in which it imports the rewards.
        tools: Python file with functions that `respond` calls.
        environment: class of the environments of `respond`, FILE.py:CLASS or MODULE:CLASS.
    """

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        *,
        plugins: Sequence[str] = (),
        seconds: float,
        memory_bytes: int,
        workers: int,
        key: str = REWARDS.key,
        start_seconds: float = _START_SECONDS,
        tools: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._terms = list(terms)
        self._start_request = {
            "terms": [term.model_dump(mode="json", by_alias=True) for term in terms],
            "plugins": list(plugins),
            "seconds": seconds,
            "memory_bytes": memory_bytes,
            "tools": tools,
            "environment": environment,
        }
        self._seconds, self._memory_bytes, self._workers, self._key = seconds, memory_bytes, workers, key
        self._start_seconds = start_seconds
        self._slots: list[RewardProcess | None] = [None] * (workers + 1)
        """None: a process that is not started yet. The last one holds the rewards with a model, if there are any."""
        self._homes: dict[int, RewardProcess | None] = {}
        """The process that has answered an answer's latest request."""
        self._idle: queue.LifoQueue[int] = queue.LifoQueue()
        for slot in reversed(range(workers)):
            self._idle.put(slot)
        self._idle_with_models: queue.LifoQueue[int] = queue.LifoQueue()
        self._idle_with_models.put(workers)
        self._processes: set[RewardProcess] = set()
        # Also runs when the pool is freed, for example after an error that nobody handled. At exit the processes end
        # themselves, since their sockets are closed.
        self._kill_all = weakref.finalize(self, _kill_all, self._processes)
        self._kill_all.atexit = False
        self._lock = threading.Lock()
        self._is_closed = False
        self._kinds: list[dict[str, bool]] | None = None
        self.has_environment_reward = False
        """True if the environment has a reward. Known after `check`."""
        self.names = _unique_names(self._terms)
        self.seconds = dict.fromkeys(self.names, 0.0)
        """Seconds that the calls of each term have taken so far, in all processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes."""
        with self._lock:
            self._is_closed = True
            self._kill_all()

    def check(self) -> None:
        """Start a process. Raise InputError with all problems if a reward cannot be imported or created."""
        if self._kinds is not None:
            return
        try:
            process, answer = self._start()
        except ProcessLost as error:
            what = f"the rewards cannot be imported: {error}"
            raise InputError.at(self._key, what, "look at what your modules do while they are imported") from None
        if answer["problems"]:
            self._remove(process)
            raise InputError(self._locate(*problem) for problem in answer["problems"])
        has_models = any(kind["resident"] for kind in answer["kinds"])
        self._slots[self._workers if has_models else 0] = process  # 0: the next to be used
        self._kinds = answer["kinds"]
        self.has_environment_reward = answer["environment_reward"]

    def score(
        self, completions: Sequence[Completion], on_progress: Callable[[float], object] = lambda _: None
    ) -> Scores:
        """Score completions by every term. Results are in the order of the completions.

        `on_progress` is called with the fraction of finished calls.
        """
        self.check()
        assert self._kinds is not None
        calls = [
            _Call(term, range(first, min(first + size, len(completions))))
            for term, kind in enumerate(self._kinds)
            for size in [_call_size(kind, len(completions))]
            for first in range(0, len(completions), size)
        ]
        values = np.full((len(completions), len(self._terms)), np.nan)
        failures = []
        with ThreadPoolExecutor(self._workers) as threads, self._killing_processes([threads]):
            results = []
            for result in threads.map(lambda call: self._score_call(call, completions), calls):
                results.append(result)
                on_progress(len(results) / len(calls))
        for call, scores in zip(calls, results, strict=True):
            for index, (score, reason) in zip(call.completions, scores, strict=True):
                if score is not None:
                    values[index, call.term] = score
                if reason is not None:
                    failures.append(Failure(index, self.names[call.term], reason))
        return Scores(self.names, values, self._totals(values), sorted(failures))

    def respond(
        self, jobs: Sequence[Job], on_progress: Callable[[float], object] = lambda _: None
    ) -> list[list[dict[str, Any]]]:
        """Return what tools and environments answer to the requests of each job.

        A request that fails, exceeds its limits or loses its process has {"failure": reason}.
        """
        self.check()
        with ExitStack() as stack:
            threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(self._workers)]  # one per process
            stack.enter_context(self._killing_processes(threads))
            futures = [threads[job.answer % self._workers].submit(self._serve, job) for job in jobs]
            answers = []
            for future in futures:
                answers.append(future.result())
                on_progress(len(answers) / len(jobs))
        return answers

    def _serve(self, job: Job) -> list[dict[str, Any]]:
        slot, answers = job.answer % self._workers, []
        for request in job.requests:
            # An instance whose process was lost repeats its steps first.
            repeated_steps = (
                len(request.get("steps", [])) if self._homes.get(job.answer) is not self._slots[slot] else 0
            )
            answer = self._ask(slot, request, self._seconds * (1 + repeated_steps))
            self._homes[job.answer] = self._slots[slot]
            answers.append({"failure": answer} if isinstance(answer, str) else answer)
        return answers

    @contextmanager
    def _killing_processes(self, executors: Sequence[ThreadPoolExecutor]) -> Iterator[None]:
        """End the processes and threads if the block raises: Ctrl-C."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._is_closed = True
                for process in self._processes:
                    process.signal()
            for executor in executors:
                executor.shutdown(cancel_futures=True)
            raise

    def _totals(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        weights = np.array([term.weight for term in self._terms])
        totals: NDArray[np.float64] = np.nansum(values * weights, axis=1)
        return np.where(np.isnan(values).all(axis=1), np.nan, totals)

    def _score_call(self, call: _Call, completions: Sequence[Completion]) -> list[Result]:
        results = self._try(call, completions)
        if isinstance(results, list):
            return results
        assert self._kinds is not None
        if len(call.completions) > 1 and not self._kinds[call.term]["batch"]:  # one of them ended the process
            singles = [_Call(call.term, range(index, index + 1)) for index in call.completions]
            return [result for single in singles for result in self._score_call(single, completions)]
        return [(None, results)] * len(call.completions)

    def _try(self, call: _Call, completions: Sequence[Completion]) -> list[Result] | str:
        """Return the results of a call, or the reason why its process was lost."""
        assert self._kinds is not None
        request = {"term": call.term, "completions": [asdict(completions[index]) for index in call.completions]}
        kind = self._kinds[call.term]
        seconds = self._seconds + (_GRACE_SECONDS if kind["concurrent"] else 0)
        idle = self._idle_with_models if kind["resident"] else self._idle
        slot = idle.get()
        try:
            started = time.monotonic()
            answer = self._ask(slot, request, seconds)
            with self._lock:
                self.seconds[self.names[call.term]] += time.monotonic() - started
        finally:
            idle.put(slot)
        return answer if isinstance(answer, str) else [(score, reason) for score, reason in answer["results"]]

    def _ask(self, slot: int, request: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        """Return the answer of the process in a slot, or the reason why the process was lost."""
        while True:
            process = self._slots[slot]
            is_new = process is None or process.requests == 1
            try:
                if process is None:
                    process = self._slots[slot] = self._start(skips_resident=slot < self._workers)[0]
                answer = process.ask(request, seconds)
                if "lost" not in answer:
                    return answer
                reason, is_timeout = str(answer["lost"]), False
            except ProcessLost as error:
                reason, is_timeout = str(error), isinstance(error, ProcessTimeout)
            self._slots[slot] = None
            if process is not None:
                self._remove(process)
            if is_timeout:
                return time_reason(self._seconds)
            if is_new:
                out_of_memory = f"took more than {self._memory_bytes / 2**20:,.0f} MiB of memory"
                return out_of_memory if reason == OUT_OF_MEMORY else reason

    def _start(self, *, skips_resident: bool = False) -> tuple[RewardProcess, dict[str, Any]]:
        """Start a process. Return it with its first answer. `skips_resident`: without the rewards that hold a model."""
        kinds = self._kinds or []
        skipped = [term for term, kind in enumerate(kinds) if skips_resident and kind["resident"]]
        with self._lock:
            if self._is_closed:
                raise ProcessLost("the pool is closed")
            process = RewardProcess()
            self._processes.add(process)
        try:
            answer = process.ask({**self._start_request, "skipped": skipped}, self._start_seconds)
            expected = [kind for term, kind in enumerate(kinds) if term not in skipped]
            if kinds and [kind for term, kind in enumerate(answer["kinds"]) if term not in skipped] != expected:
                raise ProcessLost("its process cannot import the rewards again")
        except BaseException:
            self._remove(process)
            raise
        return process, answer

    def _remove(self, process: RewardProcess) -> None:
        with self._lock:
            process.kill()
            self._processes.discard(process)

    def _locate(self, term: int | None, where: str, what: str, fix: str) -> Problem:
        """Return a problem reported by a process, with the key of its term."""
        if term is None or where.startswith("/") or where.endswith(".py"):
            return Problem(where, what, fix)
        return Problem(".".join(key for key in (self._key, str(term), where) if key), what, fix)


def _kill_all(processes: set[RewardProcess]) -> None:
    for process in processes:
        process.kill()
    processes.clear()


def _call_size(kind: dict[str, bool], count: int) -> int:
    if kind["batch"]:
        return max(1, count)
    return _CONCURRENT_CALLS if kind["concurrent"] else 1


def _unique_names(terms: Sequence[RewardTerm]) -> list[str]:
    """Return the labels of terms. A repeated label gets _2, _3, … appended."""
    names: list[str] = []
    for term in terms:
        name, number = term.label, 1
        while name in names or name in _RESERVED_NAMES:
            number += 1
            name = f"{term.label}_{number}"
        names.append(name)
    return names
