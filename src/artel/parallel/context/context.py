"""Context parallelism: processes that share each sequence, for sequences that one process cannot hold.

Each process runs the model on its part of every row, with the true positions of its tokens; attention alone sees the
other parts, through an exchange (`exchanges.py`, `ring.py`). What a process computes are the sums over its own targets:
those of all processes that share a sequence, and their gradients, add up to what one process would find.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel

from artel.errors import InputError, Problem
from artel.models.attention import NAME, AttentionOptions, Exchange, attend, attention_exchange
from artel.models.attention_masks import attention_dropout
from artel.models.choice import Choice
from artel.models.document_mask import MASKED, first_position
from artel.models.evaluating import evaluating
from artel.models.half_base import hidden_dtype
from artel.models.output_head import output_head
from artel.models.targets import IGNORED
from artel.objectives import Batch
from artel.objectives.collate import target_tensors
from artel.parallel.context.chunks import Part
from artel.parallel.context.gather_ulysses import Gather, Ulysses
from artel.parallel.context.ring import Ring
from artel.registry import OBJECTIVES

_WHERE = "parallel.context"
_EXCHANGES: dict[str, Callable[[Part, str], Exchange]] = {"gather": Gather, "ulysses": Ulysses, "ring": Ring}
# Objectives whose loss is a sum over tokens, so that parts of a sequence can be summed on their own.


@contextmanager
def exchanging(model: PreTrainedModel, group: dist.ProcessGroup, how: str) -> Iterator[None]:
    """Have `model` compute parts of sequences (`split_batch`), as processes of `group` that share each of them.

    `how` is the value of `exchange_choice`. The backward pass belongs into the block, and so do validation batches; all
    processes of the group must do the same in it. Whole inputs (generation, trying a model) belong outside of it.
    """
    output_head(model)  # tried once for each model, on an input of its own that nobody shares
    part = Part(dist.get_rank(group), dist.get_world_size(group), is_causal(model))
    hook = model.register_forward_pre_hook(_positions(part, first_position(model)), with_kwargs=True)
    try:
        with attention_exchange(_EXCHANGES[how](part, group.group_name)):
            yield
    finally:
        hook.remove()


def _positions(part: Part, first: int) -> Any:
    """A hook that tells the model where its tokens stand, unless its caller has (documents that are kept apart)."""

    def add_positions(_: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"]
        if kwargs.get("position_ids") is None:
            places = part.places(ids.shape[1], ids.device) + first
            kwargs = kwargs | {"position_ids": places.expand(ids.shape[0], -1)}
        return args, kwargs

    return add_positions


def is_causal(model: PreTrainedModel) -> bool:
    """Whether a model's tokens see only those before them: a decoder."""
    return bool(model.can_generate())


def split_batch(batch: Batch, rank: int, size: int, causal: bool) -> Batch:
    """The part of a micro-batch that process `rank` of the `size` that share each sequence takes.

    Every tensor (rows, length, …) is cut along the sequence, padded to a multiple of 2 x `size` where `causal` and
    of `size` where not. `documents` stay whole: a mask needs those of all tokens. `targets` are those of the part,
    `tokens` an even share: both add up to the batch's. The batch must be on the host.
    """
    part = Part(rank, size, causal)
    rows, length = batch.tensors["input_ids"].shape
    missing = -length % part.multiple
    if missing and not causal and "documents" not in batch.tensors:
        raise ValueError(f"rows of {length} tokens are no multiple of {size}, and padding would be attended to")
    places = part.places((length + missing) // size)
    tensors = {}
    for name, tensor in batch.tensors.items():
        if name == "places":  # they are found anew
            continue
        if tensor.shape[:2] != (rows, length):
            raise ValueError(f"{name} {tuple(tensor.shape)} has no place for each token of {rows} x {length}")
        value = IGNORED if name == "targets" else 0
        padded = F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing), value=value)
        tensors[name] = padded if name == "documents" else padded[:, places]
    tensors |= target_tensors(tensors["targets"].numpy())
    targets = int((tensors["targets"] != IGNORED).sum())
    tokens = batch.tokens * (rank + 1) // size - batch.tokens * rank // size
    return Batch(tensors, targets, tokens)


