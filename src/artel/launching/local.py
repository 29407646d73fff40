"""Start, watch and restart the processes of this host with torch.distributed.run."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from artel.elapsed import hide_elapsed
from artel.errors import ArtelError, InputError, Interrupted, OutOfMemory, Problem, WorkError
from artel.interrupts import answer_interrupts_with, exit_on_signal
from artel.launching.rendezvous import SECRET_VARIABLE, Rendezvous
from artel.launching.worker import module_command
from artel.messages import logger
from artel.preparing.progress import reporting
from artel.storage.unexpected_errors import FAULT_EXIT_STATUS, find_fault_file
from artel.training.rank_file import mark_start

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from artel.training.run_folder import RunFolder


def launch(arguments: list[str], processes: int, rendezvous: Rendezvous, folder: RunFolder) -> None:
    """Run `python -m artel ARGUMENTS` as `processes` processes on this host, and wait for them.

    With restarts, or if hosts may join and leave, they are restarted from the last checkpoint. Log what this host waits
    for and why processes are restarted.

    Raise Interrupted if a signal stopped them after saving, InputError or WorkError if one failed (its own message has
    the reason), WorkError if other hosts are missing or lost.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

    from artel.launching.agent import FORWARDED_SIGNALS, Agent

    def on_restart(failures: Mapping[int, ProcessFailure]) -> None:
        logger.info("%s; restarting from the last checkpoint", str(_run_error(failures, folder)).splitlines()[0])

    hosts = rendezvous.hosts
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process sets it again; without it torchrun warns
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(forwarded.name for forwarded in FORWARDED_SIGNALS)
    try:
        handler = rendezvous.handler(folder)
        program, *options = module_command("artel")
        spec = WorkerSpec(
            role="artel",
            local_world_size=processes,
            rdzv_handler=handler,
            entrypoint=program,
            args=(*options, *arguments),
            max_restarts=hosts.restarts,
            monitor_interval=0.2,
            local_addr=rendezvous.local_address,
        )
        num_hosts = f"{hosts.least} to {hosts.count}" if hosts.elastic else f"{hosts.count}"
        message = f"waiting for the other hosts ({num_hosts} in all) at {hosts.where}"
        wait_for_hosts = partial(log_waiting, folder, message, leads=rendezvous.leads)
        # The first process handles signals and shows progress for all.
        with answer_interrupts_with(None), hide_elapsed():
            result = Agent(spec, hosts, on_restart, wait_for_hosts if hosts.count > 1 else nullcontext).run()
        if result is None:  # the other hosts were enough, to the end
            return
        # Hosts that may join and leave do not stop when this one fails.
        if not (result.is_failed() and hosts.elastic):
            handler.shutdown()
    except SignalException:
        raise Interrupted.at("", "stopped", folder.continue_hint) from None
    except RendezvousClosedError:
        what, fix = "another host has ended the run", "its output has the reason; the same command resumes"
        raise WorkError.at(hosts.where, what, fix) from None
    except (RendezvousError, DistError) as error:
        raise _rendezvous_error(rendezvous, error) from None
    if result.is_failed():
        raise _run_error(result.failures, folder)


@contextmanager
def log_waiting(folder: RunFolder, message: str, *, leads: bool) -> Iterator[None]:
    """Log `message` every few seconds inside the block. A stop signal ends the process at once.

    PyTorch waits in C++, where no signal handler of Python runs. The process that `leads` records the stop.
    """

    def last_line() -> str:
        if leads:
            mark_start(folder, "stopped")
        return f"stopped\n    {folder.continue_hint}"

    with exit_on_signal(last_line), reporting(lambda: message) if message else nullcontext():
        yield


def _run_error(failures: Mapping[int, ProcessFailure], folder: RunFolder) -> ArtelError:
    from artel.launching.agent import first_failure

    rank, status = first_failure(failures)
    return _process_error(rank, status, folder, failures[rank].pid)


def _rendezvous_error(rendezvous: Rendezvous, error: Exception) -> WorkError:
    """Return the error if the store does not answer, or too few hosts came."""
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    from artel.launching.rendezvous_handlers import ForeignValue

    hosts = rendezvous.hosts
    if isinstance(error, ForeignValue):
        what = f"another program has written to the store of this run's hosts: {error}"
        fix = f"block that port for other programs, or give all hosts the same secret ({SECRET_VARIABLE}), and restart"
        return WorkError.at(hosts.where, what, fix)
    fix = "run the same command on every host: the run resumes from its last checkpoint"
    if isinstance(error, RendezvousTimeoutError):
        what = f"fewer than {hosts.least} hosts have joined"
    elif rendezvous.leads:
        what = f"the rendezvous of the hosts failed: {error}"
    else:
        what = "the host of the rendezvous is lost: its artel has ended, or the network is down"
    return WorkError.at(hosts.where, what, fix)


def _process_error(rank: int, status: int, folder: RunFolder, pid: int) -> ArtelError:
    """Return the error of a process with this rank, exit status and process id."""
    from artel.training.faults.watchdog import HUNG
    from artel.training.faults.watchdog_process import SIGNAL

    where = f"process {rank} on {socket.gethostname()}"
    if status in (HUNG, -SIGNAL):
        fix = "the same command resumes from the last checkpoint; if it was only slow, set a longer train.hang_timeout"
        return WorkError.at(where, f"hung; the stacks of its threads are in {folder.hangs}", fix)
    if status == OutOfMemory.exit_code:
        fix = "it will use less memory next time: the same command resumes from the last checkpoint"
        return WorkError.at(where, "was out of memory", fix)
    if status == FAULT_EXIT_STATUS:
        fix = f"its traceback: {find_fault_file(pid) or 'is above'}; please report it"
        return WorkError.at(where, "failed because of a bug in artel", fix)
    if status < 0:
        fix = "Linux sends SIGKILL to a process that uses too much memory" if -status == signal.SIGKILL else ""
        return WorkError.at(where, f"was killed by {signal.Signals(-status).name}", fix)
    problem = Problem(where, f"exited with status {status}", "its message above has the reason")
    kinds: dict[int, type[ArtelError]] = {2: InputError, 130: Interrupted}
    return kinds.get(status, WorkError)([problem])
