"""Answers of several requests at once on a CPU: each has a slot, and every forward pass is for all of them.

A pass computes the next token of each answer, and beside them parts of new prompts. Slots keep what they held: a
prompt that begins as another did takes over what was computed of the beginning.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from artel.inference.engine.base import BATCH_TOKENS, Engine, EngineError, Generation
from artel.inference.engine.room import USUAL, tokens_in_memory
from artel.inference.engine.slot_model import Part, SlotModel
from artel.models.device import release_helpers

_CAPACITY = 256
"""Tokens of a slot at first. It is doubled where a text has more, and there are fewer slots where memory is short."""


@dataclass(slots=True)
class _Text:
    """A prompt and what was written after it."""

    ids: list[int]
    generation: Generation
    number: int
    """By arrival."""


@dataclass(slots=True)
class _Slot:
    held: list[int] = field(default_factory=list)
    """The tokens whose keys and values are there."""
    text: _Text | None = None
    used: int = 0
    """The pass in which it was used last."""


class SlotEngine(Engine):
    """Continuous batching in slots."""

    def __init__(self, model: PreTrainedModel, requests: int, context: int, share_beginnings: bool = True) -> None:
        """Raises CannotSlot where a trial shows that the model cannot be computed so; InputError as `make_engine`."""
        self.note = f"up to {requests} requests at once"
        self.requests, self._context, self._shares = requests, context, share_beginnings
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
        self._door = threading.Lock()
        release_helpers()  # of the thread that opened the model: the engine's has its own
        self._thread = threading.Thread(target=self._run, name="artel-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], generation: Generation) -> None:
        tokens = len(prompt) + generation.new_tokens - 1  # the last one is not read
        if tokens > self._context:
            raise EngineError(f"prompt and answer have {tokens:,} tokens; there is room for {self._context:,}")
        ids = list(prompt)
        with self._door:  # what is let in before `close` is answered
            if self._is_closing:
                raise EngineError("the engine is stopping")
            self._texts += 1
            self._arrived.put(_Text(ids, generation, self._texts))

    def cancel(self, generation: Generation) -> None:
        generation.end()  # its slot is free at the next pass

    def close(self) -> None:
        with self._door:
            self._is_closing = True
            self._arrived.put(None)
        self._thread.join()
        self._model.close()

    # In the engine's thread ------------------------------------------------------------

    def _run(self) -> None:
        while self._take():
            try:
                self._pass()
            except Exception as error:  # the answers of this pass fail, and the others go on
                self._fail(str(error) or type(error).__name__)

    def _take(self) -> bool:
        """Take in what arrived, and wait for it where there is nothing to do. False at the end."""
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
        self._leave()
        self._grow()
        self._enter()
        parts = self._parts()
        if not parts:
            return
        rows = self._model.logits(parts)
        for part, logits in zip(parts, rows, strict=True):
            slot = self._slots[part.slot]
            slot.held.extend(part.ids)
            slot.used = self._passes
            if slot.text is not None and part.end == len(slot.text.ids):
                _choose(slot.text, logits)

    def _running(self) -> list[_Text]:
        return [slot.text for slot in self._slots if slot.text is not None]

    def _leave(self) -> None:
        """Free the slots of what is over."""
        for slot in self._slots:
            if slot.text is not None and slot.text.generation.is_over:
                slot.text = None
        self._waiting = deque(text for text in self._waiting if not text.generation.is_over)

    def _grow(self) -> None:
        """Make room for the longest text; where there is less for others then, the youngest wait again."""
        running = self._running()
        longest = max((len(text.ids) for text in running), default=0)
        if longest <= self._capacity:
            return
        capacity = self._capacity_for(longest)
        running.sort(key=lambda text: text.number)
        for text in reversed(running[self._count(capacity) :]):
            self._slot_of(text).text = None
            self._waiting.appendleft(text)
        self._resize(capacity)

    def _enter(self) -> None:
        """Begin what waits, in its order, as long as there is room."""
        while self._waiting:
            running = self._running()
            longest = max(len(text.ids) for text in [*running, self._waiting[0]])
            least = self._capacity_for(longest)
            capacity = max(least, self._capacity)
            if len(running) >= self._count(capacity):
                capacity = least  # slots as long as before are no longer needed
            if len(running) >= self._count(capacity):
                return
            if capacity != self._capacity:
                self._resize(capacity)
            self._place(self._waiting.popleft())

    def _place(self, text: _Text) -> None:
        """Give a text a slot, with what there is of its beginning."""
        # Few texts in the first slots are attended to together.
        free = [number for number, slot in enumerate(self._slots) if slot.text is None]
        target = self._slots[min(free, key=lambda number: (number // USUAL, self._slots[number].used))]
        common = 0
        if self._shares:
            most = len(text.ids) - 1  # the last one is computed for what follows it
            source = max(self._slots, key=lambda slot: _common(slot.held, text.ids))
            common = min(_common(source.held, text.ids), most)
            if source.text is None and 4 * common >= 3 * len(source.held):  # it goes on with this text
                target = source
            elif source is not target and common:
                self._model.copy(self._slots.index(source), self._slots.index(target), common)
        target.held, target.text = text.ids[:common], text

    def _parts(self) -> list[Part]:
        """What this pass computes: the next tokens of answers first, then prompts by their arrival."""
        left = BATCH_TOKENS
        parts = []
        occupied = [(slot.text, number, slot) for number, slot in enumerate(self._slots) if slot.text is not None]
        for text, number, slot in sorted(
            occupied, key=lambda one: (len(one[0].ids) - len(one[2].held) > 1, one[0].number)
        ):
            seen = len(slot.held)
            ids = text.ids[seen : seen + left]
            left -= len(ids)
            if ids:
                parts.append(Part(number, seen, ids))
        return parts

    def _fail(self, why: str) -> None:
        texts = self._running() or self._waiting
        for text in texts:
            text.generation.fail(why)
        for slot in self._slots:
            slot.held, slot.text = [], None

    # Memory ----------------------------------------------------------------------------

    def _capacity_for(self, tokens: int) -> int:
        capacity = min(_CAPACITY, self._context)
        while capacity < tokens:
            capacity *= 2
        return min(capacity, self._context)

    def _count(self, capacity: int) -> int:
        """How many slots of a capacity have room."""
        return min(self.requests, self._room // capacity)

    def _resize(self, capacity: int) -> None:
        """Slots of another capacity. Those that are in use stay, and of the others as many as there is room for."""
        count = self._count(capacity)
        order = sorted(range(len(self._slots)), key=lambda number: self._slots[number].text is None)[:count]
        kept = [number if self._slots[number].held else None for number in order]
        self._model.resize([*kept, *[None] * (count - len(order))], capacity)
        self._slots = [self._slots[number] for number in order] + [_Slot() for _ in range(count - len(order))]
        for slot in self._slots:
            del slot.held[capacity:]
        self._capacity = capacity

    def _slot_of(self, text: _Text) -> _Slot:
        return next(slot for slot in self._slots if slot.text is text)


def _choose(text: _Text, logits: torch.Tensor) -> None:
    if text.generation.is_over:
        return
    try:
        text.ids.append(text.generation.choose(logits))
    except Exception as error:  # whatever one request ends in, the others go on
        text.generation.fail(str(error) or type(error).__name__)


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)
