"""torch.compile layer by layer: one graph serves all layers, and what cannot be compiled costs only itself."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from artel.models.choice import Choice
from artel.models.cpu.build import library, uninterrupted_compilers

OFF = "off"
_LONG = 1000  # steps
_FOR_PROCESSORS: dict[str, Any] = {
    # A tanh from exponentials: GELU as GPT-2 has it took 6.5 ms forward and 6.3 back (2,048 x 1,536 in bf16, two cores
    # with AVX-512), then 2.7 and 4.9, with the same distance to GELU in float64.
    "cpp.use_decompose_tanh": True,
    # AVX2 and AVX-512 are taken where the processor says that it has them. PyTorch would try in every process whether
    # the C++ compiler knows them too, which all that can build with PyTorch do; what is newer it still tries.
    "cpp.vec_isa_ok": True,
}

# Asked at every micro-batch, where to look through all layers would take time.
_COMPILED: WeakSet[nn.Module] = WeakSet()


def compile_choice(asked: str, device: torch.device, steps: int) -> Choice:
    """`layers` or `off`, and why.

    `auto` compiles on a GPU, and on a CPU that has a C++ compiler for runs of over 1,000 steps: there it takes
    about 30 s and gains a quarter (1,417 instead of 1,126 tokens/s for a GPT-2 of 6 × 384 on two cores).
    """
    if asked == "off":
        return Choice(OFF, "train.compile: off")
    if asked == "on":
        return Choice("layers", "train.compile: on")
    if device.type == "cuda":
        return Choice("layers", "on a GPU, always")
    if device.type != "cpu":
        return Choice(OFF, f"not on {device.type}")
    if not (shutil.which("g++") or shutil.which("clang++")):
        return Choice(OFF, "no C++ compiler is installed (g++ or clang++)")
    if steps <= _LONG:
        return Choice(OFF, f"{steps:,} steps: half a minute of compiling pays from about {_LONG:,} on")
    return Choice("layers", f"{steps:,} steps on a processor")


def compile_layers(model: PreTrainedModel, *, fixed: bool) -> None:
    """Have PyTorch compile the repeated layers in place when they first run.

    With `fixed`, batches are of one shape and graphs are made for it alone; else the second length that is seen makes
    them take any.
    """
    options: dict[str, Any] = {}
    if model.device.type == "cpu":
        from artel.models.cpu.matmul_pass import RowByRow  # which imports the compiler

        options = {**_FOR_PROCESSORS, "post_grad_custom_pre_pass": RowByRow()}
        _look_ahead(options)
    for layer in repeated_layers(model):
        if isinstance(layer, FSDPModule):  # its hooks, which gather weights, stay outside of the graph
            layer.forward = torch.compile(layer.forward, dynamic=False if fixed else None, options=options)
        else:
            layer.compile(dynamic=False if fixed else None, options=options)
    _COMPILED.add(model)


def has_compiled_layers(model: nn.Module) -> bool:
    """Whether `compile_layers` has prepared this model, and they could be compiled."""
    return model in _COMPILED


def _look_ahead(options: dict[str, Any]) -> None:
    """Do, while PyTorch traces the layers, what would have to be waited for later.

    What it needs before it can take their graphs from its cache: the sum of its own files (0.5 s), and what newer
    instructions can be used (with AMX six processes of 0.2 s, one after another). It remembers both itself, and finds
    them out again where this fails. And what artel has in C++ itself, which is built once.
    """
    from torch._inductor import codecache, config, cpu_vec_isa

    def find(what: Callable[[], object]) -> None:
        with suppress(Exception), config.patch(options):
            what()

    built = (partial(library, name) for name in ("cross_entropy", "attention"))
    for what in (codecache.torch_key, cpu_vec_isa.pick_vec_isa, *built):
        threading.Thread(target=find, args=(what,), daemon=True).start()


def try_compiled(model: PreTrainedModel, step: Callable[[], object]) -> str | None:
    """Run `step`, forward and backward, for the first time; if that fails, leave the layers as they are and run it so.

    Why they could not be compiled, or None. What fails without compiling as well is raised.
    """
    try:
        with uninterrupted_compilers():
            step()
    except Exception as error:  # each part of the compiler has kinds of its own, and so has each architecture
        reason = " ".join(str(error).split())[:300] or type(error).__name__
    else:
        return None
    _COMPILED.discard(model)
    for layer in repeated_layers(model):
        layer._compiled_call_impl = None
        if isinstance(layer, FSDPModule):
            layer.forward = layer.forward._torchdynamo_orig_callable  # type: ignore[attr-defined]
    step()
    return reason


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The model's layers, as the model itself names them to whoever wants to split it."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [
        layer
        for stack in model.modules()
        if isinstance(stack, nn.ModuleList)
        for layer in stack
        if names & {kind.__name__ for kind in type(layer).__mro__}  # fully_shard puts a class of its own before it
    ]
