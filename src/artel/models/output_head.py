"""The output head of a model, if the loss can apply it instead of the model (`loss.py`).

The head's forward is replaced by the identity, so the model's "logits" are its last hidden states. That is correct only
if whatever follows the head could also precede it. Each model is tested once. While the head is replaced, a bound of
the logits (Gemma 2's `final_logit_softcapping`) is off in the config; the loss applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedConfig, PreTrainedModel

from artel.models import evaluation_mode
from artel.models.cross_entropy_rows import bound
from artel.models.half_base import HalfLinear, linear

_CAP_KEY = "final_logit_softcapping"
_PLAIN_CLASSES = (nn.Linear, HalfLinear)


class OutputHead(NamedTuple):
    """The last layer of a model: logits are `bound(linear(hidden), soft_cap)`."""

    linear: nn.Linear
    config: PreTrainedConfig
    """The config that the model reads `final_logit_softcapping` from."""
    soft_cap: float
    """c of c * tanh(x / c), which bounds each logit x; 0 for none."""


_TESTED_HEADS: WeakKeyDictionary[PreTrainedModel, OutputHead | None] = WeakKeyDictionary()
"""The output head of each tested model, or None if the test failed."""


def output_head(model: PreTrainedModel) -> OutputHead | None:
    """Return the model's output head if the loss can apply it, else None. Each model is tested once."""
    if model not in _TESTED_HEADS:
        _TESTED_HEADS[model] = _test_head(model)
    return _TESTED_HEADS[model]


def trust_output_head(model: PreTrainedModel) -> None:
    """Accept the model's output head without a test, for a model that is traced for a plan and has no values."""
    _TESTED_HEADS[model] = _find_head(model)


@contextmanager
def hidden_states_as_logits(head: OutputHead | None) -> Iterator[None]:
    """Make the model of `head` return the inputs of its head as logits, inside the block. None changes nothing."""
    if head is None:
        yield
        return
    with _replace_forward(head, lambda hidden: hidden):
        yield


def _find_head(model: PreTrainedModel) -> OutputHead | None:
    """Return the model's output head, untested.

    None if it is quantized, has an adapter or the model's own class, or if the model adds a buffer to the logits.
    """
    linear = model.get_output_embeddings()
    if type(linear) not in _PLAIN_CLASSES or _has_logits_buffer(model, linear):
        return None
    config = model.config.get_text_config(decoder=True)
    return OutputHead(linear, config, float(getattr(config, _CAP_KEY, None) or 0.0))


def _has_logits_buffer(model: PreTrainedModel, head: nn.Linear) -> bool:
    """True if the model adds a buffer of vocabulary size to the logits (BART's final_logits_bias)."""
    return any(buffer.shape[-1:] == head.weight.shape[:1] for buffer in model.buffers())


def _test_head(model: PreTrainedModel) -> OutputHead | None:
    head = _find_head(model)
    if head is None:
        return None
    try:
        with evaluation_mode(model):
            # With large values too: a bound hardly changes the small logits of an untrained model.
            factors = 1.0, 30.0, 1e3 if head.linear.weight.dtype == torch.float16 else 1e4  # float16 ends at 65,504
            return head if all(_is_linear_after(model, head, factor) for factor in factors) else None
    except Exception:  # an architecture that needs other inputs or checks the logits' shape
        return None


def _is_linear_after(model: PreTrainedModel, head: OutputHead, factor: float) -> bool:
    """True if the head can be applied after everything else in the model, for hidden states scaled by `factor`.

    A scale after the head (Granite, Cohere) can move before it, unless the head has a bias, which is scaled as well.
    """
    layer = head.linear  # whose weight is another tensor while fully_shard has gathered it
    ids = torch.arange(3, 6, device=layer.weight.device)[None] % layer.weight.shape[0]
    batch = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    inputs: list[torch.Tensor] = []

    def apply_scaled(hidden: torch.Tensor) -> torch.Tensor:
        inputs.append(hidden * factor)
        return linear(inputs[-1], layer.weight, layer.bias)  # DTensors if the head is sharded

    with _replace_forward(head, apply_scaled, bounded=True):
        logits = model(**batch).logits
    with _replace_forward(head, lambda hidden: hidden * factor):
        hidden = model(**batch).logits
    if hidden.shape != (*ids.shape, layer.weight.shape[1]) or (
        layer.bias is not None and not hidden.equal(_full_tensor(inputs[0]))
    ):
        return False
    if type(layer) is nn.Linear:
        hidden = hidden.to(layer.weight.dtype)
    expected = bound(_apply_head(layer, hidden), head.soft_cap).to(logits.dtype)
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
def _replace_forward(
    head: OutputHead, forward: Callable[[torch.Tensor], torch.Tensor], *, bounded: bool = False
) -> Iterator[None]:
    """Replace the head's forward inside the block. The model bounds the result only if `bounded` is set."""
    head.linear.forward = forward  # type: ignore[method-assign,assignment]
    values = vars(head.config)  # the config's own setter refuses None for some architectures
    soft_cap = values.get(_CAP_KEY)
    if not bounded and soft_cap is not None:
        values[_CAP_KEY] = None
    try:
        yield
    finally:
        del head.linear.forward
        if soft_cap is not None:
            values[_CAP_KEY] = soft_cap
