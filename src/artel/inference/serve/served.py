"""A model that is served: what it can do, its engine, its limits, and what ends its answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

from artel.errors import InputError
from artel.inference.engine.adapters import AdapterTurns
from artel.inference.engine.base import Engine
from artel.inference.engine.make import make_engine
from artel.inference.engine.room import USUAL
from artel.inference.open import OpenedModel
from artel.inference.serve.grammar import Grammars
from artel.models.device import release_helpers
from artel.models.generate import text_end
from artel.models.loading.structure import position_limit
from artel.tokens.tokenizer.template_calls import CallForm, call_form
from artel.tokens.tokenizer.template_tools import tool_style
from artel.tokens.tokenizer.word_cache import bytes_of_piece

Result = TypeVar("Result")
_CONTEXT = 4096
"""Tokens of prompt and answer, where the model has no smaller limit and the user writes none."""
_MOST_SAID = 100
"""Lines about a model: what clients send is part of them."""


class ServedModel:
    """One model behind the server."""

    def __init__(
        self, opened: OpenedModel, name: str, requests: int | None, context: int | None, adapters: tuple[str, ...] = ()
    ) -> None:
        """`requests` are computed at once; None: as many as suit the model. `adapters`: names of those that it has.

        Raises InputError where the context does not fit the model or the memory.
        """
        self.opened = opened
        self.name = name
        self._said: set[str] = set()
        limit = position_limit(opened.model)
        if context is not None and limit is not None and context > limit:
            raise InputError.at("--context", f"the model takes {limit:,} tokens", f"write at most {limit}")
        self.context = context or min(_CONTEXT, limit or _CONTEXT)
        self._worker = ThreadPoolExecutor(1, "artel-text")  # a tokenizer is no place for two threads
        self.engine: Engine | None = None
        self._turns: AdapterTurns | None = None
        if not self.generates:
            release_helpers()  # of the thread that opened the model: `_worker` has its own
            return
        self._read_ends()
        engine = make_engine(opened.model, opened.tokenizer, requests, self.context, share_beginnings=not adapters)
        if adapters:
            self._turns = AdapterTurns(engine, opened.model)
            engine = self._turns.of(None)
        self.engine = engine

    def with_adapter(self, opened: OpenedModel, name: str) -> ServedModel:
        """The same model with that one of its adapters, whose tokenizer and run are those of `opened`."""
        assert self._turns is not None
        served = copy(self)
        served.opened, served.name, served._said = opened, name, set()
        served._read_ends()
        served.engine = self._turns.of(name)
        return served

    def _read_ends(self) -> None:
        """What ends a text and an answer, by the tokenizer and its chat template."""
        opened = self.opened
        self.template = opened.chat_template()
        self.tool_style = tool_style(opened.tokenizer, self.template)
        self.turn_end = opened.turn_end(self.template)
        self.text_end = text_end(opened.model, opened.tokenizer)
        self.grammars = Grammars(opened.tokenizer, self.turn_end.ids)
        self._call_form: list[CallForm | None] = []

    def say_once(self, what: str) -> None:
        """Write a line about this model to the server's log, if it is not there yet, and not too many are."""
        line = " ".join(what.split())[:300]
        if line not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(line)
            print(f"{self.name}: {line}", file=sys.stderr, flush=True)

    @property
    def call_form(self) -> CallForm | None:
        """The form in which calls are forced, tried when it is first asked for; None if they cannot be."""
        if not self._call_form and self.tool_style is not None:
            form = call_form(self.opened.tokenizer, self.template, self.tool_style, self.turn_end)
            self._call_form.append(form)
        return self._call_form[0] if self._call_form else None

    @property
    def requests(self) -> int:
        """Answers that are taken on beside those that wait; a model that answers one at a time has them wait too."""
        return USUAL if self.engine is None else max(USUAL, self.engine.requests)

    @property
    def generates(self) -> bool:
        """Whether it writes text, token by token."""
        return self.opened.objective.generates

    @property
    def endpoints(self) -> list[str]:
        """The paths of the API that are for it, what it is best at first."""
        if self.generates:
            talks = not self.opened.objective.packs_text or bool(self.opened.tokenizer.hf.chat_template)
            return [*["/v1/chat/completions", "/v1/completions"][:: 1 if talks else -1], "/v1/responses"]
        ways = {
            "/v1/completions": self.can("generate"),
            "/v1/classify": self.can("classify"),
            "/v1/entities": self.can("entities"),
            "/v1/rerank": self.can("rerank"),
            "/v1/score": self.can("score"),
            "/v1/fill-mask": self.fills_masks,
            "/v1/answers": self.answers_questions,
            "/v1/embeddings": self.embeds,
        }
        return [path for path, can in ways.items() if can]

    def can(self, task: str) -> bool:
        """Whether its objective answers a task (`Objective.tasks`)."""
        return task in self.opened.objective.tasks

    @property
    def embeds(self) -> bool:
        """Whether it gives texts vectors, whatever it learned."""
        return not (self.generates or self.can("generate"))

    @property
    def fills_masks(self) -> bool:
        return self.opened.objective.pipeline_tag == "fill-mask"

    @property
    def answers_questions(self) -> bool:
        return self.can("answer")

    @property
    def written_ids(self) -> int:
        """Ids below it can be written: tokenizer and model may each have more."""
        config: Any = self.opened.model.config.get_text_config()
        return min(self.opened.tokenizer.vocabulary, config.vocab_size)

    def token_text(self, token: int) -> str:
        """A token as text of its own; U+FFFD stands for a part of a character."""
        return self.opened.tokenizer.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, of which several may make one character."""
        text = self.token_text(token)
        if "\ufffd" not in text:
            return text.encode()
        piece: str = self.opened.tokenizer.hf.convert_ids_to_tokens(token)
        return bytes_of_piece(piece) or text.encode()

    def token_name(self, token: int) -> str:
        """Return a token's text, or as OpenAI writes them the bytes of one that is only a part of a character."""
        text = self.token_text(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token)) if "\ufffd" in text else text

    async def work(self, task: Callable[[], Result]) -> Result:
        """Run what takes a while, one after another, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, task)

    def describe(self) -> dict[str, Any]:
        """Its entry in /v1/models."""
        described: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "artel",
            "objective": self.opened.objective.config.objective,
            "context_length": self.context,
            "endpoints": self.endpoints,
        }
        if self.fills_masks:
            described["mask_token"] = self.opened.tokenizer.hf.mask_token
        return described

    def close(self) -> None:
        """Answer what has begun, and end."""
        if self.engine is not None:
            self.engine.close()
        self._worker.shutdown()


def name_of(path: str) -> str:
    """The name of a model in the API: a run's or folder's last part, a hub id as it is."""
    return Path(path).resolve().name if Path(path).exists() else path
