"""Chat with a model: a conversation in the format of a chat template, with streamed answers."""

from __future__ import annotations

import difflib
import json
import re
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from artel.config.schema.quantities import read_count, read_number
from artel.errors import InputError, Problem, WorkError
from artel.generation import GenerationPrompt
from artel.generation.base import Engine, EngineError, FinishReason
from artel.generation.generate import Sampling, check_embedded
from artel.generation.make import SequentialEngine, make_engine
from artel.generation.write import write_text
from artel.inference.open import OpenedModel
from artel.messages import logger
from artel.models.loading.structure import position_limit
from artel.storage import check_new_file, check_regular, user_path, write_output
from artel.text import Message, ToolCall, Tools
from artel.text.records import BadRecord
from artel.text.tool_calls import CallReader, parse_call
from artel.tokens.tokenizer.chat_template import CHATML, TemplateRejection, prompt_ids
from artel.tokens.tokenizer.template_tools import ToolStyle, tool_style

_CONTEXT = 4096
"""Tokens of a conversation whose keys and values the engine caches."""

# The range of each setting. The bounds of the penalty keep logits within float32.
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
    """Settings of a conversation, which may change while it runs. Raise InputError for values out of range."""

    history: int = 10
    """Number of earlier exchanges in the prompt, not counting the system message."""
    new_tokens: int = 200
    repetition_penalty: float = 1.2
    temperature: float = 0.5
    top_p: float = 0.6
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        for name, (minimum, maximum) in _RANGES.items():
            value = getattr(self, name)
            if not minimum <= value <= maximum:
                printed = f"{value:g}" if abs(value) < 10**15 or value != value else "a number so large"
                problems.append(Problem(name, f"{printed} is out of range", f"use {minimum} to {maximum:,}"))
        if problems:
            raise InputError(problems)

    def with_value(self, name: str, value: str) -> ChatSettings:
        """Return a copy with a setting changed, e.g. to 0.7 or 1_000. Raise InputError for a wrong name or value."""
        types = {field.name: field.type for field in fields(self)}
        if name not in types:
            similar = difflib.get_close_matches(name.replace("-", "_"), types, 1)
            fix = f"did you mean {similar[0]}?" if similar else f"settings are: {', '.join(types)}"
            raise InputError.at(name, "unknown setting", fix)
        try:
            parsed: Any = read_count(value) if types[name] == "int" else read_number(value)
        except (ValueError, OverflowError) as error:
            raise InputError.at(name, str(error)) from None
        return replace(self, **{name: parsed})


