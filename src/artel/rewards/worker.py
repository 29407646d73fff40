"""A child process that scores completions: `python -m artel.rewards.worker SOCKET`, started by `RewardPool`.

It reads requests from a socket and answers each, with one JSON object per line. The first request has the rewards,
tools, environment and limits. The others have completions, or calls and replies (`environments.py`). Output that
functions print goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import math
import numbers
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from artel.config import RewardTerm
from artel.errors import ArtelError, Problem
from artel.host import process_memory
from artel.plugins import describe_exception, guard_user_code, import_user_module
from artel.registry import REWARDS
from artel.rewards.completion import Completion, MissingColumn
from artel.rewards.process import OUT_OF_MEMORY, Result, time_reason

if TYPE_CHECKING:
    from artel.rewards.environments import Environments


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    requests = connection.makefile("rb")
    start = json.loads(requests.readline())
    _limit_memory(start["memory_bytes"])
    rewards, environments, answer = _build_all(start)
    with asyncio.Runner() as runner:
        while True:
            connection.sendall(json.dumps(answer).encode() + b"\n")
            line = requests.readline()
            if not line:
                os._exit(0)
            request = json.loads(line)
            if "term" in request:
                answer = _score(rewards, request, start["seconds"], runner)
            else:
                answer = _respond(environments, request)


def _end_with_parent(descriptor: int) -> None:
    """Kill this process and its children when the parent's socket is closed, even while a reward hangs."""
    poll = select.poll()
    poll.register(descriptor, 0)  # reports only a hang-up
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _limit_memory(limit: int) -> None:
    """Limit the memory that this process and each of its children may allocate beyond the current amount."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    limit += process_memory("VmData")
    soft_limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, hard_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _build_all(start: dict[str, Any]) -> tuple[list[Any], Environments | None, dict[str, Any]]:
    """Create the rewards of all terms, None for skipped ones, and the environments.

    Return them with the first answer: their kinds, and any problems.
    """
    rewards: list[Any] = []
    environments: Environments | None = None
    problems: list[tuple[int | None, Problem]] = []
    try:
        for name in start["plugins"]:
            import_user_module(name, "plugins", "write package.module")
    except ArtelError as error:
        problems += [(None, problem) for problem in error.problems]
    for index, values in enumerate(start["terms"] if not problems else []):
        if index in start["skipped"]:
            rewards.append(None)
            continue
        try:
            with guard_user_code("", "the reward cannot be made", "fix it there; it is not part of artel"):
                term = RewardTerm.model_validate(values)
                settings = (term.model_extra or {}).get(term.reward)
                rewards.append(REWARDS[term.reward](settings))
        except ArtelError as error:
            problems += [(index, problem) for problem in error.problems]
    try:
        if start["tools"] or start["environment"]:
            from artel.rewards.environments import Environments

            environments = Environments(start["tools"], start["environment"])
    except ArtelError as error:
        problems += [(None, problem) for problem in error.problems]
    kinds = [
        {name: bool(getattr(reward, name, False)) for name in ("batch", "concurrent", "resident")} for reward in rewards
    ]
    answer = {
        "id": 0,
        "kinds": kinds,
        "environment_reward": environments is not None and environments.has_reward,
        "problems": [(index, problem.where, problem.what, problem.fix) for index, problem in problems],
    }
    return rewards, environments, answer


def _score(rewards: list[Any], request: dict[str, Any], seconds: float, runner: asyncio.Runner) -> dict[str, Any]:
    reward = rewards[request["term"]]
    completions = [Completion(**values) for values in request["completions"]]
    is_batch = getattr(reward, "batch", False)
    calls = [completions] if is_batch else [[completion] for completion in completions]
    pid = os.getpid()
    try:
        if getattr(reward, "concurrent", False):
            results = runner.run(_call_concurrently(reward, calls, seconds))
        else:
            results = [_call(reward, call, runner) for call in calls]
    except MemoryError:
        return {"id": request["id"], "lost": OUT_OF_MEMORY}
    finally:
        if os.getpid() != pid:  # the function has forked, and this is its child
            os._exit(0)
    return {"id": request["id"], "results": [result for call in results for result in call]}


def _respond(environments: Environments | None, request: dict[str, Any]) -> dict[str, Any]:
    assert environments is not None
    pid = os.getpid()
    try:
        answer = environments.answer(request)
        if "value" in answer:
            answer = dict(zip(("value", "failure"), _read_score(answer["value"]), strict=True))
        return {"id": request["id"], **answer}
    except MemoryError:
        return {"id": request["id"], "lost": OUT_OF_MEMORY}
    finally:
        if os.getpid() != pid:  # the function has forked, and this is its child
            os._exit(0)


def _call(reward: Callable[..., Any], completions: list[Completion], runner: asyncio.Runner) -> list[Result]:
    def call() -> Any:
        scores = reward(completions)
        return runner.run(_wait_for(scores)) if isinstance(scores, Awaitable) else scores

    try:
        return _read_scores(call(), len(completions))
    except MemoryError:
        raise
    except BaseException as error:  # user code may raise anything
        return [(None, _describe(error))] * len(completions)


async def _call_concurrently(reward: Any, calls: list[list[Completion]], seconds: float) -> list[list[Result]]:
    async def call(completions: list[Completion]) -> list[Result]:
        try:
            async with asyncio.timeout(seconds) as limit:
                scores = await reward(completions)
            return _read_scores(scores, len(completions))
        except MemoryError:
            raise
        except BaseException as error:
            reason = time_reason(seconds) if limit.expired() else _describe(error)
            return [(None, reason)] * len(completions)

    return await asyncio.gather(*map(call, calls))


async def _wait_for(scores: Awaitable[Any]) -> Any:
    return await scores


def _describe(error: BaseException) -> str:
    if isinstance(error, MissingColumn):
        return str(error)
    return error.one_line if isinstance(error, ArtelError) else describe_exception(error)


def _read_scores(scores: Any, count: int) -> list[Result]:
    """Check the return value of a reward, and convert it to one result per completion."""
    if isinstance(scores, str | bytes | dict) or not isinstance(scores, Iterable):
        return [(None, f"returned {_shorten(scores)}, not a list of {count} numbers")] * count
    scores = list(scores)
    if len(scores) != count:
        return [(None, f"returned {len(scores)} numbers for {count} completions")] * count
    return [_read_score(score) for score in scores]


def _read_score(score: Any) -> Result:
    if score is None:
        return None, None
    if isinstance(score, Exception):
        return None, _describe(score)
    if not isinstance(score, numbers.Real) and hasattr(score, "item"):  # a scalar of NumPy or PyTorch
        score = score.item()
    if not isinstance(score, numbers.Real):
        return None, f"returned {_shorten(score)}, not a number"
    number = float(score)
    return (number, None) if math.isfinite(number) else (None, f"returned {number}")


def _shorten(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else f'{text[:80]}…'}"


if __name__ == "__main__":
    main()
