"""Encodes faster than `tokenizers`, while checking that the ids are the same.

fastokens is new, the word cache is part of artel, and a model would learn wrong ids silently. So every run compares
them with `tokenizers` on its own text: on the first texts before using them, and on one in five thousand afterwards.
The choice only affects speed.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import numpy as np

from artel.tokens.tokenizer.word_cache import WordCache

# Characters encoded by tokenizers, at 1 to 2 MB/s, before another encoder is tried. Loading fastokens takes 0.4 s and
# 50 MB with GPT-2's vocabulary: too much for a prompt or a small file.
_UNDECIDED_CHARACTERS = 250_000
# Characters of the user's text that are compared before another encoder is used: 0.1 s.
_COMPARED_CHARACTERS = 150_000
# The interval of texts compared afterwards. tokenizers is 20 times slower on prose and 100 times on code, so this adds
# 0.4 % to 2 % to fastokens. A prime, so that it does not coincide with a cycle in the texts.
_COMPARE_EVERY = 4999
# Characters compared of a single text.
_MAX_COMPARED_CHARACTERS = 1_000_000

FASTOKENS, BY_WORDS, TOKENIZERS = "fastokens", "tokenizers by words", "tokenizers"

Encode = Callable[[list[str]], list[np.ndarray]]


class Encoder:
    """Encodes with the fastest encoder that is installed, supports the tokenizer and gives the ids of `tokenizers`.

    The candidates are fastokens, `tokenizers` with a cache of words (word_cache.py), and `tokenizers` itself.

    `name`: the current one. `note`: the reason, as a sentence for the user. `num_suspect`: the number of texts encoded
    by a faster encoder before it gave wrong ids for a later text, 0 if it never did. `remedy`: how to avoid that
    encoder.
    """

    def __init__(
        self, exact: Encode, backend: Callable[[], Any], max_compared_characters: int = _MAX_COMPARED_CHARACTERS
    ) -> None:
        """`exact` encodes with tokenizers, special tokens as plain text. `backend` returns its tokenizer."""
        self.name = TOKENIZERS
        self.note = f"Tokenizing the first {_UNDECIDED_CHARACTERS:,} characters with tokenizers"
        self.num_suspect = 0
        self.remedy = ""
        self._exact = exact
        self._max_compared_characters = max_compared_characters
        self._backend = backend
        self._fast_encode: Encode | None = None
        self._has_decided = False
        self._num_characters = 0
        self._num_texts = 0

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, int64 (tokens,). A special token written in a text is plain text."""
        if not self._has_decided:
            self._num_characters += sum(map(len, texts))
            if self._num_characters >= _UNDECIDED_CHARACTERS:
                self._has_decided = True
                self._decide(texts)
        if self._fast_encode is None:
            return self._exact(texts)
        one_in_many = slice((-1 - self._num_texts) % _COMPARE_EVERY, None, _COMPARE_EVERY)
        try:
            encoded = self._fast_encode(texts)
            compared = self._cut_long(texts[one_in_many], encoded[one_in_many])
        except BaseException as error:
            if not _is_failure(error):
                raise
            self._fall_back(f"{self.name} failed ({first_line(error)})")
            return self._exact(texts)
        different_text = self._first_difference(*compared)
        if different_text is not None:
            self.num_suspect = self._num_texts
            self._fall_back(f"{self.name} gave other ids for {different_text}")
            return self._exact(texts)
        self._num_texts += len(texts)
        return encoded

    def _cut_long(self, texts: list[str], encoded: list[np.ndarray]) -> tuple[list[str], list[np.ndarray]]:
        """Return texts and ids with long texts cut: tokenizers needs 80 times their memory."""
        assert self._fast_encode is not None
        short = [text[: self._max_compared_characters] for text in texts]
        return short, [
            ids if len(text) == len(full) else self._fast_encode([text])[0]
            for text, full, ids in zip(short, texts, encoded, strict=True)
        ]

    def _decide(self, texts: list[str]) -> None:
        state = json.loads(self._backend().to_str())
        # Real texts contain few added tokens, and an error there would let a text end a document.
        added = [f"a{token['content']}b {token['content']} 1" for token in state["added_tokens"]]
        sample = [*_first_characters(texts), *added]
        reasons: list[str] = []
        for name, build in ((FASTOKENS, self._build_fastokens), (BY_WORDS, self._build_word_cache)):
            try:
                candidate = build(state)
                different_text = self._first_difference(sample, candidate(sample))
            except ImportError:
                missing = "is not installed (pip install 'artel-lm[fast]')"
                reasons.append(f"{name}, twenty times as fast as tokenizers, {missing}")
                continue
            except BaseException as error:
                if not _is_failure(error):
                    raise
                reasons.append(f"{name} does not support this tokenizer ({first_line(error)})")
                continue
            if different_text is None:
                self._fast_encode, self.name = candidate, name
                break
            reasons.append(f"{name} gives other ids for {different_text}")
        encoder_name = f"fastokens {version(FASTOKENS)}" if self.name == FASTOKENS else self.name
        checked = " (checked: same ids as tokenizers)" if self._fast_encode is not None else ""
        self.note = "; ".join([f"Tokenizing with {encoder_name}{checked}", *reasons])

    def _build_fastokens(self, state: dict[str, Any]) -> Encode:
        # Not needed for plain text, and fastokens rejects RoBERTa's post-processor.
        removed = dict.fromkeys(("post_processor", "decoder", "truncation", "padding"))
        state_json = json.dumps(state | removed, ensure_ascii=False)
        fast = importlib.import_module(FASTOKENS).Tokenizer.from_json_str(state_json)
        return lambda texts: _encode(fast, texts)

    def _build_word_cache(self, state: dict[str, Any]) -> Encode:
        words = WordCache(self._backend(), state)

        def encode(texts: list[str]) -> list[np.ndarray]:
            encoded = words.encode(texts)
            remaining = iter(self._exact([text for text, ids in zip(texts, encoded, strict=True) if ids is None]))
            return [next(remaining) if ids is None else ids for ids in encoded]

        return encode

    def _first_difference(self, texts: list[str], encoded: list[np.ndarray]) -> str | None:
        """Return the first text with other ids than from tokenizers, shortened; None if all are equal."""
        for text, ids, expected in zip(texts, encoded, self._exact(texts), strict=True):
            if not np.array_equal(ids, expected):
                return repr(text if len(text) <= 60 else text[:60] + "…")
        return None

    def _fall_back(self, reason: str) -> None:
        self.remedy = f"pip uninstall {FASTOKENS}" if self.name == FASTOKENS else "pip install 'artel-lm[fast]'"
        self._fast_encode = None
        self.name = TOKENIZERS
        after = (
            f"; the {self.num_suspect:,} texts that it encoded before may have wrong ids too"
            if self.num_suspect
            else ""
        )
        self.note = f"{reason}: tokenizing with tokenizers from there on{after}"


def encode_in_one_thread() -> None:
    """Make this process encode in one thread, if it is one of several workers.

    Call it before the process encodes anything: at the first text fastokens starts a thread per core and keeps them.
    They do not survive a fork; a forked child encodes in one thread.
    """
    os.environ["FASTOKENS_BPE_THREADS"] = "1"  # it ignores RAYON_NUM_THREADS
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode(fast: Any, texts: list[str]) -> list[np.ndarray]:
    # Two buffers, without a Python object per token.
    ids, ends = fast.encode_batch_flat(texts, split_special_tokens=True)
    joined = np.frombuffer(ids, "<u4").astype(np.int64)
    return [joined[start:end] for start, end in pairwise(np.frombuffer(ends, "<u8").tolist())]


def _first_characters(texts: list[str]) -> list[str]:
    """Return the first texts, `_COMPARED_CHARACTERS` characters in total; the last one is cut."""
    first: list[str] = []
    num_left = _COMPARED_CHARACTERS
    for text in texts:
        if num_left <= 0:
            break
        first.append(text[:num_left])
        num_left -= len(text)
    return first


def _is_failure(error: BaseException) -> bool:
    """True for an error of the package. A panic in Rust is a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
