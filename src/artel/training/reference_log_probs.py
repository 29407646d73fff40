"""The untrained model's outputs for each sample (for DPO its log-probabilities): computed once, kept in the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from artel.errors import InputError
from artel.objectives import Objective
from artel.parallel import ParallelStrategy, World
from artel.storage import write_file
from artel.tokens import StoreSplit, TokenStore
from artel.training.evaluation import News, Validation

_NAMES = {"train": False, "validation": True}


def set_reference(
    objective: Objective,
    store: TokenStore,
    strategy: ParallelStrategy,
    world: World,
    micro_batch: int,
    file: Path,
    resumes: bool,
    tell: Callable[[str], None],
) -> None:
    """Give an objective that needs a reference the untrained model's outputs for each sample.

    When the run `resumes`, `file` has them; a file of a run which never reached a checkpoint may be of another model.
    The file holds `train` and `validation`, float64 (samples, len(objective.outputs)), and the store's digest.
    """
    if not objective.needs_reference:
        return
    known = _read(file, store.digest) if resumes and file.is_file() else None
    world.barrier()  # all look before the first one writes
    if known is None:
        what = "computing what the model says of each answer before training"
        tell(what)
        parts = {"train": store.train, "validation": store.validation}
        known = {
            name: reference_outputs(objective, part, strategy, world, micro_batch, News(tell, f"{what} ({name}):"))
            for name, part in parts.items()
            if part.samples
        }
        if world.first:
            write_file(file, save(known, metadata={"store": store.digest}))
    for name, outputs in known.items():
        objective.set_reference(outputs.numpy(), validation=_NAMES[name])


def reference_outputs(
    objective: Objective, part: StoreSplit, strategy: ParallelStrategy, world: World, micro_batch: int, news: News
) -> torch.Tensor:
    """The model's outputs for each sample of a split, float64 (samples, len(objective.outputs))."""
    return torch.from_numpy(Validation(objective, part).evaluate(strategy, micro_batch, None, news)[1])


def _read(file: Path, digest: str) -> dict[str, torch.Tensor] | None:
    try:
        return _read_whole(file, digest)
    except (OSError, SafetensorError) as error:
        fix = "put a copy of it back, or begin anew with --restart: the model is no longer what it was"
        raise InputError.at(str(file), f"is damaged: {error}", fix) from None


def _read_whole(file: Path, digest: str) -> dict[str, torch.Tensor] | None:
    with safe_open(file, framework="pt") as tensors:
        if (tensors.metadata() or {}).get("store") != digest:
            return None
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # not a mapping
