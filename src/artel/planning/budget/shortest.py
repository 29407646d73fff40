"""The shortest `train.budget`, as far as it is known before any text is read: the least that its steps take.

That is the FLOPs of four over the most that the machine reaches: the peak of a GPU's data sheet, or the fastest product
of a CPU, which is measured.
"""

from __future__ import annotations

import math
import time

import torch
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.config.schema.quantities import duration
from artel.errors import InputError
from artel.models.device import pick_precision
from artel.models.flops import data_sheet, device_name, flops_a_token
from artel.objectives import objective_type
from artel.parallel import local_device
from artel.training.budget import FEWEST_STEPS

_ROOM = 2.0
"""A CPU is measured beside other programs: only what takes longer at twice its rate is refused."""
_SIDE, _SECONDS = 512, 0.2
"""Of the product that is measured, again and again: it takes a millisecond, in which nothing may come between."""
_FROZEN = 2 / 3
"""Of the FLOPs, where weights are frozen: their gradients are not computed."""


def check_budget(run: RunConfig, model: PreTrainedModel, world_size: int, on_host: int) -> None:
    """Raise InputError where the first steps outlast `train.budget` here. `model` may be on the meta device."""
    least = least_seconds(run, model, world_size, on_host)
    budget = run.train.budget
    if least is None or budget is None:
        return
    room = _ROOM if local_device().type == "cpu" else 1.0
    if least > room * budget:
        tokens = run.train.batch * run.data.block
        shortest = duration(rounded_up(least))
        what = f"{duration(budget)} is too short: {FEWEST_STEPS} steps of {tokens:,} tokens take {shortest}"
        fix = f"write {shortest} or more, a smaller train.batch, or a smaller model"
        raise InputError.at("train.budget", f"{what} at this machine's fastest", fix)


def rounded_up(seconds: float) -> int:
    """To whole seconds; to minutes from two of them on."""
    unit = 1 if seconds < 120 else 60
    return math.ceil(seconds / unit) * unit


def least_seconds(run: RunConfig, model: PreTrainedModel, world_size: int, on_host: int) -> float | None:
    """Seconds of the fewest steps that a run on a budget takes, at the most FLOP/s of this machine; None: not known."""
    kind = objective_type(run)
    if not kind.packs_text:
        return None
    rate, flops = _most_flops_per_second(run), flops_a_token(model.config, kind.auto_class, run.data.block)
    if rate is None or flops is None:
        return None
    if local_device().type == "cpu":  # its cores are shared by all processes of a host
        rate /= on_host
    trained = _FROZEN if run.model.lora is not None or run.model.freeze else 1.0
    return FEWEST_STEPS * run.train.batch * run.data.block * flops * trained / (rate * world_size)


def _most_flops_per_second(run: RunConfig) -> float | None:
    """Of a GPU by its data sheet, None where it has none; of the CPU by its fastest product."""
    device = local_device()
    if device.type != "cpu":
        return max((peak * 1e12 for peak in data_sheet(device_name(device)).values()), default=None)
    precision = pick_precision(run.train.precision, device, run.train.weights)
    matrix = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    fastest, end = math.inf, time.perf_counter() + _SECONDS
    while (started := time.perf_counter()) < end:
        torch.mm(matrix, matrix)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * _SIDE**3 / fastest
