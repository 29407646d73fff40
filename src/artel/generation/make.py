"""The engine for a model: batched if its device and architecture allow, otherwise sequential."""

from __future__ import annotations

import queue
import threading
from contextlib import closing
from typing import Any

from transformers import PreTrainedModel

from artel.errors import InputError
from artel.generation.base import (
    DEFAULT_REQUESTS,
    Engine,
    EngineError,
    Generation,
    concurrent_requests,
    first_line,
    fitting_cache_tokens,
    key_value_bytes,
)
from artel.generation.generate import continue_ids
from artel.generation.paged import BatchingEngine, paged_cache_tokens
from artel.generation.slot_model import SlotsUnsupported, packed_bytes, uses_slots
from artel.generation.slots import SlotEngine, slot_cache_tokens
from artel.models.device import release_helpers
from artel.tokens import Tokenizer


def make_engine(
    model: PreTrainedModel, tokenizer: Tokenizer, requests: int | None, context: int, *, share_prefixes: bool = True
) -> Engine:
    """Return an engine that batches requests, or a sequential one if the model cannot be batched.

    The engine computes at most `requests` concurrently, each with up to `context` tokens of prompt and answer. The
    default number suits model and machine. With `share_prefixes`, equal prefixes of prompts are computed once, and the
    model must not change. Raise InputError if `context` does not fit in memory.
    """
    constant_length = constant_rope_length(model)
    if constant_length is not None and context > constant_length:
        reason = f"beyond {constant_length:,} tokens its positions follow the longest text (rope_type)"
        return SequentialEngine(model, tokenizer, f"one request after another: {reason}")
    reasons = []
    if model.device.type == "cpu":
        try:
            return SlotEngine(model, requests or concurrent_requests(model), context, share_prefixes)
        except SlotsUnsupported as error:
            reasons.append(first_line(error))
    try:
        engine = BatchingEngine(model, requests or DEFAULT_REQUESTS, context, share_prefixes)
    except InputError:
        raise
    except Exception as error:  # transformers raises many types for models that it cannot batch
        return SequentialEngine(
            model, tokenizer, f"one request after another: {'; '.join([*reasons, first_line(error)])}"
        )
    if reasons:
        engine.note += f" by transformers' batching ({reasons[0]})"
    return engine


def planned_cache_bytes(model: PreTrainedModel, device: str, requests: int, context: int, free: int) -> dict[str, int]:
    """Return the bytes of keys and values, and of packed weights, of the engine for a model on the meta device.

    `device`: type of the device, with `free` bytes of memory. The cache is as large as when an answer has filled its
    `context`. `freed_cache`: that of smaller slots, which a training process keeps (`training/memory.py`).
    """
    token_bytes = key_value_bytes(model)
    max_tokens = max(0, fitting_cache_tokens(free, token_bytes))
    packed = freed = 0
    if device != "cpu":
        tokens = paged_cache_tokens(requests, context, max_tokens)
    elif uses_slots(model):
        tokens, freed = slot_cache_tokens(requests, context, max_tokens)
        packed = packed_bytes(model, free)
    else:
        tokens = context
    return {"keys_and_values": tokens * token_bytes, "freed_cache": freed * token_bytes, "packed_weights": packed}


def constant_rope_length(model: PreTrainedModel) -> int | None:
    """Return the length up to which rotary frequencies are constant; None if they never change.

    With `rope_type: dynamic` or `longrope`, transformers chooses them by the highest position in a forward pass
    (`dynamic_rope_update`), of any text. So in a batch, an answer would depend on the other answers.
    """
    config: Any = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = []
    for parameters in (rope, *rope.values()):  # one for all layers, or one per layer type
        if not isinstance(parameters, dict):
            continue
        rope_type = str(parameters.get("rope_type"))
        if rope_type == "longrope":
            original = parameters.get("original_max_position_embeddings")
            lengths.append(original or config.max_position_embeddings)
        elif "dynamic" in rope_type:
            lengths.append(config.max_position_embeddings)
    return min(lengths, default=None)


class SequentialEngine(Engine):
    """Generates one answer after another, for models whose state cannot be paged, such as Mamba and RWKV."""

    requests = 1

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, note: str) -> None:
        self.note = note
        self._model, self._tokenizer = model, tokenizer
        self._jobs: queue.Queue[tuple[list[int], Generation] | None] = queue.Queue()
        self._is_closing = False
        self._lock = threading.Lock()
        release_helpers()  # of this thread; the engine's thread starts its own
        self._thread = threading.Thread(target=self._run, name="artel-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], generation: Generation) -> None:
        with self._lock:  # requests submitted before `close` are answered
            if self._is_closing:
                raise EngineError("the engine is stopping")
            self._jobs.put((prompt, generation))

    def cancel(self, generation: Generation) -> None:
        generation.end()

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            prompt, generation = job
            try:
                self._answer(prompt, generation)
            except Exception as error:  # one request fails, the others continue
                generation.fail(str(error) or type(error).__name__)

    def _answer(self, prompt: list[int], generation: Generation) -> None:
        tokens = continue_ids(
            self._model, self._tokenizer, prompt, generation.choose, generation.new_tokens, None, generation.stop
        )
        with closing(tokens):
            while not generation.is_over and next(tokens, None) is not None:
                pass