class ChatSession:
    """A conversation with a model. Logs notes for the user."""

    def __init__(self, opened: OpenedModel, settings: ChatSettings, system: str, tools: Tools = ()) -> None:
        """`tools` are functions that the model may call.

        Raise InputError if the model does not generate text, or the chat template is wrong or does not support tools.
        """
        if not opened.objective.generates:
            message = f"it is a model for {opened.objective.config.objective}, which does not generate text"
            raise InputError.at(opened.name, message, "use a causal model; this one works with artel generate")
        self.settings = settings
        self.system = system
        self.exchanges: list[Exchange] = []
        self._name = opened.name
        self._model, self._tokenizer = opened.model, opened.tokenizer
        self._window = position_limit(opened.model)
        self._written_files: set[Path] = set()
        self._answer_count = 0  # each answer has its own seed
        self._engine = _ChatEngine(opened)
        weakref.finalize(self, self._engine.close)
        self._template = opened.chat_template()
        self._stop = opened.turn_end(self._template)
        self._tools = tools
        style = tool_style(opened.tokenizer, self._template) if tools else None
        if tools and (style is None or not style.writes_tools):
            message = "the chat template does not support functions"
            raise InputError.at("--tools", message, "use a model that was trained with tools, or chat.template: chatml")
        self._tool_style = style or ToolStyle()
        if opened.template_setting == "auto" and not self._tokenizer.hf.chat_template:
            name = "chatml" if self._template == CHATML else "plain"
            logger.info("%s: its tokenizer has no chat template; the conversation is written as %s", opened.name, name)

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer to a message in chunks, and add each chunk to the history.

        Raise InputError, without changing the conversation, if the model cannot process the message.
        """
        if self.open_calls:
            names = ", ".join(call.name for call in self.open_calls)
            raise InputError.at("message", f"the model waits for the results of its calls: {names}", "give the results")
        return self._answer_exchange(Exchange(message), self.exchanges)

    @property
    def open_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the last answer that have no results yet."""
        return self.exchanges[-1].calls if self.exchanges else ()

    def drop_calls(self) -> None:
        """Remove the open calls from the last answer."""
        if self.exchanges:
            self.exchanges[-1].calls = ()

    def answer_results(self, results: Sequence[str]) -> Iterator[str]:
        """Yield the answer to the results of the `open_calls`, in chunks. Raise InputError as `answer` does."""
        assert len(results) == len(self.open_calls) > 0
        return self._answer_exchange(Exchange("", results=tuple(results)), self.exchanges)

    def retry(self) -> Iterator[str]:
        """Yield a new answer to the last message, which replaces the old one. Raise InputError without a message."""
        if not self.exchanges:
            raise InputError.at("retry", "nothing has been said yet", "write a message first")
        if self.settings.temperature == 0:
            logger.info("at temperature 0 the same answer is generated again")
        last = self.exchanges[-1]
        return self._answer_exchange(Exchange(last.message, results=last.results), self.exchanges[:-1])

    def reset(self) -> None:
        """Start a new conversation. The system message and the settings stay; the seeds start again."""
        self.exchanges = []
        self._answer_count = 0

    def set(self, name: str, value: str) -> None:
        """Change a setting to a value like 0.7 or 1_000. Raise InputError for a wrong name or value."""
        self.settings = self.settings.with_value(name, value)
        if name == "seed":
            self._answer_count = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The full conversation as dicts with role, content and, if there are any, tool_calls."""
        return self._make_messages(self.exchanges, ToolStyle())

    def save(self, path: str) -> None:
        """Write the conversation as a line of JSON, which `format: chat` reads. Replace only this session's files.

        Raise InputError if the conversation is empty or the file exists, WorkError if the disk fails.
        """
        if not self.exchanges:
            raise InputError.at("save", "nothing has been said yet", "write a message first")
        file = user_path(path, "save").absolute()
        if file not in self._written_files:
            check_new_file(file)
        fields = {"messages": self.messages} | ({"tools": list(self._tools)} if self._tools else {})
        line = json.dumps(fields, ensure_ascii=False)
        write_output(file, line + "\n")
        self._written_files.add(file)

    def load(self, path: str) -> None:
        """Replace this conversation and its system message by one that `save` wrote. Raise InputError if unreadable.

        `save` may then replace the file.
        """
        file = user_path(path, "load").absolute()
        fields = read_conversation(file, path)
        messages = fields["messages"]
        self.system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        self.exchanges = parse_exchanges(messages, path)
        self._answer_count = len(self.exchanges)
        if fields.keys() <= {"messages", "tools"}:
            self._written_files.add(file)

    def close(self) -> None:
        """Stop the engine. A closed conversation can be saved, and the next message starts the engine again."""
        self._engine.close()

    def _answer_exchange(self, exchange: Exchange, earlier: list[Exchange]) -> Iterator[str]:
        ids = self._make_prompt(exchange, earlier)
        check_embedded(self._model, self._tokenizer, ids)
        new_tokens = self.settings.new_tokens
        if self._window is not None and len(ids) + new_tokens > self._window:
            new_tokens = self._window - len(ids)
            logger.info(
                "the answer is limited to %s tokens: the context has %s", f"{new_tokens:,}", f"{self._window:,}"
            )
        settings = self.settings
        sampling = Sampling(
            new_tokens,
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.seed + self._answer_count,
            settings.repetition_penalty,
        )
        self._answer_count += 1
        self.exchanges = [*earlier, exchange]
        return self._generate_answer(exchange, ids, sampling)

    def _generate_answer(self, exchange: Exchange, ids: list[int], sampling: Sampling) -> Iterator[str]:
        engine = self._engine.get_engine(len(ids) + sampling.new_tokens)
        # Some models begin a call with a control token: [TOOL_CALLS], <|python_tag|>.
        generation_prompt = GenerationPrompt(ids, self._stop, special_tokens=bool(self._tools))
        chunks = self._extract_calls(exchange, write_text(engine, self._tokenizer, generation_prompt, sampling))
        trailing_space = ""
        while True:
            try:
                chunk = trailing_space + next(chunks)
            except StopIteration as end:
                exchange.finished = end.value == "stop"
                break
            except EngineError as error:
                raise WorkError.at(self._name, f"the model failed: {error}") from None
            # Whitespace around an answer belongs to the template. After `Assistant:` the model generates the space that
            # the template writes before an answer in the history.
            text = chunk.rstrip() if exchange.answer else chunk.strip()
            trailing_space = chunk[len(chunk.rstrip()) :]
            if text:
                exchange.answer += text
                yield text
        if not exchange.finished:
            limit = "setting new_tokens"
            if self._window is not None and sampling.new_tokens < self.settings.new_tokens:
                limit = f"prompt and answer fill the model's {self._window:,} positions"
            logger.info("cut off after %s tokens (%s)", f"{sampling.new_tokens:,}", limit)

    def _extract_calls(
        self, exchange: Exchange, chunks: Generator[str, None, FinishReason]
    ) -> Generator[str, None, FinishReason]:
        """Yield the text of an answer without its calls, in chunks, and store the calls in `exchange.calls`."""
        if not self._tools:
            return (yield from chunks)
        reader = CallReader(self._tools)
        while True:
            try:
                text = reader.feed(next(chunks))
            except StopIteration as end:
                yield reader.flush()
                exchange.calls = tuple(reader.calls)
                return end.value
            if text:
                yield text
            if reader.is_over:
                chunks.close()
                exchange.calls = tuple(reader.calls)
                return "stop"

    def _make_prompt(self, exchange: Exchange, earlier: list[Exchange]) -> list[int]:
        """Return the ids of a prompt, without the oldest exchanges if they leave no room for an answer.

        Raise InputError if the prompt is too long even without them.
        """
        history = start_at_message(earlier[-self.settings.history :] if self.settings.history else [])
        if exchange.results and not history:  # results belong to the message that led to the calls
            history = start_at_message(earlier, last=True)
        ids = self._encode_prompt([*history, exchange])
        if self._window is None:
            return ids
        # Reserve room for an answer, but at most half of the window: otherwise a small model would have no history.
        max_prompt = max(self._window - self.settings.new_tokens, self._window // 2)
        available = len(history)
        while len(ids) > max_prompt and (shorter := start_at_message(history[1:])) != history:
            if exchange.results and not shorter:
                break
            history = shorter
            ids = self._encode_prompt([*history, exchange])
        if len(ids) >= self._window:
            message = f"with it the prompt is {len(ids):,} tokens, but the model accepts {self._window:,}"
            raise InputError.at("message", message, "shorten it, or the system message")
        if len(history) < available:
            dropped = available - len(history)
            reason = f"the context of {self._window:,} tokens is full"
            logger.info("%s; earlier exchanges dropped: %s of %s, the oldest first", reason, dropped, available)
        return ids

    def _encode_prompt(self, exchanges: list[Exchange]) -> list[int]:
        """Return the ids of a prompt. The last exchange has no answer yet."""
        try:
            messages = self._make_messages(exchanges, self._tool_style)[:-1]
            return prompt_ids(self._tokenizer, self._template, messages, list(self._tools) or None)
        except TemplateRejection as refusal:
            fix = (
                "many templates do not support a system message: try without it"
                if self.system
                else "try another chat.template"
            )
            raise InputError.at("chat.template", f"it raises an error: {refusal}", fix) from None

    def _make_messages(self, exchanges: list[Exchange], style: ToolStyle) -> list[dict[str, Any]]:
        messages = [Message("system", self.system)] if self.system else []
        for exchange in exchanges:
            messages += [Message("tool", result) for result in exchange.results] or [Message("user", exchange.message)]
            messages.append(Message("assistant", exchange.answer, tool_calls=exchange.calls))
        return [style.fields(message) for message in style.link_calls(messages)]


class _ChatEngine:
    """The engine of a conversation. Its cache keeps the conversation's tokens while they fit."""

    def __init__(self, opened: OpenedModel) -> None:
        self._opened = opened
        self._engine: Engine | None = None
        self._context = 0

    def get_engine(self, token_count: int) -> Engine:
        """Return an engine whose context holds `token_count` tokens of prompt and answer."""
        if self._engine is None or token_count > self._context:
            self.close()
            self._engine = self._make_engine(token_count)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _make_engine(self, token_count: int) -> Engine:
        opened = self._opened
        self._context = min(_CONTEXT, position_limit(opened.model) or _CONTEXT)
        if token_count <= self._context:
            with suppress(InputError):  # too little memory for the keys and values
                return make_engine(opened.model, opened.tokenizer, 1, self._context)
        self._context = token_count
        return SequentialEngine(opened.model, opened.tokenizer, "")


