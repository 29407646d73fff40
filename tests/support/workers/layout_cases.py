"""Runs given run files one after another in the same ranks (support/ranks.py): what each was refused for, or null."""

import gc
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from artel.config import load_run
from artel.errors import ArtelError
from artel.models.compile import repeated_layers
from artel.parallel import World
from artel.preparing import prepare
from artel.training.loop import train

sys.path.append(str(Path(sys.prefix) / "deepspeed"))  # beside the environment: see the Makefile


def run_files(rank: int, world: int) -> list[str | None]:
    processes = World(rank, world, rank, torch.device("cpu"), on_host=int(os.environ.get("CASES_ON_HOST", world)))
    messages = []
    for file in os.environ["CASES"].split(os.pathsep):
        run = load_run(file, {})
        start = time.monotonic()
        try:
            prepared = prepare(run)
            train(prepared.config, prepared, processes)
            messages.append(None)
        except ArtelError as error:
            messages.append(str(error))
            # Shown where the launch fails: a refusal of one rank alone leaves the others waiting.
            sys.stderr.write(f"rank {rank}: {file}: {error}\n")
        if rank == 0 and "CASES_LOG" in os.environ:
            with Path(os.environ["CASES_LOG"]).open("a") as log:
                log.write(f"{Path(file).stem} {time.monotonic() - start:.1f} s {messages[-1] or ''}\n")
    return messages


def weight_norms(rank: int, world: int) -> list[float]:
    """The norm of all weights after the first step of each run, on this rank."""
    processes = World(rank, world, rank, torch.device("cpu"), on_host=world)
    norms = []

    def record(state) -> None:
        if state.step == 1:
            norms.append(float(state.strategy.norm_of(dict(state.strategy.model.named_parameters()))))

    for file in os.environ["CASES"].split(os.pathsep):
        run = load_run(file, {})
        train(run, prepare(run), processes, callbacks=[record])
    return norms


def held_at_the_step(rank: int, world: int) -> dict[str, int]:
    """Bytes that a process holds when the optimizer is about to step for the third time."""
    processes = World(rank, world, rank, torch.device("cpu"), on_host=world)
    run = load_run(os.environ["CASES"], {})
    results = {}

    def look(state) -> None:
        if state.step != 2:
            return
        model, norm = state.strategy.model, state.strategy.gradient_norm

        def looked_at():
            parameters = list(model.parameters())
            averages = [tensor.to_local() for tensor in state.optimizer.state().values() if isinstance(tensor, DTensor)]
            own = {
                **storages(parameters),
                **storages([each.grad for each in parameters if each.grad is not None]),
                **storages(averages),
            }
            gc.collect()
            alive = storages([item for item in gc.get_objects() if isinstance(item, torch.Tensor) and not item.is_meta])
            results["own"] = sum(own.values())
            results["other"] = sum(size for place, size in alive.items() if place not in own)
            return norm()

        state.strategy.gradient_norm = looked_at
        layers = repeated_layers(model)
        results["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        results["layer"] = max(sum(each.numel() for each in layer.parameters()) for layer in layers)

    train(run, prepare(run), processes, callbacks=[look])
    return results


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes by address of the memory that tensors lie in, each once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    memory = [tensor.untyped_storage() for tensor in local]
    return {each.data_ptr(): each.nbytes() for each in memory}
