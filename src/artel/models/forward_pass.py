"""Helpers for a forward and backward pass: profiler ranges, readable errors, cleanup after a failure."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function
from transformers import PreTrainedModel

import artel
from artel.errors import InputError
from artel.models.compile import repeated_layers
from artel.models.device import autocast_is_on

_TRANSFORMERS = Path(transformers.__file__).parent
_ARTEL = Path(artel.__file__).parent


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a named range for the trace (`artel: loss`) while PyTorch's profiler runs, else a null context.

    `record_function` takes at least 26 µs even while no profiler runs; this takes 1.6 µs (two busy cores).
    """
    is_recording = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # not in its __all__
    return record_function(name) if is_recording else nullcontext()


def keep_hidden_states_in_bf16(model: nn.Module) -> None:
    """Make the hidden states between layers bf16 under bf16 autocast, as with fully_shard, which gathers bf16 weights.

    Autocast alone looks float32 embeddings up in float32, and each layer adds its bf16 outputs to these. fp16 is not
    treated alike: the hidden states of some models exceed its range.
    """
    in_layers = {id(module) for layer in repeated_layers(model) for module in layer.modules()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module) not in in_layers:
            module.register_forward_hook(_round_to_bf16)


def _round_to_bf16(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
    device_type = output.device.type
    in_bf16 = autocast_is_on(device_type) and torch.get_autocast_dtype(device_type) == torch.bfloat16
    return output.to(torch.bfloat16) if in_bf16 and output.dtype == torch.float32 else None


def architecture_error(error: Exception, model: PreTrainedModel) -> InputError | None:
    """Return an InputError for an error from a model's code in transformers; None for any other error.

    An architecture may need inputs other than token ids, which only its authors know. Errors of libraries that it calls
    count too: a shape mismatch in torch still comes from that code.
    """
    location = None
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.is_relative_to(_TRANSFORMERS):
            location = f"{file.name}, line {frame.lineno}"
        elif file.is_relative_to(_ARTEL):
            location = None
    if location is None:
        return None
    message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    what = (
        f"{model.config.model_type} cannot be trained on this: its code in transformers fails ({location}): {message}"
    )
    return InputError.at("model", what, "check its sizes, or use another architecture")


def forget_failed_pass(model: nn.Module, within: Iterable[nn.Module] | None = None) -> None:
    """Drop the gradients and reset fully_shard's state, after an error in the forward or backward pass.

    Otherwise fully_shard would treat the next backward pass as the remainder of this one, and exchange no gradients.
    `within`: the modules that ran, if not the model itself. For a pipeline these are its stages, each a root module
    of fully_shard.
    """
    model.zero_grad(set_to_none=True)
    for module in [model] if within is None else within:
        _reset_roots(module)


def _reset_roots(module: nn.Module) -> None:
    if not isinstance(module, FSDPModule):
        for child in module.children():
            _reset_roots(child)
    elif hasattr(module, "reset_iter_state"):  # since PyTorch 2.13
        with suppress(AttributeError):  # no pass has begun yet, so there is no state
            module.reset_iter_state()