# Exchanges


@dataclass(slots=True)
class Exchange:
    """A message, or results of calls, and its answer so far."""

    message: str
    answer: str = ""
    finished: bool = False
    """True if the model ended the answer, False if it was cut off."""
    calls: tuple[ToolCall, ...] = ()
    """Calls at the end of the answer."""
    results: tuple[str, ...] = ()
    """Results of the previous answer's calls, in their order, if the exchange has no message."""


def start_at_message(exchanges: list[Exchange], last: bool = False) -> list[Exchange]:
    """Return the exchanges from the first (or `last`) that begins with a message, not with results."""
    starts = [index for index, exchange in enumerate(exchanges) if not exchange.results]
    return exchanges[starts[-1 if last else 0] :] if starts else []


def read_conversation(file: Path, name: str) -> dict[str, Any]:
    """Read a file with one conversation: an optional system message, then messages and their answers."""
    fix = "use a file that /save wrote"
    check_regular(file)
    try:
        content = file.read_text(encoding="utf-8-sig").rstrip("\n")
        lines = content.split("\n") if content else []  # str.splitlines would also split at U+2028
        fields = json.loads(lines[0]) if len(lines) == 1 else None
    except OSError as error:
        raise InputError.at("load", f"{name} cannot be read: {error.strerror}", fix) from None
    except (ValueError, RecursionError):
        raise InputError.at("load", f"{name} is not JSON", fix) from None
    if not isinstance(fields, dict):
        raise InputError.at("load", f"{name} has {len(lines):,} lines, not one conversation", fix)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise InputError.at("load", f"{name} has no messages with role and content", fix)
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if re.fullmatch("(user assistant (tool (tool )*assistant )*)+", "".join(f"{role} " for role in turns)) is None:
        raise InputError.at("load", f"{name}: its messages do not alternate between user and assistant", fix)
    return fields


def parse_exchanges(messages: list[dict[str, Any]], name: str) -> list[Exchange]:
    """Turn messages that `read_conversation` has checked into exchanges. Raise InputError for a wrong call."""
    exchanges: list[Exchange] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "user":
            exchanges.append(Exchange(message["content"]))
        elif message["role"] == "tool":
            results.append(message["content"])
        else:
            if results:
                exchanges.append(Exchange("", results=tuple(results)))
                results = []
            try:
                entries = message.get("tool_calls") or []
                calls = tuple(map(parse_call, entries if isinstance(entries, list) else [entries]))
            except BadRecord as error:
                raise InputError.at("load", f"{name}: a call {error.detail}", "use a file that /save wrote") from None
            exchanges[-1].answer, exchanges[-1].finished, exchanges[-1].calls = message["content"], True, calls
    return exchanges


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
