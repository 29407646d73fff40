"""Chat with a model: a conversation, written by a chat template, with answers that arrive piece by piece."""

from __future__ import annotations

import difflib
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from artel.config.schema.quantities import read_count, read_number
from artel.errors import InputError, Problem, WorkError
from artel.inference.engine.engine import Engine, EngineError, SequentialEngine, make_engine
from artel.inference.engine.one import write_text
from artel.inference.open import OpenedModel
from artel.models.generate import Sampling, check_embedded
from artel.models.loading.structure import position_limit
from artel.objectives.base import Beginning
from artel.storage import check_new, check_regular, user_path, write_file
from artel.tokens.tokenizer.chat_template import CHATML, TemplateRefuses, prompt_ids

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


@dataclass(slots=True)
class Exchange:
    """A message and its answer so far."""

    message: str
    answer: str = ""
    finished: bool = False
    """Whether the model ended the answer itself."""


class ChatSession:
    """A conversation with a model. Notes for the user go to `tell`."""

    def __init__(self, opened: OpenedModel, settings: ChatSettings, system: str, tell: Tell) -> None:
        """Raises InputError for a model that does not continue text, and for a wrong chat template."""
        if not opened.objective.generates:
            what = f"it is a model for {opened.objective.run.objective}, which answers in no words of its own"
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
        if opened.template_setting == "auto" and not self._tokenizer.hf.chat_template:
            name = "chatml" if self._template == CHATML else "plain"
            tell(f"{opened.name}: its tokenizer has no chat template; the conversation is written as {name}")

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer to a message in pieces. The pieces yielded so far are in the history.

        Raises InputError, without changing the conversation, when the model cannot take the message.
        """
        return self._answer(message, self.exchanges)

    def retry(self) -> Iterator[str]:
        """Yield another answer to the last message, which replaces the first. Raises InputError without a message."""
        if not self.exchanges:
            raise InputError.at("retry", "nothing has been said yet", "write a message first")
        if self.settings.temperature == 0:
            self._tell("at temperature 0 the likeliest answer is written again")
        return self._answer(self.exchanges[-1].message, self.exchanges[:-1])

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
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation, as {"role", "content"}."""
        return self._messages(self.exchanges)

    def save(self, path: str) -> None:
        """Write the conversation as a line of JSON, which `format: chat` reads. Raises InputError, WorkError.

        It replaces a file only if this session wrote it.
        """
        if not self.exchanges:
            raise InputError.at("save", "nothing has been said yet", "write a message first")
        file = user_path(path, "save").absolute()
        if file not in self._saved:
            check_new(file)
        line = json.dumps({"messages": self.messages}, ensure_ascii=False)
        write_file(file, line + "\n")
        self._saved.add(file)

    def load(self, path: str) -> None:
        """Go on with a conversation that `save` wrote, in place of this one. Raises InputError.

        Its system message, or none, becomes that of this one. `save` replaces the file then.
        """
        file = user_path(path, "load").absolute()
        fields = _read_conversation(file, path)
        messages = fields["messages"]
        self.system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        pairs = zip(messages[::2], messages[1::2], strict=True)
        self.exchanges = [Exchange(asked["content"], answered["content"], True) for asked, answered in pairs]
        self._written = len(self.exchanges)
        if fields.keys() == {"messages"}:
            self._saved.add(file)

    def close(self) -> None:
        """End the engine; a closed conversation can be saved, and begins again with the next message."""
        self._engine.close()

    def _answer(self, message: str, before: list[Exchange]) -> Iterator[str]:
        ids = self._prompt(message, before)
        check_embedded(self._model, self._tokenizer, ids)
        new_tokens = self.settings.new_tokens
        if self._window is not None and len(ids) + new_tokens > self._window:
            new_tokens = self._window - len(ids)
            self._tell(f"the model takes {self._window:,} tokens: room for {new_tokens:,} of an answer is left")
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
        exchange = Exchange(message)
        self.exchanges = [*before, exchange]
        return self._write(exchange, ids, sampling)

    def _write(self, exchange: Exchange, ids: list[int], sampling: Sampling) -> Iterator[str]:
        engine = self._engine.of(len(ids) + sampling.new_tokens)
        pieces = write_text(engine, self._tokenizer, Beginning(ids, self._stop), sampling)
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
            self._tell(f"cut off after {sampling.new_tokens:,} tokens (setting new_tokens)")

    def _prompt(self, message: str, before: list[Exchange]) -> list[int]:
        """The prompt's ids: as many of the last exchanges as leave room for an answer. Raises InputError."""
        history = before[-self.settings.history :] if self.settings.history else []
        ids = self._ids([*history, Exchange(message)])
        if self._window is None:
            return ids
        # Reserve room for an answer, but at most half of the window: a small model would have no history otherwise.
        room = max(self._window - self.settings.new_tokens, self._window // 2)
        available = len(history)
        while len(ids) > room and history:
            history = history[1:]
            ids = self._ids([*history, Exchange(message)])
        if len(ids) >= self._window:
            what = f"with it the prompt is {len(ids):,} tokens, and the model takes {self._window:,}"
            raise InputError.at("message", what, "write less, or a shorter system message")
        if len(history) < available:
            dropped = available - len(history)
            self._tell(
                f"the model takes {self._window:,} tokens: without the oldest {dropped} of {available} exchanges"
            )
        return ids

    def _ids(self, exchanges: list[Exchange]) -> list[int]:
        """The ids of these exchanges, the last of which has no answer yet."""
        try:
            return prompt_ids(self._tokenizer, self._template, self._messages(exchanges)[:-1])
        except TemplateRefuses as refusal:
            fix = "many templates take no system message: try without" if self.system else "try another chat.template"
            raise InputError.at("chat.template", f"it refuses the conversation: {refusal}", fix) from None

    def _messages(self, exchanges: list[Exchange]) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in exchanges:
            messages.append({"role": "user", "content": exchange.message})
            messages.append({"role": "assistant", "content": exchange.answer})
        return messages


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


def _read_conversation(file: Path, name: str) -> dict[str, Any]:
    """The fields of a file of one conversation: a system message or none, then messages and their answers."""
    fix = "give a file that /save wrote"
    check_regular(file)
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        fields = json.loads(lines[0]) if len(lines) == 1 else None
    except OSError as error:
        raise InputError.at("load", f"{name} cannot be read: {error.strerror}", fix) from None
    except (ValueError, RecursionError):
        raise InputError.at("load", f"{name} is no JSON", fix) from None
    if not isinstance(fields, dict):
        raise InputError.at("load", f"{name} has {len(lines):,} lines, not one conversation", fix)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise InputError.at("load", f"{name} has no messages with role and content", fix)
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        raise InputError.at("load", f"{name}: its messages are not those of user and assistant by turns", fix)
    return fields


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
