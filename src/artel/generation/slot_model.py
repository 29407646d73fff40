"""A model on a CPU that computes tokens of several texts in one forward pass, each text in a slot of the cache.

The tokens of all texts are concatenated into one row, so that each matmul covers all of them. Only attention separates
the texts: it writes the keys and values of a text to its slot, and the text's tokens attend to that slot. For each
layer, the cache has a tensor (slots, capacity, heads, size) of keys and one of values. There are no pages to look up
and gather. Texts of similar length share an attention call, others have one each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from artel.generation.base import first_line
from artel.host import memory
from artel.models.cpu.packed import pack, packable_bytes

NAME = "artel_slots"
_MAX_PADDING = 2.0
"""Texts share an attention call if padding at most doubles the number of their keys."""
_PACKED_FRACTION = 0.25
"""Fraction of free memory for packed copies of weights."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_MAX_ERROR = {torch.float32: 1e-3}
_MAX_ERROR_16_BIT = 5e-2


def packed_bytes(model: PreTrainedModel, free: int) -> int:
    """Return the size of the packed copies of weights: 0 if they are too large for `free` bytes of memory."""
    num_bytes = packable_bytes(model)
    return num_bytes if num_bytes <= _PACKED_FRACTION * free else 0


def uses_slots(model: PreTrainedModel) -> bool:
    """True if the configuration of a model lets it be computed in slots. A trial decides."""
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    return not model.config.is_encoder_decoder and types <= _LAYER_TYPES


class SlotsUnsupported(Exception):
    """Raised if a model cannot be computed in slots."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a text to compute in a pass."""

    slot: int
    start: int
    """Tokens of the text that are cached in the slot."""
    ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class SlotModel:
    """A model and its cache."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        """Raise SlotsUnsupported if a trial fails, or if its logits differ from those of the unmodified model."""
        self._model = model
        self._context = context
        self._selects_logits = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self._attention = model.config._attn_implementation
        self._unpack: Callable[[], None] | None = None
        self._check_config()
        try:
            expected = self._reference_logits()
            if packed_bytes(model, memory().free):
                self._unpack = pack(model)
            AttentionInterface.register(NAME, slot_attention)
            model.set_attn_implementation(NAME)
            self._run_trial(expected)
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise SlotsUnsupported(first_line(error)) from error
            raise

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the cache."""
        return self._cache.token_bytes

    def resize(self, slots: Sequence[int | None], capacity: int) -> None:
        """Allocate `len(slots)` slots of `capacity` tokens. An entry of `slots` is an old slot to copy, or None."""
        self._cache.resize(slots, capacity)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a slot to another."""
        self._cache.copy(source, target, tokens)

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return the next-token logits of each chunk, float32 (chunks, vocabulary), and cache the chunks."""
        step = _Step(self._cache, chunks, self._context)
        selection = {"logits_to_keep": step.ends} if self._selects_logits else {}
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits = self._model(
                input_ids=step.ids, position_ids=step.positions, use_cache=False, artel_step=step, **selection
            ).logits[0]
            if not self._selects_logits:
                logits = logits[step.ends]
            return step.restore_order(logits.float())

    def close(self) -> None:
        """Restore the model."""
        if self._unpack is not None:
            self._unpack()
        self._model.set_attn_implementation(self._attention)

    def _check_config(self) -> None:
        config: Any = self._model.config.get_text_config()
        if self._model.config.is_encoder_decoder:
            raise SlotsUnsupported("an encoder and a decoder are not computed in slots")
        types = set(getattr(config, "layer_types", None) or [])
        if types - _LAYER_TYPES:
            raise SlotsUnsupported(f"layers of type {min(types - _LAYER_TYPES)} are not computed in slots")

    # The trial compares two texts in chunks, batched in slots, with each text alone in the unmodified model.

    @cached_property
    def _texts(self) -> tuple[list[int], list[int]]:
        """Two texts without the padding token: transformers would warn about a missing mask."""
        pad_id = getattr(self._model.config.get_text_config(), "pad_token_id", None)
        ids = [id for id in range(9) if id != pad_id]
        return ids[:8], [ids[index] for index in (4, 2, 0, 1, 3)]

    def _reference_logits(self) -> torch.Tensor:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return torch.stack(
                [
                    self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
                    for ids in self._texts
                ]
            )

    def _run_trial(self, expected: torch.Tensor) -> None:
        self._cache = _Cache()
        self.resize([None] * 3, 16)
        first, second = self._texts
        self.logits([Chunk(0, 0, first[:4])])
        self.logits([Chunk(0, 4, first[4:7]), Chunk(2, 0, second[:4])])
        computed = self.logits([Chunk(0, 7, first[7:]), Chunk(2, 4, second[4:])])
        layers = self._model.config.get_text_config().num_hidden_layers
        if self._cache.layers != layers:
            raise SlotsUnsupported(f"{self._cache.layers} of {layers} layers attend")
        error = float((computed - expected).norm() / expected.norm())
        if not error <= _MAX_ERROR.get(self._model.dtype, _MAX_ERROR_16_BIT):
            raise SlotsUnsupported(f"logits computed in slots differ from the model's by {error:.1%}")


