"""Context parallelism: each sequence sharded over processes, for sequences that one process cannot hold.

Each process runs the model on its shard of every row, with the true positions of its tokens. Only attention sees the
other shards, through an exchange (`context_exchange.py`, `ring_attention.py`). A process computes sums over its own
targets. Added over the processes of a sequence, these sums and their gradients equal those of a single process.
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
from artel.models import IGNORED, Choice, evaluation_mode
from artel.models.attention import NAME, AttentionOptions, Exchange, attend, attention_exchange
from artel.models.attention_masks import attention_dropout
from artel.models.document_mask import MASKED_LAYERS, first_position
from artel.models.half_base import hidden_dtype
from artel.models.output_head import output_head
from artel.objectives import Batch
from artel.objectives.collate import target_tensors
from artel.parallel.context_exchange import Gather, SequenceShard, Ulysses
from artel.parallel.mesh import format_divisors
from artel.parallel.ring_attention import RingAttention
from artel.registry import OBJECTIVES

_KEY = "parallel.context"
_EXCHANGES: dict[str, Callable[[SequenceShard, str], Exchange]] = {
    "gather": Gather,
    "ulysses": Ulysses,
    "ring": RingAttention,
}


@contextmanager
def exchanging(model: PreTrainedModel, group: dist.ProcessGroup, exchange: str) -> Iterator[None]:
    """Run `model` on shards of sequences (from `split_batch`) inside the block, with attention over `group`.

    `exchange`: value of `exchange_choice`. Run backward passes and validation batches inside the block too. All
    processes of the group must do the same work in it. Run full inputs (generation, checks of the model) outside.
    """
    output_head(model)  # searched once per model, with an unsharded input
    shard = SequenceShard(dist.get_rank(group), dist.get_world_size(group), is_causal(model))
    hook = model.register_forward_pre_hook(_create_position_hook(shard, first_position(model)), with_kwargs=True)
    try:
        with attention_exchange(_EXCHANGES[exchange](shard, group.group_name)):
            yield
    finally:
        hook.remove()


def _create_position_hook(shard: SequenceShard, first: int) -> Any:
    """Return a hook that adds the positions of the shard, unless the caller passes some (isolated documents)."""

    def add_positions(_: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"]
        if kwargs.get("position_ids") is None:
            positions = shard.positions(ids.shape[1], ids.device) + first
            kwargs = kwargs | {"position_ids": positions.expand(ids.shape[0], -1)}
        return args, kwargs

    return add_positions


def is_causal(model: PreTrainedModel) -> bool:
    """True if tokens see only earlier tokens: a decoder."""
    return bool(model.can_generate())


def split_batch(batch: Batch, rank: int, size: int, causal: bool) -> Batch:
    """Return the shard of a micro-batch for process `rank` of the `size` that share each sequence.

    Every tensor (rows, length, …) is cut along the sequence, after padding to a multiple of 2 x `size` if `causal`, of
    `size` otherwise. `documents` stays complete, because a mask needs the documents of all tokens. `targets` are
    counted in the shard, and `tokens` are divided evenly: both add up to the batch's. The batch must be on the
    host.
    """
    shard = SequenceShard(rank, size, causal)
    rows, length = batch.tensors["input_ids"].shape
    padding = -length % shard.multiple
    if padding and not causal and "documents" not in batch.tensors:
        raise ValueError(f"rows of {length} tokens are not divisible by {size}, and padding would be attended to")
    positions = shard.positions((length + padding) // size)
    tensors = {}
    for name, tensor in batch.tensors.items():
        if name == "target_positions":  # recomputed from the targets below
            continue
        if tensor.shape[:2] != (rows, length):
            raise ValueError(f"{name} {tuple(tensor.shape)} has no place for each token of {rows} x {length}")
        value = IGNORED if name == "targets" else 0
        padded = F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, padding), value=value)
        tensors[name] = padded if name == "documents" else padded[:, positions]
    tensors |= target_tensors(tensors["targets"].numpy())
    targets = int((tensors["targets"] != IGNORED).sum())
    tokens = batch.tokens * (rank + 1) // size - batch.tokens * rank // size
    return Batch(tensors, targets, tokens)


def exchange_choice(model: PreTrainedModel, size: int, exchange: str, *, tensor: int = 1) -> Choice:
    """Return `gather`, `ulysses` or `ring`, and the reason. `tensor`: processes that share each layer's heads."""
    if exchange != "auto":
        return Choice(exchange, f"parallel.exchange: {exchange}")
    heads, key_heads = (count // tensor for count in _head_counts(model))
    if heads % size:
        return Choice("gather", f"{heads} heads are not divisible by {size} processes")
    # Heads sent per token: `gather` sends keys and values; `ulysses` queries, keys, values and outputs, except its own.
    gather_heads = 2 * max(key_heads, 1)
    ulysses_heads = 2 * (heads + max(key_heads, 1)) / size
    if ulysses_heads > gather_heads:
        return Choice("gather", f"{key_heads} heads of keys for {heads} of queries: less to send than heads for parts")
    return Choice("ulysses", f"{heads} heads over {size} processes: no more to send, and one kernel per sequence")


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
    """Return the reasons why `size` processes cannot shard sequences of `block` tokens. See also `check_context`.

    Call `use_artel_attention(model, encoders=True)` first. `documents`: True if they are isolated. `tensor`: processes
    that share each layer's heads. The model may be on the meta device.
    """
    problems = []
    name = model.config.model_type
    if not OBJECTIVES[objective].is_per_token:
        what = f"the loss of {objective} is computed on full samples and is not a sum over tokens"
        problems.append(Problem(_KEY, what, "write parallel.context: 1"))
    reason = _reason_not_shardable(model)
    if reason is not None:
        problems.append(Problem(_KEY, f"{name} {reason}", "write parallel.context: 1"))
    multiple = SequenceShard(0, size, is_causal(model)).multiple
    if block % multiple:
        lower = block // multiple * multiple
        valid_blocks = " or ".join(str(length) for length in (lower, lower + multiple) if length)
        what = f"blocks of {block} tokens cannot be cut into {multiple} chunks for {size} processes"
        problems.append(Problem("data.block", what, f"write {valid_blocks}"))
    problems += _exchange_problems(model, size, exchange, block, tensor, documents)
    return problems


def _exchange_problems(
    model: PreTrainedModel, size: int, exchange: str, block: int, tensor: int, documents: bool
) -> list[Problem]:
    name = model.config.model_type
    fix = "write parallel.exchange: gather"
    if exchange == "ulysses":
        heads = _head_counts(model)[0] // tensor
        if heads % size == 0:
            return []
        what = (
            f"{name}'s {heads} heads" if tensor == 1 else f"the {heads} heads of {name} on each of {tensor} processes"
        )
        fix += f", or parallel.context: one of {format_divisors(heads)}"
        return [Problem(_KEY, f"{what} are not divisible by {size}", fix)]
    if exchange == "ring":
        window = getattr(model.config.get_text_config(), "sliding_window", None)
        if window is not None and window < block:
            what = f"ring: {name} has a window of {window} tokens, so most of what is sent would never be used"
            return [Problem("parallel.exchange", what, fix)]
        if documents:
            return [Problem("parallel.exchange", "ring has no masks to keep documents apart", fix)]
        if attention_dropout(model):
            return [
                Problem("parallel.exchange", f"ring: {name} has dropout in its attention", f"{fix}, or turn it off")
            ]
    return []


def _reason_not_shardable(model: PreTrainedModel) -> str | None:
    """Return a reason in the model's configuration or code why its sequences cannot be sharded, or None."""
    config = model.config.get_text_config()
    other_layer_types = sorted(set(getattr(config, "layer_types", None) or ()) - MASKED_LAYERS)
    if model.config.is_encoder_decoder:
        return "has an encoder and a decoder, with sequences of their own"
    if getattr(model, "_is_stateful", False) or other_layer_types:
        return f"has {', '.join(other_layer_types) or 'layers with a state'}: more than attention looks at other tokens"
    if model.config._attn_implementation != NAME:
        return "has its own attention, which cannot see tokens of other processes"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "does not accept the positions of its tokens (no position_ids)"
    return None


def _head_counts(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of query heads, and of key-value heads."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)


def check_context(model: PreTrainedModel) -> None:
    """Raise InputError if tokens see other tokens through anything but attention and positions.

    Runs on one process: a row made of two shards must give the same logits as the row in order. Call this after
    `context_problems` found none, and before the model is compiled or split.
    """
    shard = SequenceShard(0, 2, is_causal(model))
    length = 8  # two tokens in each chunk
    device = model.get_input_embeddings().weight.device
    ids = model.config.get_text_config().vocab_size // 2 + torch.arange(length, device=device)[None]  # no special ids
    order = torch.cat([SequenceShard(rank, 2, shard.balanced).positions(length // 2, device) for rank in range(2)])
    try:
        with evaluation_mode(model):
            expected = model(input_ids=ids).logits[:, order]
            with attention_exchange(_BothShards(shard)):
                positions = order[None] + first_position(model)
                actual = model(input_ids=ids[:, order], position_ids=positions).logits
    except Exception as error:  # the exception type depends on the architecture
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{model.config.model_type} cannot compute a part of a sequence: {message}"
        raise InputError.at(_KEY, what, "write parallel.context: 1") from None
    difference = float((actual - expected).float().abs().max() / expected.float().abs().max())
    # Rounding gives 1e-6 in float32, and 1e-2 in bfloat16 or quantized.
    exact = hidden_dtype(model) == torch.float32 and not getattr(model, "is_quantized", False)
    if not difference < (1e-4 if exact else 0.05):
        what = f"{model.config.model_type} mixes tokens outside of its attention: logits differ"
        raise InputError.at(_KEY, f"{what} by a relative {difference:.0e}", "write parallel.context: 1")


@dataclass(frozen=True, slots=True)
class _BothShards(Exchange):
    """The shards of both processes in one row, as if they had been exchanged."""

    shard: SequenceShard

    def query_ranges(self, length: int) -> tuple[range]:
        return (range(length),)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        shards = (tensor.unflatten(2, (self.shard.size, -1)).movedim(2, 0) for tensor in (query, key, value))
        query, key, value = map(self.shard.join, shards)
        return self.shard.split(attend(query, key, value, options)).movedim(0, 2).flatten(2, 3)
