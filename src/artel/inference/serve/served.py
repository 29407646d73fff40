"""A served model: its endpoints, its engine, its context length, and the tokens that end its answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import torch

from artel.errors import InputError
from artel.generation.adapters import AdapterTurns
from artel.generation.base import DEFAULT_REQUESTS, Engine
from artel.generation.generate import text_end
from artel.generation.make import make_engine
from artel.inference.open import OpenedModel
from artel.inference.serve.grammars import Grammars
from artel.models.device import release_helpers
from artel.models.loading.structure import position_limit
from artel.tokens.tokenizer.template_calls import CallForm, find_call_form
from artel.tokens.tokenizer.template_tools import tool_style
from artel.tokens.tokenizer.word_cache import piece_bytes

Result = TypeVar("Result")
_CONTEXT = 4096
"""Default context length in tokens, if the model has no smaller limit."""
_MAX_LOG_LINES = 100
"""Maximum log lines about a model, since they quote what clients send."""


class ServedModel:
    """One model behind the server."""

    def __init__(
        self, opened: OpenedModel, name: str, requests: int | None, context: int | None, adapters: tuple[str, ...] = ()
    ) -> None:
        """`requests` are computed concurrently; None: chosen for the model. `adapters`: names of its adapters.

        Raise InputError if the context does not fit the model or the memory.
        """
        self.opened = opened
        self.name = name
        self._logged: set[str] = set()
        limit = position_limit(opened.model)
        if context is not None and limit is not None and context > limit:
            raise InputError.at("--context", f"the model supports {limit:,} tokens", f"use at most {limit}")
        self.context = context or min(_CONTEXT, limit or _CONTEXT)
        self._worker = ThreadPoolExecutor(1, "artel-text")  # a tokenizer is not thread-safe
        self._requests = requests
        self.is_reloading = False
        self.engine: Engine | None = None
        self._adapter_turns: AdapterTurns | None = None
        if not self.generates:
            release_helpers()  # of this thread, since `_worker` starts its own
            return
        self._read_ends()
        engine = make_engine(opened.model, opened.tokenizer, requests, self.context, share_prefixes=not adapters)
        if adapters:
            self._adapter_turns = AdapterTurns(engine, opened.model)
            engine = self._adapter_turns.get_engine(None)
        self.engine = engine

    def with_adapter(self, opened: OpenedModel, name: str) -> ServedModel:
        """Return a copy of this served model that uses the adapter `name`, and the tokenizer and run of `opened`."""
        assert self._adapter_turns is not None
        served = copy(self)
        served.opened, served.name, served._logged = opened, name, set()
        served._read_ends()
        served.engine = self._adapter_turns.get_engine(name)
        return served

    def replace_model(self, load: Callable[[], OpenedModel], name: str) -> None:
        """Serve the model that `load` returns, under `name`. Running answers are finished first.

        If `load` raises, the earlier model is served again. Raise InputError if the new one does not fit into memory.
        """
        assert self.engine is not None
        self.is_reloading = True
        try:
            self.engine.close()
            self.opened, self.name = load(), name
            self._read_ends()
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # of the earlier model
            model, tokenizer = self.opened.model, self.opened.tokenizer
            self.engine = make_engine(model, tokenizer, self._requests, self.context)
            self.is_reloading = False

    def _read_ends(self) -> None:
        """Read the ends of texts and answers from the tokenizer and its chat template."""
        opened = self.opened
        self.template = opened.chat_template()
        self.tool_style = tool_style(opened.tokenizer, self.template)
        self.turn_end = opened.turn_end(self.template)
        self.text_end = text_end(opened.model, opened.tokenizer)
        self.grammars = Grammars(opened.tokenizer, self.turn_end.ids)
        self._call_form: list[CallForm | None] = []

    def log_once(self, message: str) -> None:
        """Log a line about this model, unless it was logged before or the log has too many lines."""
        line = " ".join(message.split())[:300]
        if line not in self._logged and len(self._logged) < _MAX_LOG_LINES:
            self._logged.add(line)
            print(f"{self.name}: {line}", file=sys.stderr, flush=True)

    @property
    def call_form(self) -> CallForm | None:
        """The form of forced calls, found at first use, or None if calls cannot be forced."""
        if not self._call_form and self.tool_style is not None:
            form = find_call_form(self.opened.tokenizer, self.template, self.tool_style, self.turn_end)
            self._call_form.append(form)
        return self._call_form[0] if self._call_form else None

    @property
    def requests(self) -> int:
        """Number of requests to admit in addition to the queue, even if the model answers one at a time."""
        return DEFAULT_REQUESTS if self.engine is None else max(DEFAULT_REQUESTS, self.engine.requests)

    @property
    def generates(self) -> bool:
        """True if the model generates text token by token."""
        return self.opened.objective.generates

    @property
    def endpoints(self) -> list[str]:
        """Paths of the API that the model answers, the most suitable first."""
        if self.generates:
            is_chat_model = not self.opened.objective.packs_text or bool(self.opened.tokenizer.hf.chat_template)
            return [*["/v1/chat/completions", "/v1/completions"][:: 1 if is_chat_model else -1], "/v1/responses"]
        by_path = {
            "/v1/completions": self.can("generate"),
            "/v1/classify": self.can("classify"),
            "/v1/entities": self.can("entities"),
            "/v1/rerank": self.can("rerank"),
            "/v1/score": self.can("score"),
            "/v1/fill-mask": self.fills_masks,
            "/v1/answers": self.answers_questions,
            "/v1/embeddings": self.embeds,
        }
        return [path for path, is_offered in by_path.items() if is_offered]

    def can(self, task: str) -> bool:
        """True if its objective answers a task (`Decoding.tasks`)."""
        return task in self.opened.decoding.tasks

    @property
    def embeds(self) -> bool:
        """True if the model returns vectors for texts, even if it was not trained for that."""
        return not (self.generates or self.can("generate"))

    @property
    def fills_masks(self) -> bool:
        return self.opened.objective.presentation.pipeline_tag == "fill-mask"

    @property
    def answers_questions(self) -> bool:
        return self.can("answer")

    @property
    def num_output_ids(self) -> int:
        """Number of token ids that can be generated: tokenizer and model may each have more."""
        config: Any = self.opened.model.config.get_text_config()
        return min(self.opened.tokenizer.vocabulary, config.vocab_size)

    def token_text(self, token: int) -> str:
        """Return a token's text, with U+FFFD for an incomplete character."""
        return self.opened.tokenizer.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        text = self.token_text(token)
        if "\ufffd" not in text:
            return text.encode()
        token_string: str = self.opened.tokenizer.hf.convert_ids_to_tokens(token)
        return piece_bytes(token_string) or text.encode()

    def token_name(self, token: int) -> str:
        """Return a token's text, or its bytes in OpenAI's notation if it is an incomplete character."""
        text = self.token_text(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token)) if "\ufffd" in text else text

    async def work(self, task: Callable[[], Result]) -> Result:
        """Run a task in the model's thread, one after another, outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, task)

    def describe(self) -> dict[str, Any]:
        """Return the entry in /v1/models."""
        entry: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "artel",
            "objective": self.opened.objective.config.objective,
            "context_length": self.context,
            "endpoints": self.endpoints,
        }
        if self.fills_masks:
            entry["mask_token"] = self.opened.tokenizer.hf.mask_token
        return entry

    def close(self) -> None:
        """Finish running answers, and stop."""
        if self.engine is not None:
            self.engine.close()
        self._worker.shutdown()


def get_api_name(path: str) -> str:
    """Return the name of a model in the API: the last component of a path, or the full hub id."""
    return Path(path).resolve().name if Path(path).exists() else path
