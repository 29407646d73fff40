"""Text of an answer out of its tokens, piece by piece: whole characters, and nothing of a stop text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from artel.models.generate import up_to_stop
from artel.tokens import Tokenizer

_BEFORE = 8
"""Tokens of the prompt that the first piece is decoded after: a space at the beginning of a text would be lost."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token adds to the text."""

    text: str
    stopped: bool = False
    """Whether a stop text ends the answer here."""


class TextStream:
    """Takes the tokens of an answer one by one."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], stop: tuple[str, ...], *, special_tokens: bool = False
    ) -> None:
        """`special_tokens`: whether they are written."""
        self._tokenizer: Any = tokenizer.hf.backend_tokenizer
        self._stream = DecodeStream(ids=prompt[-_BEFORE:], skip_special_tokens=not special_tokens)
        self._stop = stop
        self._held = ""

    def add(self, token: int) -> Piece:
        """The text that is certain with this token."""
        self._held += self._stream.step(self._tokenizer, token) or ""
        end, stopped = up_to_stop(self._held, self._stop)
        text, self._held = self._held[:end], self._held[end:]
        return Piece(text, stopped)

    def rest(self) -> str:
        """What was held back, when nothing more comes."""
        return self._held
