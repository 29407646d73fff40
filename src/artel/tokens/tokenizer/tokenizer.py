"""The tokenizer class: a tokenizer of transformers with artel's operations.

Text is encoded as plain text: a document that contains `<|endoftext|>` gets the tokens of those letters, never the
special token. So no text can end a document or assume a role.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from artel.errors import InputError
from artel.storage.panics import hide_panics
from artel.tokens.tokenizer.fast_encoder import Encoder, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NO_CHARACTER = "\ufdd0"  # a Unicode noncharacter, which does not occur in texts
_LETTERS = "AÉéЙйё"


@dataclass(frozen=True, slots=True)
class Encoding:
    """A text's ids, and the character span [start, end) of each token, int64 (tokens,) each."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def token_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and last token of the span [start, end), which neither starts nor ends with white space."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        return first, int(np.searchsorted(self.starts, end, side="left")) - 1


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens that a tokenizer adds around one or two texts, and the type id of the second text."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    second_type: int = 0

    @property
    def size(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


class Tokenizer:
    """A tokenizer of transformers, with the operations that artel needs."""

    def __init__(self, hf: PreTrainedTokenizerFast, where: str) -> None:
        self.hf = hf
        self._backend = hf.backend_tokenizer
        end = hf.eos_token_id if hf.eos_token_id is not None else hf.sep_token_id
        if end is None:
            raise InputError.at(where, "the tokenizer has no end token", "set eos_token in its tokenizer_config.json")
        self.end_id: int = int(end)
        self._where = where
        self._encoder: Encoder | None = None
        self._num_added = 0
        self._renamed_backend: tuple[frozenset[str], Any] | None = None
        self._unspaced_backend: tuple[int, Any] | None = None
        self._cached_size: tuple[tuple[int, int], int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the encoder, which each process creates for itself: fastokens cannot be pickled."""
        return self.__dict__ | {"_encoder": None}

    @property
    def vocabulary(self) -> int:
        """The number of embedding rows it needs: its largest id plus one. Cached: the search takes 35 ms."""
        sizes = (self._backend.get_vocab_size(with_added_tokens=False), len(self._backend.get_added_tokens_decoder()))
        if self._cached_size is None or self._cached_size[0] != sizes:
            self._cached_size = sizes, max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        return self._cached_size[1]

    @property
    def fingerprint(self) -> str:
        """A hash: tokenizers with equal fingerprints give equal ids for every text."""
        return xxhash.xxh3_128_hexdigest(self._full_backend.to_str().encode() + str(self.end_id).encode())

    def documents(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Yield transformers' `tokenizer(text)` of each text, int64 (tokens,), plus the end token if it adds none."""
        frame = self.frame(required=False)
        after = frame.after if frame.after[-1:] == (self.end_id,) else (*frame.after, self.end_id)
        before, end = np.array(frame.before, np.int64), np.array(after, np.int64)
        return (np.concatenate([before, ids, end]) for ids in self.encode(texts))

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a text that a model continues: those of a document, without the tokens at its end.

        Special tokens written in a prompt become these tokens, as in transformers; in documents they stay letters. An
        empty text starts a document: with the begin token, or after the end token of a previous document.
        """
        ids = self.encode_control([text]) if text else []
        return [*self.frame(required=False).before, *ids] or [self.end_id]

    def encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Yield the ids of each text, int64 (tokens,), without special tokens, from the fastest exact encoder."""
        added = len(self._backend.get_added_tokens_decoder())
        if self._encoder is None or added != self._num_added:  # tokens were added through `hf` after it was created
            self._encoder, self._num_added = Encoder(self.exact_ids, lambda: self._full_backend), added
        return iter(self._encoder.encode(texts))

    def exact_ids(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text from `tokenizers`, in its own threads."""
        with self._special_token_parsing(False):
            encodings = self._text_backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    @property
    def encoder(self) -> str:
        """The current encoder: fastokens, tokenizers by words, or tokenizers."""
        return "tokenizers" if self._encoder is None else self._encoder.name

    @property
    def encoder_note(self) -> str:
        """The reason for the encoder, as a note for the user; empty before it is chosen."""
        return "" if self._encoder is None else self._encoder.note

    @property
    def encoder_remedy(self) -> str:
        """Advice on avoiding an encoder that gave other ids than tokenizers; empty if none did."""
        return "" if self._encoder is None else self._encoder.remedy

    @property
    def suspect_texts(self) -> int:
        """The number of texts encoded before an encoder gave other ids than tokenizers; 0 if none did."""
        return 0 if self._encoder is None else self._encoder.num_suspect

    def encode_with_offsets(self, texts: list[str], *, control: bool = False) -> Iterator[Encoding]:
        """Yield ids and character offsets of each text. With `control`, special tokens in it become these tokens."""
        with self._special_token_parsing(control):
            encodings = (self._full_backend if control else self._text_backend).encode_batch(
                texts, add_special_tokens=False
            )
        return self._with_offsets(texts, encodings)

    def encode_continuations(self, texts: list[str]) -> Iterator[Encoding]:
        """Encode output of a chat template that follows other text, at a token boundary.

        No space is added before the text, unlike in Llama 2's tokenizer, which adds one before every text. Older
        tokenizers also add one after each special token, which stays.
        """
        added = [*self._backend.get_added_tokens_decoder()]
        if self._unspaced_backend is None or self._unspaced_backend[0] != len(added):
            self._unspaced_backend = len(added), _without_added_space(self._full_backend)
        spaced_encodings = self.encode_with_offsets(texts, control=True)
        if self._unspaced_backend[1] is self._backend:
            yield from spaced_encodings
            return
        with self._special_token_parsing(True):
            encodings = self._unspaced_backend[1].encode_batch(texts, add_special_tokens=False)
        for unspaced, spaced in zip(self._with_offsets(texts, encodings), spaced_encodings, strict=True):
            end, start = (
                int(np.append(np.isin(encoding.ids, added), True).argmax()) for encoding in (unspaced, spaced)
            )
            yield Encoding(
                np.append(unspaced.ids[:end], spaced.ids[start:]),
                np.append(unspaced.starts[:end], spaced.starts[start:]),
                np.append(unspaced.ends[:end], spaced.ends[start:]),
            )

    def _with_offsets(self, texts: list[str], encodings: list[Any]) -> Iterator[Encoding]:
        added = self._backend.get_added_tokens_decoder()
        stripping_ids = [token_id for token_id, token in added.items() if token.lstrip or token.rstrip]
        for text, encoding in zip(texts, encodings, strict=True):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            encoded = Encoding(np.array(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1])
            # Tokens with lstrip or rstrip include adjacent white space, which may belong to another turn: their offsets
            # are reduced to their own letters.
            for position in np.flatnonzero(np.isin(encoded.ids, stripping_ids)) if stripping_ids else ():
                token_text = text[encoded.starts[position] : encoded.ends[position]]
                encoded.starts[position] += len(token_text) - len(token_text.lstrip())
                encoded.ends[position] -= len(token_text) - len(token_text.rstrip())
            yield encoded

    def encode_control(self, texts: list[str]) -> list[int]:
        """Return the joined ids of all texts, as in `encode_with_offsets(texts, control=True)`.

        Offsets are a pair of Python objects per token: creating two million holds the GIL for seconds.
        """
        with self._special_token_parsing(True):
            encodings = self._full_backend.encode_batch_fast(texts, add_special_tokens=False)
        return [token for encoding in encodings for token in encoding.ids]

    @contextmanager
    def _special_token_parsing(self, enabled: bool) -> Iterator[None]:
        """Inside the block, special tokens written in a text become these tokens, or stay text.

        Raise InputError if the library panics, as it does after a second of backtracking in its pattern.
        """
        initial = self._backend.encode_special_tokens
        self._backend.encode_special_tokens = not enabled
        try:
            with hide_panics():
                yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            what = f"the tokenizer cannot split a text: {first_line(error)}"
            raise InputError.at(self._where, what, "check the patterns in tokenizer.json") from None
        finally:
            self._backend.encode_special_tokens = initial

    @property
    def _text_backend(self) -> Any:
        """The backend for texts, which never produces special tokens.

        A Unigram model also has them as pieces of its vocabulary, so it is copied with these pieces renamed.
        """
        backend = self._full_backend
        special = frozenset(self.control_tokens)
        if type(backend.model).__name__ != "Unigram":
            return backend
        if self._renamed_backend is None or self._renamed_backend[0] != special:
            self._renamed_backend = special, _without_special_tokens(backend, special)
        return self._renamed_backend[1]

    @property
    def _full_backend(self) -> Any:
        """The backend without truncation and padding, which its file or a call of `hf` may have enabled."""
        self._backend.no_truncation()
        self._backend.no_padding()
        return self._backend

    @property
    def mask_id(self) -> int:
        """The id of the mask token. Raise InputError if there is none."""
        if self.hf.mask_token_id is None:
            what = "the tokenizer has no mask token, which objective masked needs"
            fix = "use an encoder's tokenizer, or train one: tokenizer: {train: {vocab: 16384}}"
            raise InputError.at(self._where, what, fix)
        return int(self.hf.mask_token_id)

    @property
    def pad_id(self) -> int:
        """The id of the padding token, or else of the end token: padding is never attended to or trained on."""
        return self.end_id if self.hf.pad_token_id is None else int(self.hf.pad_token_id)

    @property
    def unknown_id(self) -> int | None:
        """The id of the unknown token; None if the vocabulary covers everything (bytes) or drops unknown text."""
        token_id = self.hf.unk_token_id
        if token_id is None or token_id == self.end_id or getattr(self._backend.model, "unk_token", "") is None:
            return None
        return int(token_id)

    @property
    def control_tokens(self) -> list[str]:
        """The texts of the special tokens: <|im_start|>, </s>."""
        return [token.content for token in self.hf.added_tokens_decoder.values() if token.special]

    @property
    def special_ids(self) -> list[int]:
        return sorted({*self.hf.all_special_ids, self.end_id})

    def frame(self, pair: bool = False, *, required: bool = True) -> Frame:
        """Return the special tokens around one text (`<s> … </s>`) or two.

        Raise InputError if the tokenizer adds none and they are `required`.
        """
        arguments = ("a", "a") if pair else ("a",)
        encoding = self._full_backend.encode(*arguments)
        pieces: list[list[int]] = [[] for _ in range(len(arguments) + 1)]
        position = 0
        for token, text, special in zip(encoding.ids, encoding.sequence_ids, encoding.special_tokens_mask, strict=True):
            if special:
                pieces[position].append(token)
            else:
                position = int(text or 0) + 1
        second = [kind for kind, text in zip(encoding.type_ids, encoding.sequence_ids, strict=True) if text == 1]
        if required and (not pieces[0] or not pieces[-1] or (pair and not pieces[1])):
            what = "the tokenizer puts no special tokens around a text, as encoders need them"
            fix = "use an encoder's tokenizer (BERT, RoBERTa …), or train one: tokenizer: {train: {}}"
            raise InputError.at(self._where, what, fix)
        between = tuple(pieces[1]) if pair else ()
        return Frame(tuple(pieces[0]), between, tuple(pieces[-1]), second[0] if second else 0)

    def add_frame(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a rendered conversation between the special tokens of an encoder, int64.

        A special token that the chat template has written is not repeated. Unchanged unless the tokenizer adds special
        tokens on both sides.
        """
        frame = self.frame(required=False)
        before, after = [*frame.before], [*frame.after]
        if not before or not after:
            return ids
        if ids[: len(before)].tolist() == before:
            before = []
        if ids[len(ids) - len(after) :].tolist() == after:
            after = []
        return np.concatenate([before, ids, after]).astype(np.int64)

    def word_starts(self) -> np.ndarray:
        """Return bool (vocabulary,): True for tokens that start a word. Punctuation marks are words.

        The spelling of a token tells: `##` continues a word (WordPiece), `Ġ` and `▁` start one. Tokens of pattern
        whitespace have no such marks: each counts as a word.
        """
        starts = np.ones(self.vocabulary, dtype=bool)
        tokens = self._backend.get_vocab(with_added_tokens=True)
        pieces = json.loads(self._backend.to_str())["model"]["type"] == "WordPiece"
        if not pieces and "Whitespace" in component_types(self._backend.pre_tokenizer):
            return starts
        for token, token_id in tokens.items():
            if pieces:
                starts[token_id] = not token.startswith("##")
            else:
                # A byte-level vocabulary writes letters beyond ASCII as letters of Latin-1, not as punctuation.
                first = token[:1]
                starts[token_id] = first in "ĠĊĉ▁" or (first < "\x80" and not first.isalnum())
        starts[self.special_ids] = True
        return starts

    def isolate_punctuation(self) -> None:
        """Make each punctuation mark a separate token from now on, also in saved files.

        Byte-level vocabularies have tokens like `).` and `",`: an answer that ends inside one would have no last token.
        """
        from tokenizers import pre_tokenizers

        self._encoder = None  # it depends on the pre-tokenizer
        pre_tokenizer = self._backend.pre_tokenizer
        punctuation = pre_tokenizers.Punctuation(behavior="isolated")
        if pre_tokenizer is None:
            self._backend.pre_tokenizer = punctuation
        elif not {"Punctuation", "BertPreTokenizer"} & component_types(pre_tokenizer):
            self._backend.pre_tokenizer = pre_tokenizers.Sequence([punctuation, pre_tokenizer])

    @property
    def loses_spacing(self) -> bool:
        """True if decoding changes white space, as with pattern whitespace and BERT's tokenizers."""
        spaces = " ", "  ", "\n\n", " "
        decoded = self.decode(self.exact_ids(["a".join(["", *spaces, ""])])[0])
        return [c for c in decoded if c.isspace()] != list("".join(spaces))

    @property
    def changed_letters(self) -> dict[str, str]:
        """Letters that decoding changes: to lower case, or without accents (й to и in BERT's tokenizers)."""
        changes = {}
        for letter, ids in zip(_LETTERS, self.exact_ids(list(_LETTERS)), strict=True):
            decoded = unicodedata.normalize("NFC", self.decode(ids).strip())
            if decoded != letter and len(ids) and self.unknown_id not in ids:
                changes[letter] = decoded
        return changes

    @property
    def plain_frame_tokens(self) -> list[str]:
        """Tokens added around each text that are not special tokens, formatted for messages."""
        frame = self.frame(required=False)
        special = {*self.special_ids, *map(self.hf.convert_tokens_to_ids, self.control_tokens)}
        plain_ids = [token for token in (*frame.before, *frame.after) if token not in special]
        return [f"{self.hf.convert_ids_to_tokens(token)!r} ({token})" for token in plain_ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, including special tokens, without clean-up of spaces."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(folder)` opens."""
        self.hf.save_pretrained(str(folder))


def component_types(step: Any) -> set[str]:
    """Return the types of the components of a pre-tokenizer or decoder; empty for None."""
    if step is None:
        return set()
    state = json.loads(step.__getstate__())
    return {part["type"] for part in state.get("pretokenizers", state.get("decoders", [state]))}


def mask_token(name: str) -> Any:
    """Return a mask token that includes the space before it, like RoBERTa's: it hides a word with its space."""
    from tokenizers import AddedToken

    return AddedToken(name, lstrip=True, special=True, normalized=False)


def _without_special_tokens(backend: Any, special: Collection[str]) -> Any:
    """Return a copy of a Unigram backend (T5, XLM-R) that never produces `special` tokens from text."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in special]
    for piece in state["model"]["vocab"]:
        piece[0] = f"{_NO_CHARACTER}{piece[0]}" if piece[0] in special else piece[0]
    return type(backend).from_str(json.dumps(state))


def _without_added_space(backend: Any) -> Any:
    """Return a copy of a backend that adds no space before a text, or `backend` itself if it adds none."""
    steps = [step for step in (backend.normalizer, backend.pre_tokenizer) if step is not None]
    if all(_state_without_added_space(state) == state for state in (json.loads(step.__getstate__()) for step in steps)):
        return backend
    state = json.loads(backend.to_str())
    state |= {name: _state_without_added_space(state[name]) for name in ("normalizer", "pre_tokenizer")}
    return type(backend).from_str(json.dumps(state))


def _state_without_added_space(step: Any) -> Any:
    """Return the state of a normalizer or pre-tokenizer, changed to add no space. None if it only adds one."""
    if not isinstance(step, dict) or step["type"] == "Prepend":
        return None
    for parts in ("normalizers", "pretokenizers"):
        if parts in step:
            remaining_steps = (state for part in step[parts] if (state := _state_without_added_space(part)) is not None)
            step = step | {parts: list(remaining_steps)}
    settings = {"prepend_scheme": "never", "add_prefix_space": False}
    return step | {key: value for key, value in settings.items() if key in step}
