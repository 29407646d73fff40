"""Answers one after another: for models whose state cannot be shared by several."""

from __future__ import annotations

import queue
import threading
from contextlib import closing

from transformers import PreTrainedModel

from artel.inference.engine.base import Engine, EngineError, Generation
from artel.models.device import release_helpers
from artel.models.generate import continue_ids
from artel.tokens import Tokenizer


class SequentialEngine(Engine):
    """For models whose state cannot be paged: Mamba, RWKV and their kin."""

    requests = 1

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, note: str) -> None:
        self.note = note
        self._model, self._tokenizer = model, tokenizer
        self._jobs: queue.Queue[tuple[list[int], Generation] | None] = queue.Queue()
        self._is_closing = False
        self._door = threading.Lock()
        release_helpers()  # of the thread that opened the model: the engine's has its own
        self._thread = threading.Thread(target=self._run, name="artel-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], generation: Generation) -> None:
        with self._door:  # what is let in before `close` is answered
            if self._is_closing:
                raise EngineError("the engine is stopping")
            self._jobs.put((prompt, generation))

    def cancel(self, generation: Generation) -> None:
        generation.end()

    def close(self) -> None:
        with self._door:
            self._is_closing = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            prompt, generation = job
            try:
                self._answer(prompt, generation)
            except Exception as error:  # whatever one request ends in, the others go on
                generation.fail(str(error) or type(error).__name__)

    def _answer(self, prompt: list[int], generation: Generation) -> None:
        tokens = continue_ids(
            self._model, self._tokenizer, prompt, generation.choose, generation.new_tokens, None, generation.stop
        )
        with closing(tokens):
            while not generation.is_over and next(tokens, None) is not None:
                pass