class _Cache:
    """Keys and values of all layers, (slots, capacity, heads, size)."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots = self._capacity = 0

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def token_bytes(self) -> int:
        return sum(tensor[0, 0].nbytes for pair in self._layers.values() for tensor in pair)

    @property
    def capacity(self) -> int:
        return self._capacity

    def resize(self, slots: Sequence[int | None], capacity: int) -> None:
        """Resize all layers, or none if memory is short. Old layers are freed one by one as new ones are filled."""
        tokens = min(capacity, self._capacity)

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.new_empty(len(slots), capacity, *tensor.shape[2:])  # takes no memory yet

        def fill(tensor: torch.Tensor, old_tensor: torch.Tensor) -> None:
            tensor.zero_()
            for new, old in enumerate(slots):
                if old is not None:
                    tensor[new, :tokens] = old_tensor[old, :tokens]

        new_layers = {index: (allocate(keys), allocate(values)) for index, (keys, values) in self._layers.items()}
        for index, pair in new_layers.items():
            for tensor, old_tensor in zip(pair, self._layers[index], strict=True):
                fill(tensor, old_tensor)
            self._layers[index] = pair
        self._slots, self._capacity = len(slots), capacity

    def copy(self, source: int, target: int, tokens: int) -> None:
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :tokens] = tensor[source, :tokens]

    def write(
        self, layer: int, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values (tokens, heads, size) at flat positions. Return the layer's whole cache."""
        if layer not in self._layers:
            shape = (self._slots, self._capacity)
            self._layers[layer] = (key.new_zeros(*shape, *key.shape[1:]), value.new_zeros(*shape, *value.shape[1:]))
        keys, values = self._layers[layer]
        keys.flatten(0, 1).index_copy_(0, positions, key)
        values.flatten(0, 1).index_copy_(0, positions, value)
        return keys, values


