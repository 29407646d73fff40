"""`artel train` as forks of one process that has imported everything: a start costs a tenth of a second, not 10 to 20.

What is forked calls artel's own command line. One function is replaced, `artel.launching.start_run.launch`: instead of
having torchrun start a process for each rank, it lets go of ranks that were forked before any text was prepared (a
process that has trained a tokenizer has threads, which do not survive a fork). Its ranks are not ended when one of them
is: they must notice by themselves.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

POLL = 0.0005
"""Seconds between two looks at what is waited for."""
# Below 32768, where Linux begins to hand out ports by itself.
_PORTS = range(15000, 31000)
_NUMBER = 4  # bytes of a port in the pipe
_RUNNING = 1000  # no exit status
_PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)
_IMPORTED = (
    "artel.cli.main", "artel.training.loop", "artel.training.run_folder", "artel.preparing.assembly",
    "artel.preparing.engines", "artel.preparing.selection", "artel.launching.start_run",
    "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.checkpoint.hf_storage",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.convert_slow_tokenizer", "transformers.tokenization_utils_tokenizers", "tokenizers.trainers",
    "artel.objectives.causal",
)  # fmt: skip

_context = multiprocessing.get_context("fork")


def import_all() -> None:
    """Import what a training needs; once, before the first `Start`."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "TORCH_CPP_LOG_LEVEL": "ERROR",
                   "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # fmt: skip
    for name in _IMPORTED:
        importlib.import_module(name)


class Start:
    """One start of `artel train FILE` with so many ranks, in a session of its own; what it says goes to `log`."""

    def __init__(self, file: Path, ranks: int, log: Path) -> None:
        self.log = log
        self._ranks = ranks
        self._shared = _Shared(ranks)
        self.began = time.monotonic()
        self._leader = _context.Process(target=_lead, args=(file, self._shared, log))
        self._leader.start()
        while not self._shared.is_ready.value and not self.has_ended:
            time.sleep(POLL)

    @property
    def pids(self) -> set[int]:
        return {self._pid, *self._shared.pids}

    @property
    def _pid(self) -> int:
        assert self._leader.pid is not None
        return self._leader.pid

    @property
    def has_ended(self) -> bool:
        return self._leader.exitcode is not None

    @property
    def is_launched(self) -> bool:
        """Whether the ranks have begun: before that, the leader prepares the text alone."""
        return self._shared.is_launched.value

    @property
    def statuses(self) -> list[int | None]:
        """How each rank has ended, where the leader lived to see it."""
        return [None if status == _RUNNING else status for status in self._shared.statuses]

    def kill_all(self) -> None:
        """SIGKILL to everything that this start has started; waits until nothing of it is left."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._leader.join()
        self._wait_for_group()

    def kill_one(self, rank: int) -> None:
        """SIGKILL to one rank, or to the leader while it is alone; the others are left to end by themselves."""
        with suppress(ProcessLookupError):
            os.kill(self._shared.pids[rank] if self.is_launched else self._pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """Its exit status, when all of it has ended; None when it had to be ended after so many seconds."""
        self._leader.join(seconds)
        if self.has_ended and self._wait_for_group():
            return self._leader.exitcode
        self.kill_all()
        return None

    def _wait_for_group(self) -> bool:
        """Whether all processes of the session are gone within ten seconds."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                os.killpg(self._pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(POLL)
        return False


class _Shared:
    """What the leader of a start tells its starter, in memory that both have."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.pids: Any = _context.RawArray(ctypes.c_int, ranks)
        self.statuses: Any = _context.RawArray(ctypes.c_int, [_RUNNING] * ranks)
        self.is_ready: Any = _context.RawValue(ctypes.c_bool, False)
        self.is_launched: Any = _context.RawValue(ctypes.c_bool, False)


def _lead(file: Path, shared: _Shared, log: Path) -> None:
    """The process that a user starts: alone it is the run; else it prepares, and lets go of the ranks."""
    import artel.launching.start_run

    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a benchmark that is ended leaves nothing running
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    if shared.ranks == 1:
        shared.pids[0], shared.is_ready.value = os.getpid(), True
        _artel("train", str(file))
    ports, let_go = os.pipe()
    ranks = [_context.Process(target=_work, args=(rank, shared.ranks, file, ports, let_go))
             for rank in range(shared.ranks)]  # fmt: skip
    for rank in ranks:
        rank.start()
    os.close(ports)
    shared.pids[:], shared.is_ready.value = [rank.pid or 0 for rank in ranks], True
    artel.launching.start_run.launch = partial(_launch, ranks, let_go, shared)  # type: ignore[assignment]
    try:
        _artel("train", str(file), "--nproc", str(shared.ranks))
    finally:
        if not shared.is_launched.value:  # the run is complete, or was refused: the ranks read the pipe's end
            os.close(let_go)


def _launch(ranks: list[BaseProcess], let_go: int, shared: _Shared, *_: object) -> None:
    """In place of artel.launching.start_run.launch. Raises WorkError when a rank fails."""
    from artel.errors import WorkError

    os.write(let_go, _free_port().to_bytes(_NUMBER, "little") * len(ranks))
    shared.is_launched.value = True
    for rank, process in enumerate(ranks):
        process.join()
        shared.statuses[rank] = process.exitcode or 0
    if any(process.exitcode for process in ranks):
        raise WorkError.at("", f"the processes ended with {[process.exitcode for process in ranks]}")


def _work(rank: int, ranks: int, file: Path, ports: int, let_go: int) -> None:
    """A rank, with the environment in which torchrun starts one."""
    from artel.launching.start_run import LAUNCHED

    leader = os.getppid()
    os.close(let_go)
    port = int.from_bytes(os.read(ports, _NUMBER), "little")
    if not port:  # the leader has ended
        return
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHED: str(leader)}  # fmt: skip
    _artel("train", str(file))


def _artel(*arguments: str) -> None:
    from artel.cli.main import main

    sys.argv = ["artel", *arguments]
    main()  # ends with SystemExit, which multiprocessing takes for the process's status


def _free_port() -> int:
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
