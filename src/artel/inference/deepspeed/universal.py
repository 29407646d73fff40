"""A run's checkpoint in DeepSpeed's own format, from which an engine of any stage and number of processes goes on.

    DIR/latest_universal                          the name of the folder beside it
    DIR/global_step500/zero/NAME/fp32.pt          a parameter, float32
                                 exp_avg.pt       Adam's averages of its gradient, and of that squared
                                 exp_avg_sq.pt
                                 step.pt          how often it was stepped
                            optimizer_state.pt    what all parameters have together
                       mp_rank_00_model_states.pt counts; the other name is where stage 3 looks for them
                       zero_pp_rank_0_mp_rank_00_model_states.pt

It is what DeepSpeed's ds_to_universal.py makes (Lian et al. 2024, "Universal Checkpointing"), read with
`"checkpoint": {"load_universal": true}` in its file. Betas, epsilon and weight decay stay those of whoever goes on; the
learning rate is the run's next one until their schedule's first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from artel.config import RunConfig, load_run
from artel.errors import InputError, Problem
from artel.inference.deepspeed.from_checkpoint import exchange_problems
from artel.objectives import objective_of
from artel.parallel.deepspeed.checkpoint import AVERAGES
from artel.preparing import Prepared
from artel.storage import disk_errors
from artel.training import RunFolder
from artel.training.checkpoint.format import Progress, read_progress
from artel.training.checkpoint.sharded_files import read_shards, stored_shapes
from artel.training.schedule import rate, rate_by_time, run_length

_CHUNK_BYTES = 2**30
_VERSION = "0.19.8"  # of DeepSpeed, whose format this is; it refuses files without a version


def newest_checkpoint(name: str) -> tuple[RunConfig, Path]:
    """The run in folder `name` and its newest checkpoint. Raises InputError unless DeepSpeed's format can hold it."""
    folder = RunFolder(Path(name))
    if not folder.config.is_file():
        fix = "give a run's folder, or leave --deepspeed out"
        raise InputError.at(name, "is no run, and has no optimizer's state", fix)
    run = load_run(name)
    folder.check_config(run)
    folder.check_own_checkpoints()
    problems = exchange_problems(run)
    newest = folder.checkpoints / "latest"
    if not newest.exists():
        problems.append(Problem(name, "has no checkpoint", "train it with checkpoint.every: 500, or so"))
    if problems:
        raise InputError(problems)
    return run, newest.resolve()


def write_universal(run: RunConfig, prepared: Prepared, checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint of `run` into `folder`, some parameters at a time. Raises InputError where the disk fails."""
    progress = read_progress(checkpoint)
    step = progress.step
    counts = {
        "global_steps": step,
        "global_samples": step * run.train.batch,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _VERSION,
        "buffer_names": [],
        "module": {},
        "lr_scheduler": _scheduler(step),
    }
    groups = [{"lr": _next_rate(run, prepared, progress)}]
    count = torch.tensor(float(step))
    with disk_errors(folder):
        whole = folder / f"global_step{step}"
        zero = whole / "zero"
        parameters = 0
        for name, tensors in _parameters(checkpoint):
            parameters += 1
            place = zero / name
            place.mkdir(parents=True)
            for key, tensor in tensors.items():
                _save({"param": tensor}, place / f"{key}.pt")
            _save(count, place / "step.pt")
        # ZeRO stages 1 and 2 pair these groups with their own, whatever their number; stage 3 reads the first.
        shared = {
            "param_groups": groups * parameters,
            "ds_version": _VERSION,
            "optimizer_state_dict": {"state": {0: {"step": count}}, "param_groups": groups},
        }
        _save(shared, zero / "optimizer_state.pt")
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            _save(counts, whole / name)
        (folder / "latest_universal").write_text(whole.name, encoding="utf-8")


def _parameters(checkpoint: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each trained parameter in float32 and Adam's averages of it, by DeepSpeed's names."""
    shapes = stored_shapes(checkpoint)
    stepped = [name.removesuffix(f"|{AVERAGES[0]}") for name in shapes if name.endswith(f"|{AVERAGES[0]}")]
    while stepped:
        read: dict[str, torch.Tensor] = {}
        names = []
        while stepped and sum(tensor.nbytes for tensor in read.values()) < _CHUNK_BYTES:
            names.append(stepped.pop(0))
            for stored in (names[-1], *(f"{names[-1]}|{key}" for key in AVERAGES)):
                shape, dtype = shapes[stored]
                read[stored] = torch.empty(shape, dtype=dtype)
        read_shards(checkpoint, read)
        for name in names:
            averages = {key: read.pop(f"{name}|{key}").float() for key in AVERAGES}
            yield name, {"fp32": read.pop(name).float(), **averages}


def _next_rate(run: RunConfig, prepared: Prepared, progress: Progress) -> float:
    """The learning rate of the step after those that are done."""
    objective, store = objective_of(run, prepared.tokenizer()), prepared.open()
    steps = run_length(run, objective.dataset(store.train), store.train).steps
    if steps is None:
        return run.train.learning_rate * rate_by_time(run.train, progress.step, progress.share, progress.warmup)
    return run.train.learning_rate * rate(run.train, min(progress.step, steps - 1), steps, progress.warmup)


def _scheduler(step: int) -> dict[str, Any]:
    """The state of a scheduler after `step` steps, for DeepSpeed's schedulers, which have one entry, and PyTorch's."""
    return {"last_batch_iteration": step - 1, "last_epoch": step, "_step_count": step + 1, "lr_lambdas": []}


def _save(content: Any, file: Path) -> None:
    with file.open("wb") as out:  # so that a full disk is an OSError
        torch.save(content, out)
