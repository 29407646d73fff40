"""A model on a CPU that computes tokens of several texts in one forward pass: each text has a slot in the cache.

The tokens of all texts lie one behind another in one row, so that matrices are multiplied once for all of them. Only
attention tells them apart: what is computed of a text is written into its slot, and its tokens attend to that slot.
The cache is a tensor (slots, capacity, heads, size) of keys and one of values for each layer. No page is looked up and
nothing is gathered: texts of similar length attend together, the others one by one.
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

from artel.host import memory
from artel.inference.engine.base import reason
from artel.models.cpu.packed import pack, packable_bytes

NAME = "artel_slots"
_MOST_PADDING = 2.0
"""Texts attend together while the longest one's keys, as many times as there are slots, are at most so many times
theirs."""
_PACKED_SHARE = 0.25
"""Of free memory, for packed copies of weights at most."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PRECISION = {torch.float32: 1e-3}
_LOW_PRECISION = 5e-2


class CannotSlot(Exception):
    """The model cannot be computed so."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a text that are computed."""

    slot: int
    seen: int
    """Tokens of the text that the slot holds already."""
    ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.seen + len(self.ids)


class SlotModel:
    """A model and its cache."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        """Raises CannotSlot with what a trial raises, or where its logits are not those of the model by itself."""
        self._model = model
        self._context = context
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self._attention = model.config._attn_implementation
        self._unpack: Callable[[], None] | None = None
        self._check_config()
        try:
            expected = self._expected()
            if packable_bytes(model) <= _PACKED_SHARE * memory().free:
                self._unpack = pack(model)
            AttentionInterface.register(NAME, slot_attention)
            model.set_attn_implementation(NAME)
            self._try(expected)
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise CannotSlot(reason(error)) from error
            raise

    @property
    def token_bytes(self) -> int:
        """What a token has in the cache."""
        return self._cache.token_bytes

    def resize(self, slots: Sequence[int | None], capacity: int) -> None:
        """Make as many slots of so many tokens: each takes over what the old slot of that number holds, if any."""
        self._cache.resize(slots, capacity)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Let a slot begin with the first tokens of another."""
        self._cache.copy(source, target, tokens)

    def logits(self, parts: Sequence[Part]) -> torch.Tensor:
        """What follows each part, float32 (parts, vocabulary). The slots then hold the parts too."""
        step = _Step(self._cache, parts, self._context)
        keep = {"logits_to_keep": step.ends} if self._keeps_logits else {}
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits = self._model(
                input_ids=step.ids, position_ids=step.positions, use_cache=False, artel_step=step, **keep
            ).logits[0]
            if not self._keeps_logits:
                logits = logits[step.ends]
            return step.in_order(logits.float())

    def close(self) -> None:
        """Give the model back as it was."""
        if self._unpack is not None:
            self._unpack()
        self._model.set_attn_implementation(self._attention)

    def _check_config(self) -> None:
        config: Any = self._model.config.get_text_config()
        if self._model.config.is_encoder_decoder:
            raise CannotSlot("an encoder and a decoder are not computed in slots")
        types = set(getattr(config, "layer_types", None) or [])
        if types - _LAYER_TYPES:
            raise CannotSlot(f"layers of type {min(types - _LAYER_TYPES)} are not computed in slots")

    # A trial: two texts, each in parts, together; and each alone by the model itself.

    @cached_property
    def _texts(self) -> tuple[list[int], list[int]]:
        """Without the padding token: transformers would warn that a row which ends with it needs a mask."""
        pad_id = getattr(self._model.config.get_text_config(), "pad_token_id", None)
        ids = [id for id in range(9) if id != pad_id]
        return ids[:8], [ids[place] for place in (4, 2, 0, 1, 3)]

    def _expected(self) -> torch.Tensor:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return torch.stack(
                [
                    self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
                    for ids in self._texts
                ]
            )

    def _try(self, expected: torch.Tensor) -> None:
        self._cache = _Cache()
        self.resize([None] * 3, 16)
        first, second = self._texts
        self.logits([Part(0, 0, first[:4])])
        self.logits([Part(0, 4, first[4:7]), Part(2, 0, second[:4])])
        given = self.logits([Part(0, 7, first[7:]), Part(2, 4, second[4:])])
        layers = self._model.config.get_text_config().num_hidden_layers
        if self._cache.layers != layers:
            raise CannotSlot(f"{self._cache.layers} of {layers} layers attend")
        error = float((given - expected).norm() / expected.norm())
        if not error <= _PRECISION.get(self._model.dtype, _LOW_PRECISION):
            raise CannotSlot(f"logits computed in slots part from the model's own by {error:.1%}")


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
        """Where memory does not suffice everything stays as it was. Old layers go one by one as new are filled."""
        least = min(capacity, self._capacity)

        def larger(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.new_empty(len(slots), capacity, *tensor.shape[2:])  # which takes no memory yet

        def fill(tensor: torch.Tensor, held: torch.Tensor) -> None:
            tensor.zero_()
            for new, old in enumerate(slots):
                if old is not None:
                    tensor[new, :least] = held[old, :least]

        made = {index: (larger(keys), larger(values)) for index, (keys, values) in self._layers.items()}
        for index, pair in made.items():
            for tensor, held in zip(pair, self._layers[index], strict=True):
                fill(tensor, held)
            self._layers[index] = pair
        self._slots, self._capacity = len(slots), capacity

    def copy(self, source: int, target: int, tokens: int) -> None:
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :tokens] = tensor[source, :tokens]

    def write(
        self, layer: int, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values (tokens, heads, size) at their places; all keys and values of the layer."""
        if layer not in self._layers:
            shape = (self._slots, self._capacity)
            self._layers[layer] = (key.new_zeros(*shape, *key.shape[1:]), value.new_zeros(*shape, *value.shape[1:]))
        keys, values = self._layers[layer]
        keys.flatten(0, 1).index_copy_(0, places, key)
        values.flatten(0, 1).index_copy_(0, places, value)
        return keys, values


class _Step:
    """One forward pass: the parts of one token first, the longer ones behind them."""

    def __init__(self, cache: _Cache, parts: Sequence[Part], context: int) -> None:
        self.cache, self.context = cache, context
        order = sorted(range(len(parts)), key=lambda number: len(parts[number].ids) > 1)
        self._order = None if order == list(range(len(parts))) else torch.tensor(order).argsort()
        ordered = [parts[number] for number in order]
        self.singles = [part for part in ordered if len(part.ids) == 1]
        self.longer = ordered[len(self.singles) :]
        self.ids = torch.tensor([[id for part in ordered for id in part.ids]])
        positions = [position for part in ordered for position in range(part.seen, part.end)]
        self.positions = torch.tensor([positions])
        capacity = cache.capacity
        starts = torch.tensor([part.slot * capacity for part in ordered for _ in part.ids])
        self.places = starts + self.positions[0]
        self.ends = torch.tensor([len(part.ids) for part in ordered]).cumsum(0) - 1

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the order in which the parts were given."""
        return rows if self._order is None else rows[self._order]

    @cached_property
    def _slots(self) -> int:
        return max(part.slot for part in self.singles) + 1

    @cached_property
    def _longest(self) -> int:
        return max(part.end for part in self.singles)

    @cached_property
    def _attend_together(self) -> bool:
        keys = sum(part.end for part in self.singles)
        return len(self.singles) > 1 and self._slots * self._longest <= _MOST_PADDING * keys

    @cached_property
    def _slot_numbers(self) -> torch.Tensor | None:
        """Of the texts of single tokens; None where they are 0, 1, 2 …"""
        numbers = [part.slot for part in self.singles]
        return None if numbers == list(range(len(numbers))) else torch.tensor(numbers)

    @cached_property
    def _mask(self) -> torch.Tensor:
        """Which keys are those of the text, as what is added to scores (slots, 1, 1, longest)."""
        lengths = torch.ones(self._slots, dtype=torch.long)
        for part in self.singles:
            lengths[part.slot] = part.end
        hidden = torch.arange(self._longest) >= lengths[:, None]
        return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None, None]

    @cached_property
    def _causal_masks(self) -> list[torch.Tensor | None]:
        """Of the longer parts (tokens, keys); None for one that begins a text."""
        return [
            torch.arange(part.seen, part.end)[:, None] >= torch.arange(part.end) if part.seen else None
            for part in self.longer
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention of the tokens to their texts: query (tokens, heads, size) -> (tokens, heads, size of values)."""
        keys, values = self.cache.write(layer, self.places, key, value)
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        start = len(self.singles)
        if self.singles:
            attend = self._together if self._attend_together else self._one_by_one
            # The heads that share keys take the place of queries: so keys are not repeated.
            grouped = query[:start].unflatten(1, (keys.shape[2], -1))
            output[:start] = attend(grouped, keys, values, scale).flatten(1, 2)
        for part, mask in zip(self.longer, self._causal_masks, strict=True):
            tokens = slice(start, start + len(part.ids))
            attended = F.scaled_dot_product_attention(
                query[None, tokens].transpose(1, 2),
                _of_slots(keys, part.slot, part.slot + 1, part.end),
                _of_slots(values, part.slot, part.slot + 1, part.end),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != keys.shape[2],
            )
            output[tokens] = attended[0].transpose(0, 1)
            start = tokens.stop
        return output

    def _together(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """query (texts, key heads, heads of each, size)."""
        numbers = self._slot_numbers
        if numbers is not None:
            rows = query.new_zeros(self._slots, *query.shape[1:])
            rows[numbers] = query
            query = rows
        keys, values = (_of_slots(tensor, 0, self._slots, self._longest) for tensor in (keys, values))
        mask = self._mask.to(query.dtype).expand(-1, -1, query.shape[2], -1)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return attended if numbers is None else attended[numbers]

    def _one_by_one(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        attended = []
        for number, part in enumerate(self.singles):
            own_keys = _of_slots(keys, part.slot, part.slot + 1, part.end)
            own_values = _of_slots(values, part.slot, part.slot + 1, part.end)
            attended.append(
                F.scaled_dot_product_attention(query[number : number + 1], own_keys, own_values, scale=scale)
            )
        return torch.cat(attended)


def _of_slots(cached: torch.Tensor, first: int, last: int, tokens: int) -> torch.Tensor:
    """The first tokens of some slots, as attention takes them: (slots, heads, tokens, size)."""
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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers, (1, heads, tokens, size) -> ((1, tokens, heads, size), None).

    Outside `SlotModel.logits` it is that of one row without padding, all of it or its next token: transformers makes no
    masks for this function. Raises CannotSlot where another would be needed.
    """
    if artel_step is None:
        rows, tokens = query.shape[0], query.shape[2]
        if attention_mask is None and (rows > 1 or 1 < tokens < key.shape[2]):
            raise CannotSlot("outside slots one row is computed, whole or by its next token: others need a mask")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    window = sliding_window is not None and sliding_window < artel_step.context
    changed = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if window or changed or attention_mask is not None:
        raise CannotSlot(f"attention with {'a window' if window else changed or 'a mask'} is not computed in slots")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    return artel_step.attend(layer, query, key, value, scaling)[None], None
