"""One process that hangs, is slow, or is stopped while it trains; collectives that wait as long as they are told.

    python tests/support/workers/hang_cases.py FOLDER

imports torch once and forks a process for each case. FOLDER/CASE.yaml is the run of a case, FOLDER/CASE its folder.
Prints, as JSON, the status of each as os.waitpid gives it.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch

from artel.config import load_run
from artel.parallel import World
from artel.preparing import prepare
from artel.training import evaluation as judging
from artel.training.loop import train
from support.runs import write_run
from support.waiting import last, wait_until

LIMIT = 4.0
"""Seconds of train.hang_timeout."""
STOPPED = 9.0
"""Seconds for which a process is stopped: longer than both watchers wait."""


class Hanging:
    def __init__(self, hang):
        self._hang = hang

    def __call__(self, run):
        if run.step == 3:
            self._hang()


def hangs_here():
    threading.Event().wait()


def hangs_with_pythons_lock():
    ctypes.PyDLL(None).sleep(600)  # which, unlike CDLL, does not let go of it


def trained(folder, case, callbacks=(), **changes):
    file = write_run(folder / f"{case}.yaml", train={"hang_timeout": LIMIT, **changes.pop("train", {})}, **changes)
    run = load_run(str(file))
    train(run, prepare(run), World(0, 1, 0, torch.device("cpu")), callbacks)


def free(folder):
    trained(folder, "free", [Hanging(hangs_here)])


def held(folder):
    trained(folder, "held", [Hanging(hangs_with_pythons_lock)])


def slow(folder):
    """A validation that takes longer than the limit, batch by batch."""
    right, slept = judging.evaluation_rows, []

    def slowly(*arguments):
        slept.append(LIMIT / 4)
        last(LIMIT / 4)
        return right(*arguments)

    judging.evaluation_rows = slowly
    trained(folder, "slow", validate={"every": 3, "blocks": 20}, train={"micro_batch": 2, "steps": 3})
    assert sum(slept) > 2 * LIMIT, slept


def stopped(folder):
    trained(folder, "stopped", train={"steps": 100_000, "batch": 4}, checkpoint={"every": "never"})


def stop_and_go_on(process, folder):
    """Then it is asked to end, which it does only if it still trains."""
    file = folder / "stopped" / "metrics.jsonl"
    wait_until(lambda: lines(file) >= 5)
    os.kill(process, signal.SIGSTOP)
    last(STOPPED)
    os.kill(process, signal.SIGCONT)
    before = lines(file)
    wait_until(lambda: lines(file) >= before + 200)
    os.kill(process, signal.SIGTERM)


def lines(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


def waits(rank, port, pipe):
    """0 where a collective for which the other never comes fails after the time it was told, in every group; else 1."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]), None]
    World(rank, 2, rank, torch.device("cpu")).set_timeout(1.5)
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)  # they have met
    reading, writing = pipe
    if rank:
        os.read(reading, 1)
        os._exit(0)
    for group in groups:
        with pytest.raises(RuntimeError, match="1500ms"):  # gloo names the time that it was given
            dist.all_reduce(torch.ones(1), group=group)
    os.write(writing, b".")


def forked(work, *arguments):
    child = os.fork()
    if child:
        return child
    status = 1
    torch.set_num_threads(1)
    try:
        work(*arguments)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        status = getattr(error, "exit_code", 1)
    finally:
        sys.stderr.flush()
        os._exit(status)


def main():
    folder, statuses = Path(sys.argv[1]), {}
    for case in (free, held, slow, stopped):
        child = forked(case, folder)
        if case is stopped:
            stop_and_go_on(child, folder)
        statuses[case.__name__] = os.waitpid(child, 0)[1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipe = os.pipe()
    ranks = [forked(waits, rank, port, pipe) for rank in range(2)]
    statuses["waits"] = max(os.waitpid(rank, 0)[1] for rank in ranks)
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
