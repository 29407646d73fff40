"""Decode tokens to text as they are generated: complete characters only, and never a part of a stop text."""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenizers.decoders import DecodeStream

from artel.tokens import Tokenizer

_PROMPT_TOKENS = 8
"""Prompt tokens passed to the decoder first, because it drops a space at the beginning of a text."""
_REPLACEMENT = "\ufffd"
"""The decoding of an incomplete character."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The text that a token adds."""

    text: str
    stopped: bool = False
    """True if a stop text ends the answer here."""


class TextStream:
    """Decodes the tokens of an answer one by one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        stop_texts: tuple[str, ...],
        *,
        stop_until: str = "",
        special_tokens: bool = False,
    ) -> None:
        """`stop_until`: a text after which `stop_texts` no longer apply. `special_tokens`: True to include them."""
        self._tokenizer: Any = tokenizer.hf.backend_tokenizer
        self._skip_special = not special_tokens
        self._decode = partial(
            tokenizer.hf.decode, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        context_ids = prompt[-_PROMPT_TOKENS:]
        if self._decode(context_ids).endswith(_REPLACEMENT):  # DecodeStream would return the whole context again
            context_ids = []
        self._stream = DecodeStream(ids=context_ids, skip_special_tokens=self._skip_special)
        self._stop = (*stop_texts, stop_until) if stop_texts and stop_until else stop_texts
        self._stop_until = stop_until
        self._held_back = ""
        self._pending: list[int] = []  # tokens whose characters are incomplete
        self._bytes = _fallback_bytes(self._tokenizer)
        self._run: list[int] = []  # consecutive byte tokens
        self._run_text: str | None = ""  # the last characters of the run; None if its bytes are not UTF-8
        self._utf_8 = getincrementaldecoder("utf-8")()

    def add(self, token: int) -> TextChunk:
        """Return the text that is final after this token.

        A run of byte tokens is decoded when it ends: if it is not UTF-8, all of it becomes U+FFFD. A stop text in the
        run is found immediately.
        """
        self._pending.append(token)
        self._run.append(token)
        if token not in self._bytes or self._ends_within_run(token):
            if text := self._step(self._run):
                self._held_back += text
                self._pending = []
            self._run, self._run_text = [], ""
            self._utf_8.reset()
        end, stopped = find_stop(self._held_back, self._stop)
        if stopped and self._stop_until and self._held_back.startswith(self._stop_until, end):
            self._stop, end, stopped = (), len(self._held_back), False
        text, self._held_back = self._held_back[:end], self._held_back[end:]
        return TextChunk(text, stopped)

    def _ends_within_run(self, token: int) -> bool:
        """True if a stop text ends with the character that this byte completes."""
        if not self._stop or self._run_text is None:
            return False
        try:
            text = self._utf_8.decode(bytes([self._bytes[token]]))
        except UnicodeDecodeError:
            self._run_text = None
            return False
        self._run_text = (self._run_text + text)[-max(map(len, self._stop)) :]
        return bool(text) and (self._held_back + self._run_text).endswith(self._stop)

    def _step(self, tokens: list[int]) -> str | None:
        try:
            text: str | None = self._stream.step(self._tokenizer, tokens)
        except Exception:  # "Invalid prefix" of tokenizers: invalid bytes follow a valid one
            text = self._decode(self._pending)
            self._stream = DecodeStream(ids=list(self._pending), skip_special_tokens=self._skip_special)
        return text

    def flush(self) -> str:
        """Return the text held back so far, at the end of an answer. An incomplete character becomes U+FFFD."""
        return self._held_back + self._decode(self._pending)


def _fallback_bytes(backend: Any) -> dict[int, int]:
    """Return the byte tokens that SentencePiece uses for text outside its vocabulary, with their bytes."""
    if backend.decoder is None or b"ByteFallback" not in backend.decoder.__getstate__():
        return {}
    tokens = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token: byte for token, byte in tokens.items() if token is not None}


def find_stop(text: str, stops: tuple[str, ...]) -> tuple[int, bool]:
    """Return (number of characters of `text` that are final, True if one of `stops` follows them)."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    if positions:
        return min(positions), True
    partial_stops = [
        length for stop in stops for length in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:length])
    ]
    return len(text) - max(partial_stops, default=0), False
