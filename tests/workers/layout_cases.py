"""Runs given run files one after another in the same processes (tests/ranks.py): what each was refused for, or null."""

import os
import sys
import time
import traceback
from pathlib import Path

import torch

from artel.config import load_run
from artel.errors import ArtelError
from artel.parallel import Processes
from artel.preparing import prepare
from artel.training.loop import train

sys.path.append(str(Path(sys.prefix) / "deepspeed"))  # beside the environment: see the Makefile


def run_files(rank: int, world: int) -> list[str | None]:
    processes = Processes(rank, world, rank, torch.device("cpu"), on_host=int(os.environ.get("CASES_ON_HOST", world)))
    told = []
    for file in os.environ["CASES"].split(os.pathsep):
        run = load_run(file, [])
        said: list[str] = []
        start = time.monotonic()
        try:
            train(run, prepare(run, lambda _: None), processes, said.append)
            told.append(None)
        except ArtelError as error:
            told.append(str(error))
        except Exception:
            # Of the bench's many cases one may fail without the others: all ranks alike, or the time limit ends it.
            if "CASES_GO_ON" not in os.environ:
                raise
            told.append(f"FAILED {traceback.format_exc(limit=-4)}")
        if rank == 0 and "CASES_LOG" in os.environ:
            with Path(os.environ["CASES_LOG"]).open("a") as log:
                log.write(f"{Path(file).stem} {time.monotonic() - start:.1f} s {told[-1] or ''}\n")
    return told
