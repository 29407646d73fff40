"""Two ranks of a run on a budget, each with a clock of its own."""

import os
from typing import Any

import torch

from artel.config import load_run
from artel.parallel import World
from artel.preparing import prepare
from artel.training.loop import train
from support.machine import Machine


def train_on_a_budget(rank: int, world: int) -> dict[str, Any]:
    run = load_run(os.environ["RUN_FILE"])
    machine = Machine(lambda now: 0.5 if rank == 0 else 1.5, starts_at=1000.0 * rank)
    prepared = prepare(run)
    train(run, prepared, World(rank, world, rank, torch.device("cpu"), world), [machine], machine.clock)
    return {"shares": machine.shares, "rates": machine.rates, "seconds": machine.seconds}
