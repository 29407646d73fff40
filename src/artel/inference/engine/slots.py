"""Concurrent requests on a CPU: each has a slot, and every forward pass is for all of them.

A pass computes the next token of each answer, and chunks of new prompts. Slots keep their contents: a prompt with the
same prefix as an earlier text reuses its keys and values.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from artel.inference.engine.base import (
    BATCH_TOKENS,
    DEFAULT_REQUESTS,
    Engine,
    EngineError,
    Generation,
    tokens_in_memory,
)
from artel.inference.engine.slot_model import Chunk, SlotModel
from artel.models.device import release_helpers

_CAPACITY = 256
"""Initial tokens per slot. Doubled for longer texts; then there may be fewer slots."""


@dataclass(slots=True)
class _Text:
    """A prompt and what was written after it."""

    ids: list[int]
    generation: Generation
    number: int
    """In order of arrival."""


@dataclass(slots=True)
class _Slot:
    cached: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the slot."""
    text: _Text | None = None
    used: int = 0
    """The last pass that used it."""


class SlotEngine(Engine):
    """Continuous batching in slots."""

    def __init__(self, model: PreTrainedModel, requests: int, context: int, share_prefixes: bool = True) -> None:
        """Raise CannotSlot if a trial shows that the model does not work in slots; InputError as `make_engine`."""
        self.note = f"up to {requests} requests at once"
        self.requests, self._context, self._shares = requests, context, share_prefixes
        self._model = SlotModel(model.eval(), context)
        self._slots: list[_Slot] = []
        try:
            self._room = tokens_in_memory(model.device, self._model.token_bytes, context)
            self._resize(min(_CAPACITY, context))
        except BaseException:
            self._model.close()
            raise
        self._arrived: queue.SimpleQueue[_Text | None] = queue.SimpleQueue()
        self._waiting: deque[_Text] = deque()
        self._texts = self._passes = 0
        self._is_closing = False
        self._lock = threading.Lock()
        release_helpers()  # of this thread: the engine's thread starts its own
        self._thread = threading.Thread(target=self._run, name="artel-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], generation: Generation) -> None:
        tokens = len(prompt) + generation.new_tokens - 1  # the last one is not an input
        if tokens > self._context:
            raise EngineError(f"prompt and answer have {tokens:,} tokens; there is room for {self._context:,}")
        ids = list(prompt)
        with self._lock:  # requests before `close` are answered
            if self._is_closing:
                raise EngineError("the engine is stopping")
            self._texts += 1
            self._arrived.put(_Text(ids, generation, self._texts))

    def cancel(self, generation: Generation) -> None:
        generation.end()  # the next pass frees its slot

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._arrived.put(None)
        self._thread.join()
        self._model.close()

    # In the engine's thread ------------------------------------------------------------

    def _run(self) -> None:
        while self._take():
            try:
                self._pass()
            except Exception as error:  # the answers of this pass fail, the others continue
                self._fail(str(error) or type(error).__name__)

    def _take(self) -> bool:
        """Queue new requests, waiting for one if there is nothing to do. Return False at the end."""
        while True:
            is_idle = not self._waiting and not self._running()
            if is_idle and self._is_closing and self._arrived.empty():
                return False
            try:
                text = self._arrived.get(block=is_idle)
            except queue.Empty:
                return True
            if text is not None:
                self._waiting.append(text)

    def _pass(self) -> None:
        self._passes += 1
        self._free_slots()
        self._grow()
        self._admit()
        chunks = self._chunks()
        if not chunks:
            return
        rows = self._model.logits(chunks)
        for chunk, logits in zip(chunks, rows, strict=True):
            slot = self._slots[chunk.slot]
            slot.cached.extend(chunk.ids)
            slot.used = self._passes
            if slot.text is not None and chunk.end == len(slot.text.ids):
                _choose(slot.text, logits)

    def _running(self) -> list[_Text]:
        return [slot.text for slot in self._slots if slot.text is not None]

    def _free_slots(self) -> None:
        """Free the slots of finished answers."""
        for slot in self._slots:
            if slot.text is not None and slot.text.generation.is_over:
                slot.text = None
        self._waiting = deque(text for text in self._waiting if not text.generation.is_over)

    def _grow(self) -> None:
        """Make room for the longest text. If fewer slots remain, the newest texts wait again."""
        running = self._running()
        longest = max((len(text.ids) for text in running), default=0)
        if longest <= self._capacity:
            return
        capacity = self._capacity_for(longest)
        running.sort(key=lambda text: text.number)
        for text in reversed(running[self._count(capacity) :]):
            next(slot for slot in self._slots if slot.text is text).text = None
            self._waiting.appendleft(text)
        self._resize(capacity)

    def _admit(self) -> None:
        """Start waiting texts, in order, as long as there is room."""
        while self._waiting:
            running = self._running()
            longest = max(len(text.ids) for text in [*running, self._waiting[0]])
            least = self._capacity_for(longest)
            capacity = max(least, self._capacity)
            if len(running) >= self._count(capacity):
                capacity = least  # the present, longer slots are no longer needed
            if len(running) >= self._count(capacity):
                return
            if capacity != self._capacity:
                self._resize(capacity)
            self._place(self._waiting.popleft())

    def _place(self, text: _Text) -> None:
        """Give a text a slot, and reuse a cached prefix."""
        # A few texts in the first slots share one attention call.
        free = [number for number, slot in enumerate(self._slots) if slot.text is None]
        target = self._slots[min(free, key=lambda number: (number // DEFAULT_REQUESTS, self._slots[number].used))]
        common = 0
        if self._shares:
            most = len(text.ids) - 1  # the last token is computed, for its logits
            source = max(self._slots, key=lambda slot: _common(slot.cached, text.ids))
            common = min(_common(source.cached, text.ids), most)
            if source.text is None and 4 * common >= 3 * len(source.cached):  # this text continues it
                target = source
            elif source is not target and common:
                self._model.copy(self._slots.index(source), self._slots.index(target), common)
        target.cached, target.text = text.ids[:common], text

    def _chunks(self) -> list[Chunk]:
        """Return the tokens of this pass: the next tokens of answers first, then prompts in order of arrival."""
        left = BATCH_TOKENS
        chunks = []
        occupied = [(slot.text, number, slot) for number, slot in enumerate(self._slots) if slot.text is not None]
        for text, number, slot in sorted(
            occupied, key=lambda one: (len(one[0].ids) - len(one[2].cached) > 1, one[0].number)
        ):
            seen = len(slot.cached)
            ids = text.ids[seen : seen + left]
            left -= len(ids)
            if ids:
                chunks.append(Chunk(number, seen, ids))
        return chunks

    def _fail(self, why: str) -> None:
        texts = self._running() or self._waiting
        for text in texts:
            text.generation.fail(why)
        for slot in self._slots:
            slot.cached, slot.text = [], None

    # Memory ----------------------------------------------------------------------------

    def _capacity_for(self, tokens: int) -> int:
        capacity = min(_CAPACITY, self._context)
        while capacity < tokens:
            capacity *= 2
        return min(capacity, self._context)

    def _count(self, capacity: int) -> int:
        """Return the number of slots of a capacity that fit in memory."""
        return min(self.requests, self._room // capacity)

    def _resize(self, capacity: int) -> None:
        """Change the capacity of slots. Slots in use stay, then others as far as they fit."""
        count = self._count(capacity)
        order = sorted(range(len(self._slots)), key=lambda number: self._slots[number].text is None)[:count]
        sources = [number if self._slots[number].cached else None for number in order]
        self._model.resize([*sources, *[None] * (count - len(order))], capacity)
        self._slots = [self._slots[number] for number in order] + [_Slot() for _ in range(count - len(order))]
        for slot in self._slots:
            del slot.cached[capacity:]
        self._capacity = capacity


def _choose(text: _Text, logits: torch.Tensor) -> None:
    if text.generation.is_over:
        return
    try:
        text.ids.append(text.generation.choose(logits))
    except Exception as error:  # one request fails, the others continue
        text.generation.fail(str(error) or type(error).__name__)


def _common(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two texts."""
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)
