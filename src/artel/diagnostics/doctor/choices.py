"""What artel would choose for a run on this machine, each choice with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.diagnostics.doctor.software import install
from artel.host import usable_cores
from artel.models import Choice
from artel.models.attention_masks import attention_choice
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import compile_choice
from artel.models.device import bf16_is_native, pick_precision
from artel.objectives import objective_type
from artel.registry import OPTIMIZERS


@dataclass(frozen=True, slots=True)
class Case:
    """A run, or the defaults; its model on the meta device, where it is known."""

    run: RunConfig
    device: torch.device
    model: PreTrainedModel | None


def choices(case: Case) -> dict[str, Choice]:
    """Every choice by name. Raises InputError where the device cannot do what the run requires."""
    return {name: choice for name, choose in CHOICES.items() if (choice := choose(case)) is not None}


def _precision(case: Case) -> Choice:
    train, native = case.run.train, bf16_is_native(case.device)
    value = pick_precision(train.precision, case.device, train.weights)
    if train.precision != "auto":
        return Choice(value, f"train.precision: {train.precision}")
    if native:
        return Choice(value, f"the {_called(case.device)} multiplies bf16 in hardware")
    if value == "bf16":
        return Choice(value, "train.weights: bf16")
    return Choice(value, f"the {_called(case.device)} has no instructions for bf16 and would emulate it, very slowly")


def _attention(case: Case) -> Choice | None:
    if case.model is None:
        return None
    use_artel_attention(case.model)
    return attention_choice(case.model, case.device, documents=objective_type(case.run).isolates_documents(case.run))


def _compile(case: Case) -> Choice:
    mode, steps, budget = case.run.train.compile, case.run.train.steps, case.run.train.budget
    quantize = case.run.model.quantize
    if steps is not None or budget is not None:
        return compile_choice(mode, case.device, steps, budget, quantize)
    short, long = (compile_choice(mode, case.device, steps, None, quantize) for steps in (1, 10**9))
    if short.value == long.value:
        return Choice(short.value, short.why)
    return Choice(f"{long.value} in a long run, {short.value} in a short one", "compiling takes its time first")


def _optimizer(case: Case) -> Choice:
    name = case.run.train.optimizer
    rounded = "; weights in bf16, rounded stochastically" if case.run.train.weights == "bf16" else ""
    return Choice(name, f"{OPTIMIZERS[name].summary}{rounded}")


def _micro_batch(case: Case) -> Choice:
    value = case.run.train.micro_batch
    if value == "auto":
        return Choice("auto", "what fits is found by trying when the run starts, and remembered")
    return Choice(str(value), f"train.micro_batch: {value}")


def _encoder(case: Case) -> Choice:
    if find_spec("fastokens") is None:
        return Choice("tokenizers", f"fastokens, up to twenty times as fast, is not installed: {install('fast')}")
    return Choice("fastokens", "it is installed; of large texts, for as long as its ids are those of tokenizers")


def _threads(case: Case) -> Choice:
    value = case.run.train.threads
    if value is not None:
        return Choice(str(value), f"train.threads: {value}")
    return Choice(str(usable_cores()), "one for each core that can be used, shared by the processes of a run")


CHOICES: dict[str, Callable[[Case], Choice | None]] = {
    "precision": _precision,
    "attention": _attention,
    "compile": _compile,
    "optimizer": _optimizer,
    "micro-batch": _micro_batch,
    "threads": _threads,
    "text encoder": _encoder,
}
"""One line for each; None where it depends on a model that is not known."""


def _called(device: torch.device) -> str:
    return "processor" if device.type == "cpu" else "GPU"
