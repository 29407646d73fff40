"""torchrun's agent, which starts and watches the processes of one host; ours also knows why a process ended.

A worker tells its launcher by its exit status. Wrong input (2) is not tried again. A worker that lost its peers
(LOST_OTHERS) or was stopped because another host was told to (130) has not failed: to start it again costs none of
the restarts that its host has. Nor does one that was out of memory (OutOfMemory): it has noted to do with less, so it
cannot fail in that way for ever. One that hung (HUNG) has failed like any other.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from artel.errors import OutOfMemory
from artel.launching.hosts import Hosts
from artel.launching.worker import LOST_OTHERS

# SIGUSR1 is Slurm's warning that the time is nearly over.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that are passed on to the workers, and end the launcher when those have ended."""
# A worker told to stop finishes its step and saves; only after this is it ended by force.
_STOP_SECONDS = 600
# When one has failed, the others of its host have nothing more to do: those that do not end by themselves, within
# milliseconds, wait for it or are stopped (torchrun gives them 30 s).
_LOST_SECONDS = 5
_INPUT_WRONG, _STOPPED = 2, 130
_NOT_ITS_FAULT = {LOST_OTHERS, _STOPPED, -signal.SIGTERM}  # SIGTERM: told to stop before it could listen
# Processes that ended this much after the first were ended because of it.
_SAME_MOMENT = 2

# What they say of processes that end is said in words, once, by them and by their launcher.
_LOGGERS = ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous")

_SIGN_SECONDS = 5
# A host that gives no sign for so long is lost, when the others may go on without it. A switch or a virtual machine
# that is moved comes back sooner; TCP alone would wait a quarter of an hour.
SILENT_SECONDS = 120


class Agent(LocalElasticAgent):
    """Starts `spec.local_world_size` processes, watches them and the next host, and starts them again as allowed.

    Before it starts them again because some failed, `on_restart` is given the failures by rank.
    """

    def __init__(
        self, spec: WorkerSpec, hosts: Hosts, on_restart: Callable[[Mapping[int, ProcessFailure]], None]
    ) -> None:
        for name in _LOGGERS:
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
        # Workers write to this terminal; torch's own folder of their logs would only stay behind, empty.
        super().__init__(spec, DefaultLogsSpecs(os.devnull), shutdown_timeout=_STOP_SECONDS)
        self._hosts, self._on_restart = hosts, on_restart
        self._signs = _Signs()
        self._signals = _Signals()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._signals.raise_at_once()
        super()._rendezvous(worker_group)

    def _exit_barrier(self) -> None:
        self._signals.raise_at_once()
        super()._exit_barrier()

    def _shutdown(self, *arguments: Any, **named: Any) -> None:
        self._signals.raise_at_once()
        super()._shutdown(*arguments, **named)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close
        # Called without a limit when a worker has failed, and with one when this host is told to stop.
        context.close = lambda death_sig=None, timeout=_LOST_SECONDS: close(death_sig, timeout)
        self._signals.keep()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._signals.raise_kept()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._judge(result)
            if self._remaining_restarts > 0:
                self._on_restart(result.failures)
        elif result.state == WorkerState.HEALTHY and self._hosts.elastic and self._signs.are_missing(worker_group):
            self._remaining_restarts += 1  # taken back at once: a lost host is no failure of this one
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _judge(self, result: RunResult) -> None:
        """How many restarts are left after these failures."""
        statuses = {failure.exitcode for failure in _first(result.failures).values()}
        goes_on = self._hosts.elastic or self._hosts.restarts > 0
        if _INPUT_WRONG in statuses or (statuses == {_STOPPED} and not self._hosts.elastic):
            self._remaining_restarts = 0
        elif OutOfMemory.exit_code in statuses and (goes_on or self._hosts.count == 1):
            self._remaining_restarts += 1  # other hosts, where one was lost, only wait for it where restarts are left
        elif statuses <= _NOT_ITS_FAULT and goes_on:
            self._remaining_restarts += 1


def cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """(rank, exit status) of the process because of which the others ended."""
    first = _first(failures)
    own = {rank: failure for rank, failure in first.items() if failure.exitcode not in _NOT_ITS_FAULT}
    rank, failure = min((own or first).items(), key=lambda item: item[1].timestamp)
    return rank, failure.exitcode


def _first(failures: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
    """Those of the first moment; the clock has whole seconds."""
    first = min(failure.timestamp for failure in failures.values())
    return {rank: failure for rank, failure in failures.items() if failure.timestamp - first <= _SAME_MOMENT}


class _Signals:
    """Signals to stop, raised as torchrun's SignalException: at once where the agent waits, else at its next look.

    torchrun raises them wherever its thread is. Between two looks at the workers that is also where an exception does
    harm: before its timer of calls has started, where the run ended with an UnboundLocalError (4 of 150 in a loop
    without pauses), or in subprocess.Popen.poll between taking a lock and the `try` that gives it back.
    """

    def __init__(self) -> None:
        self._kept: signal.Signals | None = None
        self._at_once = True

    def keep(self) -> None:
        """From now on raise only when asked; called once torchrun's own handlers are there, instead of them."""
        self._at_once = False
        for number in PASSED_ON:
            signal.signal(number, self._on_signal)

    def raise_at_once(self) -> None:
        """From now on raise at once, and what was kept, too."""
        self._at_once = True
        self.raise_kept()

    def raise_kept(self) -> None:
        """Raise the newest signal that came, if one did."""
        if self._kept is not None:
            number, self._kept = self._kept, None
            self._at_once = True
            raise SignalException(f"told to stop by {number.name}", sigval=number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._kept = signal.Signals(number)
        if self._at_once:
            self.raise_kept()


class _Signs:
    """Signs of life that each host leaves in the store, and looks for from the one after it."""

    def __init__(self) -> None:
        self._store: Any = None
        self._own = 0
        self._written = 0.0
        self._seen = b""
        self._when = 0.0

    def are_missing(self, group: WorkerGroup) -> bool:
        """Whether the next host has been silent for SILENT_SECONDS; it says so once."""
        now, rank, hosts = time.monotonic(), group.group_rank or 0, group.group_world_size or 1
        store: Any = group.store
        if store is not self._store:  # hosts have met anew
            self._store, self._seen, self._when, self._written = store, b"", now, 0.0
        if hosts == 1 or now - self._written < _SIGN_SECONDS:
            return False
        self._written, self._own = now, self._own + 1
        store.set(_sign(rank), str(self._own))
        after = _sign((rank + 1) % hosts)
        seen = store.get(after) if store.check([after]) else b""
        if seen != self._seen:
            self._seen, self._when = seen, now
        return time.monotonic() - self._when > SILENT_SECONDS


def _sign(rank: int) -> str:
    return f"artel/alive/{rank}"
