"""Chat with a model: a conversation, written by a chat template, with answers that arrive piece by piece."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from artel.config.schema.quantities import read_count, read_number
from artel.errors import InputError, Problem
from artel.inference.open import OpenedModel
from artel.models.generate import Sampling, write_ids
from artel.models.loading.structure import position_limit
from artel.storage import check_new, user_path, write_file
from artel.tokens.tokenizer.chat_template import CHATML, TemplateRefuses, TurnEnd, prompt_ids, template_of, turn_end

Tell = Callable[[str], None]

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
        self._model, self._tokenizer = opened.model, opened.tokenizer
        self._window = position_limit(opened.model)
        self._tell = tell
        self._saved: set[Path] = set()
        self._written = 0  # number of answers so far: each has its own seed
        setting = opened.run.chat.template if opened.run is not None else "auto"
        self._template = template_of(self._tokenizer, setting)
        end = turn_end(self._tokenizer, self._template)
        self._stop = TurnEnd(end.ids | end_ids(opened.model), end.texts)
        if setting == "auto" and not self._tokenizer.hf.chat_template:
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

    def _answer(self, message: str, before: list[Exchange]) -> Iterator[str]:
        ids = self._prompt(message, before)
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
        pieces = write_ids(self._model, self._tokenizer, ids, sampling, self._window, self._stop)
        space = ""
        while True:
            try:
                piece = space + next(pieces)
            except StopIteration as end:
                exchange.finished = end.value
                break
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


def end_ids(model: PreTrainedModel) -> set[int]:
    """The end tokens in a model's generation_config.json. Llama 3 has several."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    numbers = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(number, int) for number in numbers):
        what = f"its generation_config.json ends a text at {str(ends)[:100]}, which is no token's id"
        raise InputError.at(model.name_or_path, what, "write eos_token_id as a number, or numbers in a list")
    return set(numbers)
