"""torch.compile, layer by layer: all layers share one graph, and code outside the layers does not have to compile."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from artel.models import Choice
from artel.models.cpu.build import load_library, uninterrupted_compilers

OFF = "off"
_MIN_STEPS, _MIN_SECONDS = 1000, 300  # shorter runs on a CPU are not worth compiling
_CPU_OPTIONS: dict[str, Any] = {
    # tanh from exponentials: GPT-2's GELU took 2.7 ms forward and 4.9 backward instead of 6.5 and 6.3 (2,048 x 1,536 in
    # bf16, two cores with AVX-512), with the same error against GELU in float64.
    "cpp.use_decompose_tanh": True,
    # Trust the processor's flags for AVX2 and AVX-512. Otherwise every process tests the C++ compiler for them, and
    # every compiler that can build against PyTorch supports them. Newer instructions are still tested.
    "cpp.vec_isa_ok": True,
}


def compile_choice(
    requested: str, device: torch.device, steps: int | None, budget: float | None = None, quantize: str = "none"
) -> Choice:
    """Choose `layers` or `off`, with the reason, for `train.compile` in a run of `steps`, or of `budget` seconds.

    `quantize` is the value of `model.quantize`.

    `auto` compiles on a GPU, and on a CPU with a C++ compiler in runs of over 1,000 steps or five minutes. On a CPU it
    takes about 30 s and makes training a quarter faster (1,417 instead of 1,126 tokens/s for a GPT-2 of 6 × 384 on two
    cores): break-even after two and a half minutes.
    """
    if requested == "off":
        return Choice(OFF, "train.compile: off")
    if requested == "on":
        return Choice("layers", "train.compile: on")
    if quantize == "int8":
        return Choice(OFF, "bitsandbytes' int8 layers break the graph, and each part is compiled again for each size")
    if device.type == "cuda":
        return Choice("layers", "on a GPU, always")
    if device.type != "cpu":
        return Choice(OFF, f"not on {device.type}")
    if not (shutil.which("g++") or shutil.which("clang++")):
        return Choice(OFF, "no C++ compiler is installed (g++ or clang++)")
    if budget is not None:
        if budget < _MIN_SECONDS:
            return Choice(OFF, f"half a minute of compiling pays in runs of {_MIN_SECONDS} s or more")
        return Choice("layers", f"{budget:,.0f} s on a processor")
    if steps is not None and steps <= _MIN_STEPS:
        return Choice(OFF, f"{steps:,} steps: half a minute of compiling pays from about {_MIN_STEPS:,} on")
    return Choice("layers", "a long run on a processor" if steps is None else f"{steps:,} steps on a processor")


def compile_layers(model: PreTrainedModel, *, fixed: bool) -> None:
    """Compile the repeated layers in place. PyTorch compiles them when they first run.

    With `fixed`, all batches have the same shape, and graphs are specialized to it. Otherwise the second length
    compiles graphs for any length.
    """
    # It would split layers at the bucket boundaries of DistributedDataParallel. Here each layer is its own graph.
    if dist.is_initialized():
        torch._dynamo.config.optimize_ddp = False
    options: dict[str, Any] = {}
    if model.device.type == "cpu":
        from artel.models.cpu.matmul_pass import ContiguousMatmul  # imports the compiler

        options = {**_CPU_OPTIONS, "post_grad_custom_pre_pass": ContiguousMatmul()}
        _warm_up(options)
    for layer in repeated_layers(model):
        if isinstance(layer, FSDPModule):  # the hooks that gather weights stay outside the graph
            layer.forward = torch.compile(layer.forward, dynamic=False if fixed else None, options=options)
        else:
            layer.compile(dynamic=False if fixed else None, options=options)


def _warm_up(options: dict[str, Any]) -> None:
    """Precompute slow values in threads while PyTorch traces the layers.

    To read its cache PyTorch needs a hash of its own files (0.5 s) and the newer instructions available (with AMX six
    processes of 0.2 s, one after another). It caches both, and computes them itself if a thread fails. The threads also
    build artel's C++ kernels.
    """
    from torch._inductor import codecache, config, cpu_vec_isa

    def run(task: Callable[[], object]) -> None:
        with suppress(Exception), config.patch(options):
            task()

    kernels = (partial(load_library, name) for name in ("cross_entropy", "attention"))
    for task in (codecache.torch_key, cpu_vec_isa.pick_vec_isa, *kernels):
        threading.Thread(target=run, args=(task,), daemon=True).start()


def try_compiled(model: PreTrainedModel, step: Callable[[], object], discard_step: Callable[[], object]) -> str | None:
    """Run `step` (forward and backward), which compiles the layers. If it fails, discard it and run it uncompiled.

    Return the reason if compiling failed, else None. Raise an error that also occurs without compiling.
    """
    try:
        with uninterrupted_compilers():
            step()
    except Exception as error:  # the compiler and the architectures raise various errors
        reason = " ".join(str(error).split())[:300] or type(error).__name__
    else:
        return None
    discard_step()
    for layer in repeated_layers(model):
        layer._compiled_call_impl = None
        if isinstance(layer, FSDPModule):
            layer.forward = layer.forward._torchdynamo_orig_callable  # type: ignore[attr-defined]
    step()
    return reason


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's layers: modules in a ModuleList whose class the model lists in `_no_split_modules`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [
        layer
        for stack in model.modules()
        if isinstance(stack, nn.ModuleList)
        for layer in stack
        if names & {cls.__name__ for cls in type(layer).__mro__}  # fully_shard puts its own class first
    ]
