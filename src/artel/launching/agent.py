"""torchrun's agent: starts and watches the processes of one host, and interprets their exit statuses.

The agent does not retry after invalid input (2). A worker that lost its peers (LOST_PEERS), or that was stopped
together with another host (130), has not failed, so its restart is not counted. Restarts after OutOfMemory are not
counted either: the worker has recorded that it must use less memory, so they end. A hang (HUNG) counts as a failure.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from artel.errors import OutOfMemory
from artel.interrupts import in_main_thread
from artel.launching.hosts import Hosts
from artel.launching.worker import LOST_PEERS

# SIGUSR1 is Slurm's warning that the time is nearly over.
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals forwarded to the workers. The launcher ends after them."""
# A worker that is told to stop finishes its step and saves. It is killed only after this time.
_STOP_SECONDS = 600
# When a worker fails, the other workers on its host end within milliseconds, or hang waiting for it and are killed
# (torchrun's default: after 30 s).
_LOST_SECONDS = 5
_INVALID_INPUT, _STOPPED = 2, 130
_NO_FAILURE = {LOST_PEERS, _STOPPED, -signal.SIGTERM}  # SIGTERM: stopped before it installed a handler
_SIMULTANEOUS_SECONDS = 2  # processes that end this soon after the first one ended because of it

# Silenced: artel's messages already say why processes end.
_LOGGERS = ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous")

_HEARTBEAT_SECONDS = 5
# Seconds without a heartbeat until a host counts as lost, if the others may continue without it. A switch or a migrated
# virtual machine is back sooner. TCP alone would wait a quarter of an hour.
SILENT_SECONDS = 120


class Agent(LocalElasticAgent):
    """Starts `spec.local_world_size` processes, watches them and the next host, and restarts them as allowed.

    `on_restart` is called with the failures by rank before a restart. `waiting` is entered while this host waits for
    the others.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        hosts: Hosts,
        on_restart: Callable[[Mapping[int, ProcessFailure]], None],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        for name in _LOGGERS:
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
        # Workers write to this terminal; torch's own folder for their logs would stay empty.
        super().__init__(spec, DefaultLogsSpecs(os.devnull), shutdown_timeout=_STOP_SECONDS)
        self._hosts = hosts
        self._on_restart = on_restart
        self._waiting = waiting
        self._heartbeats = _Heartbeats()
        self._signals = _Signals()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._signals.raise_at_once()
        with self._waiting():
            super()._rendezvous(worker_group)

    def _exit_barrier(self) -> None:
        self._signals.raise_at_once()
        super()._exit_barrier()

    def _shutdown(self, *arguments: Any, **keywords: Any) -> None:
        self._signals.raise_at_once()
        super()._shutdown(*arguments, **keywords)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close
        # torchrun calls it without a timeout when a worker has failed, and with one when this host is told to stop.
        context.close = lambda death_sig=None, timeout=_LOST_SECONDS: close(death_sig, timeout)
        self._signals.defer()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._signals.raise_pending()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._update_remaining_restarts(result)
            if self._remaining_restarts > 0:
                self._on_restart(result.failures)
        elif result.state == WorkerState.HEALTHY and self._hosts.elastic and self._heartbeats.are_missing(worker_group):
            self._remaining_restarts += 1  # torchrun subtracts it at once: a lost host is no failure of this one
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _update_remaining_restarts(self, result: RunResult) -> None:
        """Update the number of remaining restarts after these failures."""
        statuses = {failure.exitcode for failure in _simultaneous_failures(result.failures).values()}
        can_continue = self._hosts.elastic or self._hosts.restarts > 0
        if _INVALID_INPUT in statuses or (statuses == {_STOPPED} and not self._hosts.elastic):
            self._remaining_restarts = 0
        elif OutOfMemory.exit_code in statuses and (can_continue or self._hosts.count == 1):
            self._remaining_restarts += 1  # other hosts wait for a lost one only where restarts are left
        elif statuses <= _NO_FAILURE and can_continue:
            self._remaining_restarts += 1


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """Return (rank, exit status) of the process that failed first."""
    earliest = _simultaneous_failures(failures)
    causes = {rank: failure for rank, failure in earliest.items() if failure.exitcode not in _NO_FAILURE}
    rank, failure = min((causes or earliest).items(), key=lambda item: item[1].timestamp)
    return rank, failure.exitcode


def _simultaneous_failures(failures: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
    """Return the failures at the time of the first one; timestamps are whole seconds."""
    start = min(failure.timestamp for failure in failures.values())
    return {rank: failure for rank, failure in failures.items() if failure.timestamp - start <= _SIMULTANEOUS_SECONDS}


class _Signals:
    """Signals to stop, raised as torchrun's SignalException: at once while the agent waits, else at its next poll.

    torchrun raises them anywhere in its thread. Between two polls of the workers an exception can do harm: before the
    call timer has started, the run ended with an UnboundLocalError (4 of 150 in a loop without pauses), and in
    subprocess.Popen.poll a lock is not released if it comes between its acquisition and the `try`.
    """

    def __init__(self) -> None:
        self._pending: signal.Signals | None = None
        self._at_once = True

    def defer(self) -> None:
        """Raise only at polls from now on. Replaces torchrun's handlers, so call it after they are set."""
        self._at_once = False
        for forwarded in FORWARDED_SIGNALS if in_main_thread() else ():
            signal.signal(forwarded, self._on_signal)

    def raise_at_once(self) -> None:
        """Raise at once from now on, also a pending signal."""
        self._at_once = True
        self.raise_pending()

    def raise_pending(self) -> None:
        """Raise the newest pending signal, if there is one."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._at_once = True
            raise SignalException(f"stopped by {pending.name}", sigval=pending)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self._pending = signal.Signals(signal_number)
        if self._at_once:
            self.raise_pending()


class _Heartbeats:
    """Heartbeats: each host writes its own to the store, and reads the next host's."""

    def __init__(self) -> None:
        self._store: Any = None
        self._count = 0
        self._written_at = 0.0
        self._last_seen = b""
        self._last_seen_at = 0.0

    def are_missing(self, group: WorkerGroup) -> bool:
        """True once the next host has been silent for SILENT_SECONDS."""
        now = time.monotonic()
        num_hosts = group.group_world_size or 1
        rank = group.group_rank or 0
        store: Any = group.store
        if store is not self._store:  # there was a new rendezvous
            self._store = store
            self._written_at = 0.0
            self._last_seen, self._last_seen_at = b"", now
        if num_hosts == 1 or now - self._written_at < _HEARTBEAT_SECONDS:
            return False
        self._written_at = now
        self._count += 1
        store.set(_heartbeat_key(rank), str(self._count))
        next_key = _heartbeat_key((rank + 1) % num_hosts)
        heartbeat = store.get(next_key) if store.check([next_key]) else b""
        if heartbeat != self._last_seen:
            self._last_seen, self._last_seen_at = heartbeat, now
        return time.monotonic() - self._last_seen_at > SILENT_SECONDS


def _heartbeat_key(rank: int) -> str:
    return f"artel/alive/{rank}"