def exchange_choice(model: PreTrainedModel, size: int, exchange: str, *, tensor: int = 1) -> Choice:
    """`gather`, `ulysses` or `ring`, and why; `tensor` processes share the heads of each layer."""
    if exchange != "auto":
        return Choice(exchange, f"parallel.exchange: {exchange}")
    heads, key_heads = (count // tensor for count in _heads(model))
    if heads % size:
        return Choice("gather", f"{heads} heads are no multiple of {size} processes")
    # For each token: keys and values go to all others; of queries, keys, values and results one share stays here.
    sent, exchanged = 2 * max(key_heads, 1), 2 * (heads + max(key_heads, 1)) / size
    if exchanged > sent:
        return Choice("gather", f"{key_heads} heads of keys for {heads} of queries: less to send than heads for parts")
    return Choice("ulysses", f"{heads} heads over {size} processes: no more to send, and one kernel for the sequence")


def context_problems(
    model: PreTrainedModel,
    size: int,
    exchange: str,
    block: int,
    *,
    objective: str = "causal",
    tensor: int = 1,
    documents: bool = False,
) -> list[Problem]:
    """Why `size` processes cannot share each sequence of `block` tokens of this model; `check_context` then tries it.

    After `use_for_training(model, encoders=True)`. `documents`: they are kept apart; `tensor` processes share the heads
    of each layer. Weights are not looked at, so the model may be on the meta device.
    """
    problems = []
    name = model.config.model_type
    if not OBJECTIVES[objective].is_per_token:
        what = f"the loss of {objective} is of whole samples, no sum over tokens"
        problems.append(Problem(_WHERE, what, "write parallel.context: 1"))
    hindrance = _hindrance(model)
    if hindrance is not None:
        problems.append(Problem(_WHERE, f"{name} {hindrance}", "write parallel.context: 1"))
    multiple = Part(0, size, is_causal(model)).multiple
    if block % multiple:
        near = block // multiple * multiple
        fitting = " or ".join(str(number) for number in (near, near + multiple) if number)
        what = f"blocks of {block} tokens cannot be cut into {multiple} chunks for {size} processes"
        problems.append(Problem("data.block", what, f"write {fitting}"))
    problems += _exchange_problems(model, size, exchange, block, tensor, documents)
    return problems


def _exchange_problems(
    model: PreTrainedModel, size: int, exchange: str, block: int, tensor: int, documents: bool
) -> list[Problem]:
    name = model.config.model_type
    fix = "write parallel.exchange: gather"
    if exchange == "ulysses":
        heads = _heads(model)[0] // tensor
        if heads % size == 0:
            return []
        sizes = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        of = f"{name}'s {heads} heads" if tensor == 1 else f"the {heads} heads of {name} on each of {tensor} processes"
        return [Problem(_WHERE, f"{of} are no multiple of {size}", f"{fix}, or parallel.context: one of {sizes}")]
    if exchange == "ring":
        window = getattr(model.config.get_text_config(), "sliding_window", None)
        if window is not None and window < block:
            what = f"ring: {name} has a window of {window} tokens, and most of what goes round is never seen"
            return [Problem("parallel.exchange", what, fix)]
        if documents:
            return [Problem("parallel.exchange", "ring has no masks to keep documents apart", fix)]
        if attention_dropout(model):
            return [
                Problem("parallel.exchange", f"ring: {name} has dropout in its attention", f"{fix}, or turn it off")
            ]
    return []


def _hindrance(model: PreTrainedModel) -> str | None:
    """What keeps a model's sequences whole, as far as its configuration and code show it."""
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - MASKED)
    if model.config.is_encoder_decoder:
        return "has an encoder and a decoder, with sequences of their own"
    if getattr(model, "_is_stateful", False) or others:
        return f"has {', '.join(others) or 'layers with a state'}: more than attention looks at other tokens"
    if model.config._attn_implementation != NAME:
        return "has attention of its own, which cannot be told of other processes' tokens"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "cannot be told where its tokens stand (no position_ids)"
    return None


def _heads(model: PreTrainedModel) -> tuple[int, int]:
    """How many of queries, and of keys and values."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)


def check_context(model: PreTrainedModel) -> None:
    """Raise InputError when a model's tokens see others by another way than attention and positions.

    Tried on one process, where the model is: two processes' parts, one after the other in one row, must give the same
    logits as the row in its order. After `context_problems` has found none, and before the model is compiled or split.
    """
    part = Part(0, 2, is_causal(model))
    length = 8  # two tokens in each chunk
    device = model.get_input_embeddings().weight.device
    ids = model.config.get_text_config().vocab_size // 2 + torch.arange(length, device=device)[None]  # none is special
    order = torch.cat([Part(rank, 2, part.balanced).places(length // 2, device) for rank in range(2)])
    try:
        with evaluating(model):
            alone = model(input_ids=ids).logits[:, order]
            with attention_exchange(_BothParts(part)):
                positions = order[None] + first_position(model)
                together = model(input_ids=ids[:, order], position_ids=positions).logits
    except Exception as error:  # each architecture fails in its own way
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{model.config.model_type} cannot compute a part of a sequence: {first}"
        raise InputError.at(_WHERE, what, "write parallel.context: 1") from None
    difference = float((together - alone).float().abs().max() / alone.float().abs().max())
    # As for documents: rounding gives 1e-6 in float32 and 1e-2 in bfloat16 or quantized.
    exact = hidden_dtype(model) == torch.float32 and not getattr(model, "is_quantized", False)
    if not difference < (1e-4 if exact else 0.05):
        what = f"{model.config.model_type} looks at other tokens outside of its attention: logits differ"
        raise InputError.at(_WHERE, f"{what} by a share of {difference:.0e}", "write parallel.context: 1")


@dataclass(frozen=True, slots=True)
class _BothParts(Exchange):
    """All processes' parts in one row, as if they had been exchanged."""

    part: Part

    def query_ranges(self, part: int) -> tuple[range]:
        return (range(part),)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionOptions
    ) -> torch.Tensor:
        parts = (each.unflatten(2, (self.part.size, -1)).movedim(2, 0) for each in (query, key, value))
        query, key, value = (self.part.joined(each) for each in parts)
        return self.part.cut(attend(query, key, value, how)).movedim(0, 2).flatten(2, 3)
