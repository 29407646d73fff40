"""The output head of a model, if the loss can apply it instead of the model (`loss.py`).

The head's forward is replaced by the identity, so the model's "logits" are its last hidden states. That is correct only
if whatever follows the head could also precede it. Each model is tested once. A model that bounds its logits
(Gemma 2) fails the test and computes its logits as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from artel.models import evaluation_mode
from artel.models.half_base import HalfLinear, linear

_TESTED_HEADS: WeakKeyDictionary[PreTrainedModel, nn.Linear | None] = WeakKeyDictionary()
"""The output head of each tested model, or None if the test failed."""

_PLAIN_CLASSES = (nn.Linear, HalfLinear)


def output_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the model's output head if the logits are its plain output, else None. Each model is tested once."""
    if model not in _TESTED_HEADS:
        _TESTED_HEADS[model] = _test_head(model)
    return _TESTED_HEADS[model]


def trust_output_head(model: PreTrainedModel) -> None:
    """Accept the model's output head without a test, for a model that is traced for a plan and has no values."""
    head = model.get_output_embeddings()
    _TESTED_HEADS[model] = head if type(head) in _PLAIN_CLASSES and not _has_logits_buffer(model, head) else None


@contextmanager
def hidden_states_as_logits(head: nn.Linear | None) -> Iterator[None]:
    """Make the model of `head` return the inputs of its head as logits, inside the block. None changes nothing."""
    if head is None:
        yield
        return
    with _replace_forward(head, lambda hidden: hidden):
        yield


def _has_logits_buffer(model: PreTrainedModel, head: nn.Linear) -> bool:
    """True if the model adds a buffer of vocabulary size to the logits (BART's final_logits_bias)."""
    return any(buffer.shape[-1:] == head.weight.shape[:1] for buffer in model.buffers())


def _test_head(model: PreTrainedModel) -> nn.Linear | None:
    head = model.get_output_embeddings()
    if type(head) not in _PLAIN_CLASSES:  # quantized, with an adapter, or the model's own class
        return None
    if _has_logits_buffer(model, head):
        return None
    try:
        with evaluation_mode(model):
            # With large values too: a bound (Gemma 2's tanh) hardly changes the small logits of an untrained model.
            largest = 1e3 if head.weight.dtype == torch.float16 else 1e4  # the maximum of float16 is 65,504
            return head if all(_is_linear_after(model, head, factor) for factor in (1.0, largest)) else None
    except Exception:  # an architecture that needs other inputs or checks the logits' shape
        return None


def _is_linear_after(model: PreTrainedModel, head: nn.Linear, factor: float) -> bool:
    """True if the head can be applied after everything else in the model, for hidden states scaled by `factor`.

    A scale after the head (Granite, Cohere) can move before it, unless the head has a bias, which is scaled as well.
    """
    ids = torch.arange(3, 6, device=head.weight.device)[None] % head.weight.shape[0]
    batch = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    inputs: list[torch.Tensor] = []

    def apply_scaled(hidden: torch.Tensor) -> torch.Tensor:
        inputs.append(hidden * factor)
        return linear(inputs[-1], head.weight, head.bias)  # DTensors if the head is sharded

    with _replace_forward(head, apply_scaled):
        logits = model(**batch).logits
    with _replace_forward(head, lambda hidden: hidden * factor):
        hidden = model(**batch).logits
    if hidden.shape != (*ids.shape, head.weight.shape[1]) or (
        head.bias is not None and not hidden.equal(_full_tensor(inputs[0]))
    ):
        return False
    if type(head) is nn.Linear:
        hidden = hidden.to(head.weight.dtype)
    expected = _apply_head(head, hidden).to(logits.dtype)
    # A scale before the head causes one more rounding than a scale after it.
    relative, absolute = (1e-5, 1e-6) if logits.dtype == torch.float32 else (0.0, 4 * torch.finfo(logits.dtype).eps)
    return torch.allclose(expected, logits, rtol=relative, atol=absolute * float(logits.abs().max()))


def _apply_head(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Return the head's output for `hidden`, which is replicated if the head is sharded."""
    if isinstance(head.weight, DTensor):
        hidden = DTensor.from_local(hidden, head.weight.device_mesh, [Replicate()], run_check=False)
    return _full_tensor(linear(hidden, head.weight, head.bias))


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _replace_forward(head: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    head.forward = forward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del head.forward
