"""Text out of tokens as they are written, piece by piece: whole characters, and nothing of a stop text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenizers.decoders import DecodeStream

from artel.tokens import Tokenizer

_BEFORE = 8
"""Tokens of the prompt that the first piece is decoded after: a space at the beginning of a text would be lost."""

_PART = "\ufffd"
"""What a part of a character is decoded to."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token adds to the text."""

    text: str
    stopped: bool = False
    """Whether a stop text ends the answer here."""


class TextStream:
    """Takes the tokens of an answer one by one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        stop: tuple[str, ...],
        *,
        stop_until: str = "",
        special_tokens: bool = False,
    ) -> None:
        """`stop_until`: from this text on nothing of `stop` ends the answer. `special_tokens`: whether they are
        written.
        """
        self._tokenizer: Any = tokenizer.hf.backend_tokenizer
        self._skips = not special_tokens
        self._decode = partial(tokenizer.hf.decode, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
        before = prompt[-_BEFORE:]
        if self._decode(before).endswith(_PART):  # after which DecodeStream would give out all of it
            before = []
        self._stream = DecodeStream(ids=before, skip_special_tokens=self._skips)
        self._stop = (*stop, stop_until) if stop and stop_until else stop
        self._stop_until = stop_until
        self._held = ""
        self._pending: list[int] = []  # tokens whose characters are not whole yet

    def add(self, token: int) -> Piece:
        """The text that is certain with this token."""
        self._pending.append(token)
        if text := self._step(token):
            self._held += text
            self._pending = []
        end, stopped = up_to_stop(self._held, self._stop)
        if stopped and self._stop_until and self._held.startswith(self._stop_until, end):
            self._stop, end, stopped = (), len(self._held), False
        text, self._held = self._held[:end], self._held[end:]
        return Piece(text, stopped)

    def _step(self, token: int) -> str | None:
        try:
            text: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # of tokenizers ("Invalid prefix"), where bytes that are no text follow a byte that is
            text = self._decode(self._pending)
            self._stream = DecodeStream(ids=list(self._pending), skip_special_tokens=self._skips)
        return text

    def rest(self) -> str:
        """What was held back, when nothing more comes; U+FFFD stands for a part of a character."""
        return self._held + self._decode(self._pending)


def up_to_stop(text: str, stops: tuple[str, ...]) -> tuple[int, bool]:
    """How many characters of `text` may be shown, and whether one of `stops` ends it there."""
    positions = [at for stop in stops if (at := text.find(stop)) >= 0]
    if positions:
        return min(positions), True
    held_back = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return len(text) - max(held_back, default=0), False
