"""Concurrent requests on a CPU. Each request has a slot, and every forward pass serves all of them.

A pass computes the next token of each answer, and chunks of new prompts. Slots keep their contents: a prompt with the
same prefix as an earlier text reuses its keys and values.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from artel.generation.base import (
    BATCH_TOKENS,
    DEFAULT_REQUESTS,
    Engine,
    EngineError,
    Generation,
    tokens_in_memory,
)
from artel.generation.slot_model import Chunk, SlotModel
from artel.models.device import release_helpers

_WORTH_WAITING = 16
"""Tokens that a text waits for, a pass or a few, instead of computing them again."""
_INITIAL_CAPACITY = 256
"""Initial tokens per slot. Doubled for longer texts, which may leave fewer slots."""


@dataclass(slots=True)
class _Text:
    """A prompt and the tokens generated after it."""

    ids: list[int]
    generation: Generation
    number: int = 0
    """Position in the order of arrival."""


@dataclass(slots=True)
class _Slot:
    cached: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the slot."""
    text: _Text | None = None
    last_pass: int = 0
    """Number of the last pass that used the slot."""


class SlotEngine(Engine):
    """Continuous batching in slots."""

    def __init__(self, model: PreTrainedModel, requests: int, context: int, share_prefixes: bool = True) -> None:
        """Raise SlotsUnsupported if the model does not work in slots, InputError like `make_engine`."""
        self.note = f"up to {requests} concurrent requests"
        self.requests, self._context, self._share_prefixes = requests, context, share_prefixes
        self._model = SlotModel(model.eval(), context)
        self._slots: list[_Slot] = []
        try:
            self._memory_tokens = tokens_in_memory(model.device, self._model.token_bytes, context)
            self._resize(min(_INITIAL_CAPACITY, context))
        except BaseException:
            self._model.close()
            raise
        self._arrivals: queue.SimpleQueue[list[_Text] | None] = queue.SimpleQueue()
        self._waiting_texts: deque[_Text] = deque()
        self._text_count = self._pass_count = 0
        self._is_closing = False
        self._lock = threading.Lock()
        release_helpers()  # of this thread: the engine's thread starts its own
        self._thread = threading.Thread(target=self._run, name="artel-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], generation: Generation) -> None:
        self.submit_all([(prompt, generation)])

    def submit_all(self, requests: Sequence[tuple[list[int], Generation]]) -> None:
        for prompt, generation in requests:
            tokens = len(prompt) + generation.new_tokens - 1  # the last token is not an input
            if tokens > self._context:
                raise EngineError(f"prompt and answer have {tokens:,} tokens, but the context has {self._context:,}")
        texts = [_Text(list(prompt), generation) for prompt, generation in requests]
        with self._lock:  # requests before `close` are answered
            if self._is_closing:
                raise EngineError("the engine is stopping")
            for text in texts:
                self._text_count += 1
                text.number = self._text_count
            self._arrivals.put(texts)

    def cancel(self, generation: Generation) -> None:
        generation.end()  # the next pass frees its slot

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._arrivals.put(None)
        self._thread.join()
        self._model.close()

    # In the engine's thread ------------------------------------------------------------

    def _run(self) -> None:
        while self._receive():
            try:
                self._run_pass()
            except Exception as error:  # the answers of this pass fail, the others continue
                self._fail(str(error) or type(error).__name__)

    def _receive(self) -> bool:
        """Queue new requests, waiting for one if there is nothing to do. Return False at the end."""
        while True:
            is_idle = not self._waiting_texts and not self._running_texts()
            if is_idle and self._is_closing and self._arrivals.empty():
                return False
            try:
                texts = self._arrivals.get(block=is_idle)
            except queue.Empty:
                return True
            self._waiting_texts.extend(texts or [])

    def _run_pass(self) -> None:
        self._pass_count += 1
        self._release_slots()
        self._grow_slots()
        self._admit_texts()
        chunks = self._next_chunks()
        if not chunks:
            return
        rows = self._model.logits(chunks)
        for chunk, logits in zip(chunks, rows, strict=True):
            slot = self._slots[chunk.slot]
            slot.cached.extend(chunk.ids)
            slot.last_pass = self._pass_count
            if slot.text is not None and chunk.end == len(slot.text.ids):
                _choose(slot.text, logits)

    def _running_texts(self) -> list[_Text]:
        return [slot.text for slot in self._slots if slot.text is not None]

    def _release_slots(self) -> None:
        """Free the slots of finished answers."""
        for slot in self._slots:
            if slot.text is not None and slot.text.generation.is_over:
                slot.text = None
        self._waiting_texts = deque(text for text in self._waiting_texts if not text.generation.is_over)

    def _grow_slots(self) -> None:
        """Grow the slots to fit the longest text. If fewer slots remain, the newest texts wait again."""
        running = self._running_texts()
        longest = max((len(text.ids) for text in running), default=0)
        if longest <= self._capacity:
            return
        capacity = self._round_up_capacity(longest)
        running.sort(key=lambda text: text.number)
        for text in reversed(running[self._slot_count(capacity) :]):
            next(slot for slot in self._slots if slot.text is text).text = None
            self._waiting_texts.appendleft(text)
        self._resize(capacity)

    def _admit_texts(self) -> None:
        """Start waiting texts, in order, while they fit. One waits if another text is reading its beginning."""
        deferred_texts = []
        while self._waiting_texts:
            running = self._running_texts()
            longest = max(len(text.ids) for text in [*running, self._waiting_texts[0]])
            min_capacity = self._round_up_capacity(longest)
            capacity = max(min_capacity, self._capacity)
            if len(running) >= self._slot_count(capacity):
                capacity = min_capacity  # the current, longer slots are no longer needed
            if len(running) >= self._slot_count(capacity):
                break
            text = self._waiting_texts.popleft()
            if self._share_prefixes and self._is_being_read(text):
                deferred_texts.append(text)
                continue
            if capacity != self._capacity:
                self._resize(capacity)
            self._assign_slot(text)
        self._waiting_texts.extendleft(reversed(deferred_texts))

    def _is_being_read(self, text: _Text) -> bool:
        """True if a running text begins like `text`, and a good part of that is not cached yet."""
        return any(
            slot.text is not None and _common_length(slot.text.ids, text.ids) >= len(slot.cached) + _WORTH_WAITING
            for slot in self._slots
        )

    def _assign_slot(self, text: _Text) -> None:
        """Give a text a slot, and reuse a cached prefix."""
        # Prefer the first slots: a few texts there share one attention call.
        free_slots = [number for number, slot in enumerate(self._slots) if slot.text is None]
        target = self._slots[
            min(free_slots, key=lambda number: (number // DEFAULT_REQUESTS, self._slots[number].last_pass))
        ]
        shared_tokens = 0
        if self._share_prefixes:
            max_shared = len(text.ids) - 1  # the last token is computed, for its logits
            source = max(self._slots, key=lambda slot: _common_length(slot.cached, text.ids))
            shared_tokens = min(_common_length(source.cached, text.ids), max_shared)
            if source.text is None and 4 * shared_tokens >= 3 * len(
                source.cached
            ):  # this text continues that slot's text
                target = source
            elif source is not target and shared_tokens:
                self._model.copy(self._slots.index(source), self._slots.index(target), shared_tokens)
        target.cached, target.text = text.ids[:shared_tokens], text

    def _next_chunks(self) -> list[Chunk]:
        """Return the tokens of this pass: the next tokens of answers first, then prompts in order of arrival."""
        budget = BATCH_TOKENS
        chunks = []
        occupied = [(slot.text, number, slot) for number, slot in enumerate(self._slots) if slot.text is not None]
        for text, number, slot in sorted(
            occupied, key=lambda entry: (len(entry[0].ids) - len(entry[2].cached) > 1, entry[0].number)
        ):
            start = len(slot.cached)
            ids = text.ids[start : start + budget]
            budget -= len(ids)
            if ids:
                chunks.append(Chunk(number, start, ids))
        return chunks

    def _fail(self, message: str) -> None:
        texts = self._running_texts() or self._waiting_texts
        for text in texts:
            text.generation.fail(message)
        for slot in self._slots:
            slot.cached, slot.text = [], None

    # Memory ----------------------------------------------------------------------------

    def _round_up_capacity(self, tokens: int) -> int:
        return _slot_capacity(tokens, self._context)

    def _slot_count(self, capacity: int) -> int:
        """Return the number of slots of a capacity that fit in memory."""
        return min(self.requests, self._memory_tokens // capacity)

    def _resize(self, capacity: int) -> None:
        """Change the capacity of slots. Keep slots in use, and cached ones if they fit."""
        count = self._slot_count(capacity)
        order = sorted(range(len(self._slots)), key=lambda number: self._slots[number].text is None)[:count]
        sources = [number if self._slots[number].cached else None for number in order]
        self._model.resize([*sources, *[None] * (count - len(order))], capacity)
        self._slots = [self._slots[number] for number in order] + [_Slot() for _ in range(count - len(order))]
        for slot in self._slots:
            del slot.cached[capacity:]
        self._capacity = capacity


def _slot_capacity(tokens: int, context: int) -> int:
    """Return the capacity of slots for texts of up to `tokens` tokens."""
    capacity = min(_INITIAL_CAPACITY, context)
    while capacity < tokens:
        capacity *= 2
    return min(capacity, context)


def slot_cache_tokens(requests: int, context: int, memory_tokens: int) -> tuple[int, int]:
    """Return the tokens of all slots once an answer has filled its `context`, and before the slots last grew.

    `memory_tokens`: tokens that fit in memory.
    """
    capacities = [_slot_capacity(0, context)]
    while capacities[-1] < context - 1:  # the last token is not an input
        capacities.append(_slot_capacity(capacities[-1] + 1, context))
    tokens = [min(requests, memory_tokens // capacity) * capacity for capacity in capacities]
    return tokens[-1], tokens[-2] if len(tokens) > 1 else 0


def _choose(text: _Text, logits: torch.Tensor) -> None:
    if text.generation.is_over:
        return
    try:
        text.ids.append(text.generation.choose(logits))
    except Exception as error:  # one request fails, the others continue
        text.generation.fail(str(error) or type(error).__name__)


def _common_length(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two texts."""
    shorter = min(len(first), len(second))
    return next((index for index in range(shorter) if first[index] != second[index]), shorter)
