"""Chat with a model: a conversation, written by a chat template, with answers that arrive piece by piece."""

from __future__ import annotations

import difflib
import json
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from artel.config.schema.quantities import read_count, read_number
from artel.errors import InputError, Problem, WorkError
from artel.inference.chat_exchanges import Exchange, exchanges_of, from_a_message, read_conversation
from artel.inference.engine.base import Engine, EngineError, FinishReason
from artel.inference.engine.make import make_engine
from artel.inference.engine.one import write_text
from artel.inference.engine.sequential import SequentialEngine
from artel.inference.open import OpenedModel
from artel.models.generate import Sampling, check_embedded
from artel.models.loading.structure import position_limit
from artel.objectives.types import GenerationPrompt
from artel.storage import check_new_file, user_path, write_output
from artel.text import Message, ToolCall, Tools
from artel.text.tool_calls import CallReader
from artel.tokens.tokenizer.chat_template import CHATML, TemplateRefuses, prompt_ids
from artel.tokens.tokenizer.template_tools import ToolStyle, tool_style

Tell = Callable[[str], None]

_CONTEXT = 4096
"""Tokens of prompt and answer up to which what was said stays in the engine's cache, and is not read again."""

# The smallest and largest value of each setting. The bounds of the penalty keep any logits within float32.
_RANGES = {
    "history": (0, 10**6),
    "new_tokens": (1, 10**8),
    "repetition_penalty": (0.1, 10),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 10**9),
    "seed": (0, 2**63 - 1),
}


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of a conversation, which may change during it. Raises InputError for values out of range."""

    history: int = 10
    """Earlier exchanges in the prompt of a new message. The system message is always in it."""
    new_tokens: int = 200
    repetition_penalty: float = 1.2
    temperature: float = 0.5
    top_p: float = 0.6
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                shown = f"{value:g}" if abs(value) < 10**15 or value != value else "a number so large"
                problems.append(Problem(name, f"{shown} is out of range", f"it goes from {least} to {most:,}"))
        if problems:
            raise InputError(problems)

    def changed(self, name: str, value: str) -> ChatSettings:
        """The settings with one of them changed to a value as people write it (0.7, 1_000). Raises InputError."""
        types = {field.name: field.type for field in fields(self)}
        if name not in types:
            near = difflib.get_close_matches(name.replace("-", "_"), types, 1)
            fix = f"did you mean {near[0]}?" if near else f"settings are: {', '.join(types)}"
            raise InputError.at(name, "there is no such setting", fix)
        try:
            number: Any = read_count(value) if types[name] == "int" else read_number(value)
        except (ValueError, OverflowError) as error:
            raise InputError.at(name, str(error)) from None
        return replace(self, **{name: number})


class ChatSession:
    """A conversation with a model. Notes for the user go to `tell`."""

    def __init__(self, opened: OpenedModel, settings: ChatSettings, system: str, tell: Tell, tools: Tools = ()) -> None:
        """`tools` are functions that the model may call.

        Raises InputError for a model that does not continue text, and for a chat template that is wrong or takes no
        tools.
        """
        if not opened.objective.generates:
            what = f"it is a model for {opened.objective.config.objective}, which answers in no words of its own"
            raise InputError.at(opened.name, what, "give a causal model; this one works with artel generate")
        self.settings = settings
        self.system = system
        self.exchanges: list[Exchange] = []
        self._name = opened.name
        self._model, self._tokenizer = opened.model, opened.tokenizer
        self._window = position_limit(opened.model)
        self._tell = tell
        self._saved: set[Path] = set()
        self._written = 0  # number of answers so far: each has its own seed
        self._engine = _ChatEngine(opened)
        weakref.finalize(self, self._engine.close)
        self._template = opened.chat_template()
        self._stop = opened.turn_end(self._template)
        self._tools = tools
        style = tool_style(opened.tokenizer, self._template) if tools else None
        if tools and (style is None or not style.writes_tools):
            what = "the chat template writes no functions"
            raise InputError.at("--tools", what, "give a model that was trained with tools, or chat.template: chatml")
        self._tool_style = style or ToolStyle()
        if opened.template_setting == "auto" and not self._tokenizer.hf.chat_template:
            name = "chatml" if self._template == CHATML else "plain"
            tell(f"{opened.name}: its tokenizer has no chat template; the conversation is written as {name}")

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer to a message in pieces. The pieces yielded so far are in the history.

        Raises InputError, without changing the conversation, when the model cannot take the message.
        """
        if self.open_calls:
            names = ", ".join(call.name for call in self.open_calls)
            raise InputError.at("message", f"the model waits for what it called: {names}", "give the results")
        return self._answer(Exchange(message), self.exchanges)

    @property
    def open_calls(self) -> tuple[ToolCall, ...]:
        """The functions that the last answer calls, which have returned nothing yet."""
        return self.exchanges[-1].calls if self.exchanges else ()

    def drop_calls(self) -> None:
        """Take the open calls out of the last answer: it waits for nothing then."""
        if self.exchanges:
            self.exchanges[-1].calls = ()

    def answer_results(self, results: Sequence[str]) -> Iterator[str]:
        """Yield the answer to what the `open_calls` returned, in pieces. Raises InputError as `answer` does."""
        assert len(results) == len(self.open_calls) > 0
        return self._answer(Exchange("", results=tuple(results)), self.exchanges)

    def retry(self) -> Iterator[str]:
        """Yield another answer to the last message, which replaces the first. Raises InputError without a message."""
        if not self.exchanges:
            raise InputError.at("retry", "nothing has been said yet", "write a message first")
        if self.settings.temperature == 0:
            self._tell("at temperature 0 the likeliest answer is written again")
        last = self.exchanges[-1]
        return self._answer(Exchange(last.message, results=last.results), self.exchanges[:-1])

    def reset(self) -> None:
        """Start a new conversation. The system message and the settings stay; the seeds start again."""
        self.exchanges = []
        self._written = 0

    def set(self, name: str, value: str) -> None:
        """Change a setting to a value as people write it. Raises InputError for a wrong name or value."""
        self.settings = self.settings.changed(name, value)
        if name == "seed":
            self._written = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation, as {"role", "content"}, and `tool_calls` where functions are called."""
        return self._messages(self.exchanges, ToolStyle())

    def save(self, path: str) -> None:
        """Write the conversation as a line of JSON, which `format: chat` reads. Raises InputError, WorkError.

        It replaces a file only if this session wrote it.
        """
        if not self.exchanges:
            raise InputError.at("save", "nothing has been said yet", "write a message first")
        file = user_path(path, "save").absolute()
        if file not in self._saved:
            check_new_file(file)
        fields = {"messages": self.messages} | ({"tools": list(self._tools)} if self._tools else {})
        line = json.dumps(fields, ensure_ascii=False)
        write_output(file, line + "\n")
        self._saved.add(file)

    def load(self, path: str) -> None:
        """Go on with a conversation that `save` wrote, in place of this one. Raises InputError.

        Its system message, or none, becomes that of this one. `save` replaces the file then.
        """
        file = user_path(path, "load").absolute()
        fields = read_conversation(file, path)
        messages = fields["messages"]
        self.system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        self.exchanges = exchanges_of(messages, path)
        self._written = len(self.exchanges)
        if fields.keys() <= {"messages", "tools"}:
            self._saved.add(file)

    def close(self) -> None:
        """End the engine; a closed conversation can be saved, and begins again with the next message."""
        self._engine.close()

    def _answer(self, exchange: Exchange, before: list[Exchange]) -> Iterator[str]:
        ids = self._prompt(exchange, before)
        check_embedded(self._model, self._tokenizer, ids)
        new_tokens = self.settings.new_tokens
        if self._window is not None and len(ids) + new_tokens > self._window:
            new_tokens = self._window - len(ids)
            self._tell(f"the answer can have {new_tokens:,} tokens at most: the context has room for {self._window:,}")
        settings = self.settings
        sampling = Sampling(
            new_tokens,
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.seed + self._written,
            settings.repetition_penalty,
        )
        self._written += 1
        self.exchanges = [*before, exchange]
        return self._write(exchange, ids, sampling)

    def _write(self, exchange: Exchange, ids: list[int], sampling: Sampling) -> Iterator[str]:
        engine = self._engine.of(len(ids) + sampling.new_tokens)
        # Some models begin a call with a control token: [TOOL_CALLS], <|python_tag|>.
        beginning = GenerationPrompt(ids, self._stop, special_tokens=bool(self._tools))
        pieces = self._without_calls(exchange, write_text(engine, self._tokenizer, beginning, sampling))
        space = ""
        while True:
            try:
                piece = space + next(pieces)
            except StopIteration as end:
                exchange.finished = end.value == "stop"
                break
            except EngineError as error:
                raise WorkError.at(self._name, f"the model failed: {error}") from None
            # White space around an answer belongs to the template: after `Assistant:` the model writes the space that
            # the template writes before an answer in the history.
            text = piece.rstrip() if exchange.answer else piece.strip()
            space = piece[len(piece.rstrip()) :]
            if text:
                exchange.answer += text
                yield text
        if not exchange.finished:
            limit = "setting new_tokens"
            if self._window is not None and sampling.new_tokens < self.settings.new_tokens:
                limit = f"the model's {self._window:,} positions hold the prompt and the answer"
            self._tell(f"cut off after {sampling.new_tokens:,} tokens ({limit})")

    def _without_calls(
        self, exchange: Exchange, pieces: Generator[str, None, FinishReason]
    ) -> Generator[str, None, FinishReason]:
        """The text of an answer that is no call, in pieces. `exchange.calls` has the calls at the end."""
        if not self._tools:
            return (yield from pieces)
        reader = CallReader(self._tools)
        while True:
            try:
                text = reader.add(next(pieces))
            except StopIteration as end:
                yield reader.rest()
                exchange.calls = tuple(reader.calls)
                return end.value
            if text:
                yield text
            if reader.is_over:
                pieces.close()
                exchange.calls = tuple(reader.calls)
                return "stop"

    def _prompt(self, exchange: Exchange, before: list[Exchange]) -> list[int]:
        """The prompt's ids: as many of the last exchanges as leave room for an answer. Raises InputError."""
        history = from_a_message(before[-self.settings.history :] if self.settings.history else [])
        if exchange.results and not history:  # what is answered belongs to the message that asked for it
            history = from_a_message(before, last=True)
        ids = self._ids([*history, exchange])
        if self._window is None:
            return ids
        # Reserve room for an answer, but at most half of the window: a small model would have no history otherwise.
        room = max(self._window - self.settings.new_tokens, self._window // 2)
        available = len(history)
        while len(ids) > room and (shorter := from_a_message(history[1:])) != history:
            if exchange.results and not shorter:
                break
            history = shorter
            ids = self._ids([*history, exchange])
        if len(ids) >= self._window:
            what = f"with it the prompt is {len(ids):,} tokens, and the model takes {self._window:,}"
            raise InputError.at("message", what, "write less, or a shorter system message")
        if len(history) < available:
            dropped = available - len(history)
            full = f"the context of {self._window:,} tokens is full"
            self._tell(f"{full}; earlier exchanges left out: {dropped} of {available}, the oldest first")
        return ids

    def _ids(self, exchanges: list[Exchange]) -> list[int]:
        """The ids of these exchanges, the last of which has no answer yet."""
        try:
            messages = self._messages(exchanges, self._tool_style)[:-1]
            return prompt_ids(self._tokenizer, self._template, messages, list(self._tools) or None)
        except TemplateRefuses as refusal:
            fix = "many templates take no system message: try without" if self.system else "try another chat.template"
            raise InputError.at("chat.template", f"it refuses the conversation: {refusal}", fix) from None

    def _messages(self, exchanges: list[Exchange], style: ToolStyle) -> list[dict[str, Any]]:
        messages = [Message("system", self.system)] if self.system else []
        for exchange in exchanges:
            messages += [Message("tool", result) for result in exchange.results] or [Message("user", exchange.message)]
            messages.append(Message("assistant", exchange.answer, tool_calls=exchange.calls))
        return [style.fields(message) for message in style.linked(messages)]


class _ChatEngine:
    """The engine of a conversation: it keeps what was said in its cache, as long as there is room."""

    def __init__(self, opened: OpenedModel) -> None:
        self._opened = opened
        self._engine: Engine | None = None
        self._room = 0

    def of(self, tokens: int) -> Engine:
        """An engine with room for so many tokens of prompt and answer."""
        if self._engine is None or tokens > self._room:
            self.close()
            self._engine = self._made(tokens)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _made(self, tokens: int) -> Engine:
        opened = self._opened
        self._room = min(_CONTEXT, position_limit(opened.model) or _CONTEXT)
        if tokens <= self._room:
            with suppress(InputError):  # keys and values for so many tokens in a share of the free memory
                return make_engine(opened.model, opened.tokenizer, 1, self._room)
        self._room = tokens
        return SequentialEngine(opened.model, opened.tokenizer, "")