class _Step:
    """One forward pass. Orders chunks of one token before longer chunks."""

    def __init__(self, cache: _Cache, chunks: Sequence[Chunk], context: int) -> None:
        self.cache, self.context = cache, context
        order = sorted(range(len(chunks)), key=lambda number: len(chunks[number].ids) > 1)
        self._order = None if order == list(range(len(chunks))) else torch.tensor(order).argsort()
        ordered = [chunks[number] for number in order]
        self.single_tokens = [chunk for chunk in ordered if len(chunk.ids) == 1]
        self.long_chunks = ordered[len(self.single_tokens) :]
        self.ids = torch.tensor([[id for chunk in ordered for id in chunk.ids]])
        positions = [position for chunk in ordered for position in range(chunk.start, chunk.end)]
        self.positions = torch.tensor([positions])
        starts = torch.tensor([chunk.slot * cache.capacity for chunk in ordered for _ in chunk.ids])
        self._cache_positions = starts + self.positions[0]
        self.ends = torch.tensor([len(chunk.ids) for chunk in ordered]).cumsum(0) - 1

    def restore_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in the original order of the chunks."""
        return rows if self._order is None else rows[self._order]

    @cached_property
    def _slots(self) -> int:
        return max(chunk.slot for chunk in self.single_tokens) + 1

    @cached_property
    def _longest(self) -> int:
        return max(chunk.end for chunk in self.single_tokens)

    @cached_property
    def _can_batch(self) -> bool:
        keys = sum(chunk.end for chunk in self.single_tokens)
        return len(self.single_tokens) > 1 and self._slots * self._longest <= _MAX_PADDING * keys

    @cached_property
    def _slot_numbers(self) -> torch.Tensor | None:
        """Slots of single tokens; None if they are 0, 1, 2 …"""
        slot_numbers = [chunk.slot for chunk in self.single_tokens]
        return None if slot_numbers == list(range(len(slot_numbers))) else torch.tensor(slot_numbers)

    @cached_property
    def _mask(self) -> torch.Tensor:
        """Additive attention mask (slots, 1, 1, longest) that hides keys beyond the end of each text."""
        lengths = torch.ones(self._slots, dtype=torch.long)
        for chunk in self.single_tokens:
            lengths[chunk.slot] = chunk.end
        is_hidden = torch.arange(self._longest) >= lengths[:, None]
        return torch.zeros(is_hidden.shape).masked_fill(is_hidden, -torch.inf)[:, None, None]

    @cached_property
    def _causal_masks(self) -> list[torch.Tensor | None]:
        """Masks of the longer chunks (tokens, keys); None for the beginning of a text."""
        return [
            torch.arange(chunk.start, chunk.end)[:, None] >= torch.arange(chunk.end) if chunk.start else None
            for chunk in self.long_chunks
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attend from each token to its text: query (tokens, heads, size) -> (tokens, heads, size of values)."""
        keys, values = self.cache.write(layer, self._cache_positions, key, value)
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        first = len(self.single_tokens)
        if self.single_tokens:
            attend = self._attend_batched if self._can_batch else self._attend_one_by_one
            # Heads that share keys become several queries, so that keys are not repeated.
            grouped = query[:first].unflatten(1, (keys.shape[2], -1))
            output[:first] = attend(grouped, keys, values, scale).flatten(1, 2)
        for chunk, mask in zip(self.long_chunks, self._causal_masks, strict=True):
            tokens = slice(first, first + len(chunk.ids))
            attended = F.scaled_dot_product_attention(
                query[None, tokens].transpose(1, 2),
                _slot_view(keys, chunk.slot, chunk.slot + 1, chunk.end),
                _slot_view(values, chunk.slot, chunk.slot + 1, chunk.end),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != keys.shape[2],
            )
            output[tokens] = attended[0].transpose(0, 1)
            first = tokens.stop
        return output

    def _attend_batched(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attend in one call. query: (texts, key heads, heads per key head, size)."""
        slot_numbers = self._slot_numbers
        if slot_numbers is not None:
            rows = query.new_zeros(self._slots, *query.shape[1:])
            rows[slot_numbers] = query
            query = rows
        keys, values = (_slot_view(tensor, 0, self._slots, self._longest) for tensor in (keys, values))
        mask = self._mask.to(query.dtype).expand(-1, -1, query.shape[2], -1)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return attended if slot_numbers is None else attended[slot_numbers]

    def _attend_one_by_one(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attend in one call per text."""
        attended = []
        for index, chunk in enumerate(self.single_tokens):
            slot_keys = _slot_view(keys, chunk.slot, chunk.slot + 1, chunk.end)
            slot_values = _slot_view(values, chunk.slot, chunk.slot + 1, chunk.end)
            attended.append(
                F.scaled_dot_product_attention(query[index : index + 1], slot_keys, slot_values, scale=scale)
            )
        return torch.cat(attended)


def _slot_view(cached: torch.Tensor, first: int, last: int, tokens: int) -> torch.Tensor:
    """Return the first tokens of some slots, transposed for attention: (slots, heads, tokens, size)."""
    return cached[first:last, :tokens].transpose(1, 2)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    artel_step: _Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers, (1, heads, tokens, size) -> ((1, tokens, heads, size), None).

    Outside `SlotModel.logits` it computes one row without padding, either the full row or its next token, since
    transformers makes no masks for this function. Raise SlotsUnsupported if a mask would be needed.
    """
    if artel_step is None:
        rows, tokens = query.shape[0], query.shape[2]
        if attention_mask is None and (rows > 1 or 1 < tokens < key.shape[2]):
            raise SlotsUnsupported(
                "outside slots, attention computes one full row or its next token; anything else needs a mask"
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    window = sliding_window is not None and sliding_window < artel_step.context
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if window or unsupported or attention_mask is not None:
        raise SlotsUnsupported(
            f"attention with {'a window' if window else unsupported or 'a mask'} is not computed in slots"
        )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    return artel_step.attend(layer, query, key, value, scaling)[None], None
