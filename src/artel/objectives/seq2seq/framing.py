"""Pairs of texts as an encoder-decoder reads and writes them: ids with special tokens, each cut to its own length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.tokens import Frame, Tokenizer

MULTIPLE = 16
"""Of tokens, up to which unequal lengths are filled."""


class Framed(NamedTuple):
    """A text with its special tokens, int64 (tokens,), and whether its end was cut off."""

    ids: np.ndarray
    is_cut: bool


class PairFraming:
    """The special tokens are those that the tokenizer puts around inputs and outputs; an output ends with its end token
    in any case, since the model must learn to end.
    """

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        """Raises InputError for languages that the tokenizer does not know, and lengths with no room for text."""
        config = run.seq2seq
        self._tokenizer = tokenizer
        self._has_language = bool(config.source_language)
        set_languages(tokenizer, config.source_language, config.target_language)
        self._input, self._output = tokenizer.frame(needed=False), _output_frame(tokenizer)
        self._special, self._prefix = _split_prefix(tokenizer, config.prefix)
        self.longest_input, self.longest_output = run.data.block, config.target or run.data.block
        lengths = (
            ("data.block", self.longest_input, len(self._special) + self._input.size),
            ("seq2seq.target" if config.target else "data.block", self.longest_output, self._output.size),
        )
        problems = [
            Problem(key, f"{most} leaves no room between {size} special tokens", f"write {size + 8} or more")
            for key, most, size in lengths
            if most <= size
        ]
        if problems:
            raise InputError(problems)

    @property
    def language(self) -> int | None:
        """The token of the language with which an output begins; None where it begins with its text or with BART's <s>,
        or where that token is what the decoder starts with (the first mBART).
        """
        return self._output.before[0] if self._has_language and self._output.before else None

    def inputs(self, texts: Sequence[str]) -> list[Framed]:
        """The texts behind the prefix, as the encoder reads them."""
        room = self.longest_input - len(self._special) - self._input.size
        return [
            _framed((*self._input.before, *self._special), ids, self._input.after, room)
            for ids in self._tokenizer.encode([self._prefix + text for text in texts])
        ]

    def outputs(self, texts: Sequence[str]) -> list[Framed]:
        """The texts as the decoder is to write them."""
        room = self.longest_output - self._output.size
        return [
            _framed(self._output.before, ids, self._output.after, room) for ids in self._tokenizer.encode(list(texts))
        ]


def set_languages(tokenizer: Tokenizer, source: str, target: str) -> None:
    """Let a tokenizer of several languages (mBART, NLLB) mark inputs and outputs with theirs. Raises InputError."""
    hf, problems = tokenizer.hf, []
    for name, code in (("source_language", source), ("target_language", target)):
        if code and not hasattr(hf, "src_lang"):
            what, fix = f"the tokenizer marks no languages, and {code!r} is given", "leave it out"
            problems.append(Problem(f"seq2seq.{name}", what, fix))
        elif code and code not in hf.get_vocab():
            what = f"the tokenizer has no language {code!r}"
            problems.append(Problem(f"seq2seq.{name}", what, "write its own codes: ru_RU (mBART), rus_Cyrl (NLLB)"))
    if target and not source:
        problems.append(Problem("seq2seq.source_language", "is empty beside target_language", "write it, too"))
    if problems:
        raise InputError(problems)
    if source:
        hf.src_lang, hf.tgt_lang = source, target or source


def _output_frame(tokenizer: Tokenizer) -> Frame:
    """What the tokenizer puts around a text that is to be written, with the end token."""
    encoded = tokenizer.hf(text_target="a", return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    text = [place for place, mark in enumerate(special) if not mark]
    before, after = ids[: text[0]], ids[text[-1] + 1 :]
    if tokenizer.end_id not in after:
        after = [*after, tokenizer.end_id]
    return Frame(tuple(before), (), tuple(after))


def _split_prefix(tokenizer: Tokenizer, prefix: str) -> tuple[list[int], str]:
    """The ids up to its last special token, and the text behind, which is encoded together with each input."""
    ends = [prefix.rfind(token) + len(token) for token in tokenizer.control_tokens if token in prefix]
    if not ends:
        return [], prefix
    (special,) = tokenizer.encode_with_offsets([prefix[: max(ends)]], control=True)
    return special.ids.tolist(), prefix[max(ends) :]


def _framed(before: Sequence[int], ids: np.ndarray, after: Sequence[int], room: int) -> Framed:
    framed = np.concatenate([np.array(part, dtype=np.int64) for part in (before, ids[:room], after)])
    return Framed(framed, len(ids) > room)


def stacked(rows: Sequence[np.ndarray], filler: int) -> np.ndarray:
    """int64 (rows, longest): of rows of unequal length, with `filler` behind them."""
    longest = max(map(len, rows))
    if min(map(len, rows)) < longest:
        longest = -(-longest // MULTIPLE) * MULTIPLE
    stacked = np.full((len(rows), longest), filler, dtype=np.int64)
    for row, ids in zip(stacked, rows, strict=True):
        row[: len(ids)] = ids
    return stacked
