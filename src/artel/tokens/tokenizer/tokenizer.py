"""Tokenizers: what artel needs from one, and loading one from a folder or a hub id.

Text is encoded as plain text: a document that contains `<|endoftext|>` gets the tokens of those letters, never the
special token. So no text can end a document or take a role.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from artel.errors import InputError
from artel.storage import check_regular_in
from artel.storage.panics import hide_panics
from artel.tokens.tokenizer.backend_copies import is_unigram, without_added_space, without_special_tokens
from artel.tokens.tokenizer.fast_encoder import Encoder
from artel.tokens.tokenizer.missing_roles import is_of_gpt2, roles_by_config
from artel.tokens.tokenizer.remote_code import check_whose, remedy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text's ids, and the characters [start, end) of each token, int64 (tokens,) each."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def tokens_of(self, start: int, end: int) -> tuple[int, int]:
        """The first and last token of the characters [start, end), which neither begin nor end with white space."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        return first, int(np.searchsorted(self.starts, end, side="left")) - 1


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens that a tokenizer puts around one or two texts, and the type id of the second."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    second_type: int = 0

    @property
    def size(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


class Tokenizer:
    """A tokenizer of transformers, with what artel needs from it."""

    def __init__(self, hf: PreTrainedTokenizerFast, where: str) -> None:
        self.hf = hf
        self._backend = hf.backend_tokenizer
        end = hf.eos_token_id if hf.eos_token_id is not None else hf.sep_token_id
        if end is None:
            raise InputError.at(where, "the tokenizer has no end token", "set eos_token in its tokenizer_config.json")
        self.end_id: int = int(end)
        self._where = where
        self._encoder: Encoder | None = None
        self._added = 0
        self._renamed: tuple[frozenset[str], Any] | None = None
        self._unspaced: tuple[int, Any] | None = None
        self._counted: tuple[tuple[int, int], int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the encoder, which each process makes for itself: fastokens cannot be pickled."""
        return self.__dict__ | {"_encoder": None}

    @property
    def vocabulary(self) -> int:
        """The number of embedding rows it needs: its largest id plus one.

        All tokens are looked through once, and again when some were added: with 49,152 of them that takes 35 ms.
        """
        sizes = (self._backend.get_vocab_size(with_added_tokens=False), len(self._backend.get_added_tokens_decoder()))
        if self._counted is None or self._counted[0] != sizes:
            self._counted = sizes, max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        return self._counted[1]

    @property
    def fingerprint(self) -> str:
        """A hash: equal fingerprints mean equal ids for every text."""
        return xxhash.xxh3_128_hexdigest(self._whole.to_str().encode() + str(self.end_id).encode())

    def documents(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Ids of each text as a model of next tokens learns it, int64 (tokens,).

        They are those of transformers' `tokenizer(text)`, its begin token included, and the end token if it adds none.
        """
        frame = self.frame(needed=False)
        after = frame.after if frame.after[-1:] == (self.end_id,) else (*frame.after, self.end_id)
        before, end = np.array(frame.before, np.int64), np.array(after, np.int64)
        return (np.concatenate([before, ids, end]) for ids in self.encode(texts))

    def prompt(self, text: str) -> list[int]:
        """Ids of a text that a model continues: those of the same document, without what closes it.

        Special tokens that a prompt spells become those tokens, as in transformers; in documents they stay letters. An
        empty text begins a document: with the begin token, or behind the end token of the one before.
        """
        ids = self.encode_control([text]) if text else []
        return [*self.frame(needed=False).before, *ids] or [self.end_id]

    def encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Ids of each text, int64 (tokens,), without special tokens, from the fastest encoder with the same ids."""
        added = len(self._backend.get_added_tokens_decoder())
        if self._encoder is None or added != self._added:  # the encoder lacks tokens added through `hf` meanwhile
            self._encoder, self._added = Encoder(self._exact, lambda: self._whole), added
        return iter(self._encoder.encode(texts))

    def _exact(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text from tokenizers, in its own threads."""
        with self._special_tokens_parsed(False):
            encodings = self._for_texts.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    @property
    def encoder(self) -> str:
        """The current encoder: fastokens, tokenizers by words, or tokenizers."""
        return "tokenizers" if self._encoder is None else self._encoder.name

    @property
    def encoder_note(self) -> str:
        """Why that encoder is used, as a sentence for the user; empty before the choice."""
        return "" if self._encoder is None else self._encoder.note

    @property
    def encoder_remedy(self) -> str:
        """How to do without an encoder that gave other ids than tokenizers; empty if none did."""
        return "" if self._encoder is None else self._encoder.remedy

    @property
    def doubtful_texts(self) -> int:
        """The number of texts encoded before an encoder gave other ids than tokenizers; 0 if none did."""
        return 0 if self._encoder is None else self._encoder.doubtful

    def encode_with_offsets(self, texts: list[str], *, control: bool = False) -> Iterator[Encoded]:
        """Ids of each text with character offsets, without special tokens around it. Slower than `encode`.

        With `control`, special tokens written in a text become those tokens: for the output of a chat template.
        """
        with self._special_tokens_parsed(control):
            encodings = (self._whole if control else self._for_texts).encode_batch(texts, add_special_tokens=False)
        return self._with_offsets(texts, encodings)

    def encode_continuations(self, texts: list[str]) -> Iterator[Encoded]:
        """Encode output of a chat template that follows other text, whose tokens end where it begins.

        No space is added before such a text, as Llama 2's tokenizer adds one before every text. Older tokenizers add
        one after each special token, too, which stays.
        """
        added = [*self._backend.get_added_tokens_decoder()]
        if self._unspaced is None or self._unspaced[0] != len(added):
            self._unspaced = len(added), without_added_space(self._whole)
        spaced = self.encode_with_offsets(texts, control=True)
        if self._unspaced[1] is self._backend:
            yield from spaced
            return
        with self._special_tokens_parsed(True):
            encodings = self._unspaced[1].encode_batch(texts, add_special_tokens=False)
        for first, rest in zip(self._with_offsets(texts, encodings), spaced, strict=True):
            end, begin = (int(np.append(np.isin(one.ids, added), True).argmax()) for one in (first, rest))
            yield Encoded(
                np.append(first.ids[:end], rest.ids[begin:]),
                np.append(first.starts[:end], rest.starts[begin:]),
                np.append(first.ends[:end], rest.ends[begin:]),
            )

    def _with_offsets(self, texts: list[str], encodings: list[Any]) -> Iterator[Encoded]:
        added = self._backend.get_added_tokens_decoder()
        stripping = [number for number, token in added.items() if token.lstrip or token.rstrip]
        for text, encoding in zip(texts, encodings, strict=True):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            encoded = Encoded(np.array(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1])
            # Tokens with lstrip or rstrip also cover the white space beside them, which may lie on the other side of
            # the border of a turn: their offsets are reduced to their own letters.
            for at in np.flatnonzero(np.isin(encoded.ids, stripping)) if stripping else ():
                covered = text[encoded.starts[at] : encoded.ends[at]]
                encoded.starts[at] += len(covered) - len(covered.lstrip())
                encoded.ends[at] -= len(covered) - len(covered.rstrip())
            yield encoded

    def encode_control(self, texts: list[str]) -> list[int]:
        """Return the ids of texts in a row, as `encode_with_offsets(texts, control=True)` has them.

        Offsets are a pair of Python objects per token: making two million holds the GIL for seconds.
        """
        with self._special_tokens_parsed(True):
            encodings = self._whole.encode_batch_fast(texts, add_special_tokens=False)
        return [token for encoding in encodings for token in encoding.ids]

    @contextmanager
    def _special_tokens_parsed(self, parsed: bool) -> Iterator[None]:
        """Within the block, special tokens written in a text become those tokens, or not.

        Raises InputError where the library panics after a second of backtracking in its pattern.
        """
        before = self._backend.encode_special_tokens
        self._backend.encode_special_tokens = not parsed
        try:
            with hide_panics():
                yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            what, fix = (
                f"the tokenizer cannot split a text: {_first_line(error)}",
                "check the patterns in tokenizer.json",
            )
            raise InputError.at(self._where, what, fix) from None
        finally:
            self._backend.encode_special_tokens = before

    @property
    def _for_texts(self) -> Any:
        """The backend for texts, in which nothing is a special token.

        A Unigram model has these as pieces too, and takes them by itself: for it a copy that calls them otherwise.
        """
        whole, special = self._whole, frozenset(self.control_tokens)
        if not is_unigram(whole):
            return whole
        if self._renamed is None or self._renamed[0] != special:
            self._renamed = special, without_special_tokens(whole, special)
        return self._renamed[1]

    @property
    def _whole(self) -> Any:
        """The backend without truncation and padding, which its file or an earlier call of `hf` may have set."""
        self._backend.no_truncation()
        self._backend.no_padding()
        return self._backend

    @property
    def mask_id(self) -> int:
        """The id of the mask token. Raises InputError without one."""
        if self.hf.mask_token_id is None:
            raise InputError.at(
                self._where,
                "the tokenizer has no mask token, which objective masked needs",
                "take an encoder's tokenizer, or train one: tokenizer: {train: {vocab: 16384}}",
            )
        return int(self.hf.mask_token_id)

    @property
    def pad_id(self) -> int:
        """The id of the padding token, or of the end token without one: padding is never attended to or trained on."""
        return self.end_id if self.hf.pad_token_id is None else int(self.hf.pad_token_id)

    @property
    def unknown_id(self) -> int | None:
        """The id of what the vocabulary lacks; None if it lacks nothing (bytes), or leaves it out."""
        number, model = self.hf.unk_token_id, self._backend.model
        if number is None or number == self.end_id or getattr(model, "unk_token", "") is None:
            return None
        return int(number)

    @property
    def control_tokens(self) -> list[str]:
        """The special tokens as they are written: <|im_start|>, </s>."""
        return [token.content for token in self.hf.added_tokens_decoder.values() if token.special]

    @property
    def special_ids(self) -> list[int]:
        return sorted({*self.hf.all_special_ids, self.end_id})

    def frame(self, pair: bool = False, *, needed: bool = True) -> Frame:
        """The special tokens around one text (`<s> … </s>`) or two, from an example that the tokenizer encodes.

        Raises InputError for a tokenizer that puts none there, as those of models that write do, if they are `needed`.
        """
        arguments = ("a", "a") if pair else ("a",)
        encoding = self._whole.encode(*arguments)
        pieces: list[list[int]] = [[] for _ in range(len(arguments) + 1)]
        at = 0
        for token, text, special in zip(encoding.ids, encoding.sequence_ids, encoding.special_tokens_mask, strict=True):
            if special:
                pieces[at].append(token)
            else:
                at = int(text or 0) + 1
        second = [kind for kind, text in zip(encoding.type_ids, encoding.sequence_ids, strict=True) if text == 1]
        if needed and (not pieces[0] or not pieces[-1] or (pair and not pieces[1])):
            raise InputError.at(
                self._where,
                "the tokenizer puts no special tokens around a text, as encoders need them",
                "take an encoder's tokenizer (BERT, RoBERTa …), or train one: tokenizer: {train: {}}",
            )
        between = tuple(pieces[1]) if pair else ()
        return Frame(tuple(pieces[0]), between, tuple(pieces[-1]), second[0] if second else 0)

    def word_starts(self) -> np.ndarray:
        """bool (vocabulary,): whether a token begins a word. A punctuation mark is a word of its own.

        It follows from how each kind of tokenizer writes its tokens: `##` continues a word (WordPiece), `Ġ` and `▁`
        begin one. Tokens of pattern whitespace do not show it: each counts as a word.
        """
        starts = np.ones(self.vocabulary, dtype=bool)
        tokens = self._backend.get_vocab(with_added_tokens=True)
        pieces = json.loads(self._backend.to_str())["model"]["type"] == "WordPiece"
        if not pieces and "Whitespace" in _kinds(self._backend.pre_tokenizer):
            return starts
        for token, number in tokens.items():
            if pieces:
                starts[number] = not token.startswith("##")
            else:
                # A byte-level vocabulary writes letters beyond ASCII as letters of Latin-1, which are no punctuation.
                first = token[:1]
                starts[number] = first in "ĠĊĉ▁" or (first < "\x80" and not first.isalnum())
        starts[self.special_ids] = True
        return starts

    def isolate_punctuation(self) -> None:
        """Make each punctuation mark a token of its own from now on, also in what `save` writes.

        Byte-level vocabularies have tokens like `).` and `",`: an answer that ends inside one would have no last token.
        """
        from tokenizers import pre_tokenizers

        self._encoder = None  # it was made from what changes here
        before = self._backend.pre_tokenizer
        mark = pre_tokenizers.Punctuation(behavior="isolated")
        if before is None:
            self._backend.pre_tokenizer = mark
        elif not {"Punctuation", "BertPreTokenizer"} & _kinds(before):
            self._backend.pre_tokenizer = pre_tokenizers.Sequence([mark, before])

    @property
    def spacing_is_lost(self) -> bool:
        """Whether decoding changes white space, as with pattern whitespace and BERT's tokenizers."""
        white = " ", "  ", "\n\n", " "
        decoded = self.decode(self._exact(["a".join(["", *white, ""])])[0])
        return [c for c in decoded if c.isspace()] != list("".join(white))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, with special tokens, exactly as encoded (without clean-up of spaces)."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(folder)` opens."""
        self.hf.save_pretrained(str(folder))


def load_tokenizer(name: str, where: str = "tokenizer.from", *, runs_code: bool = False) -> Tokenizer:
    """Load a tokenizer from a folder (tokenizer.json, or vocab.json + merges.txt) or a hub id.

    Its own code runs only with `runs_code`. Raises InputError where there is no tokenizer, no fast form of it, or no
    end token.
    """
    folder = Path(name)
    check_regular_in(folder)
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        raise InputError.at(
            where, f"{name} holds no tokenizer", "it needs tokenizer.json, or vocab.json and merges.txt"
        )
    if not folder.is_dir() and (folder.exists() or name.startswith((".", "/", "~"))):
        raise InputError.at(where, f"{name} is not a folder", "give a folder with a tokenizer, or a hub id")
    try:
        with hide_panics():
            hf = _open_own(name) if runs_code else _open(name, folder)
    except (InputError, KeyboardInterrupt):
        raise
    except (
        BaseException
    ) as error:  # the hub, the file system, JSON and Rust raise their own (a panic is a BaseException)
        fix = remedy(name) if "trust_remote_code" in str(error) else _remedy(folder)
        raise InputError.at(where, f"{name} cannot be opened: {_first_line(error)}", fix) from None
    if not hasattr(hf, "backend_tokenizer"):
        raise InputError.at(where, f"{name} has no fast tokenizer", "convert it to tokenizer.json with transformers")
    tokenizer = Tokenizer(hf, where)
    if tokenizer.vocabulary > _MAX_IDS:  # Rust would end the process when it lists all ids up to it
        what = f"{name} has a token with the id {tokenizer.vocabulary - 1:,}; a model needs a row for each id below"
        raise InputError.at(where, what, f"write ids below {_MAX_IDS:,} into its tokenizer.json")
    try:
        ids = tokenizer._exact([_TEST_TEXT])[0]
        tokenizer.decode(ids)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        fix = "check that its vocabulary has the unknown token that it names"
        raise InputError.at(where, f"{name} cannot encode any text: {_first_line(error)}", fix) from None
    if not 0 < len(ids) <= _MAX_TEST_TOKENS:
        what = f"{name} makes {len(ids):,} tokens of {_TEST_TEXT!a}"
        raise InputError.at(where, what, "check its vocabulary, its normalizer and its post_processor")
    return tokenizer


_MAX_IDS = 2**24  # sixty times the largest vocabularies
_TEST_TEXT = "a word, \U00010fff"  # with a character that no vocabulary of words has
_MAX_TEST_TOKENS = 1200  # a hundred times its bytes

_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "tokenizer.model",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)


def _open(name: str, folder: Path) -> PreTrainedTokenizerFast:
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if {"tokenizer.json", "tokenizer_config.json"} <= names and "config.json" not in names:
        # AutoTokenizer imports torch to find the class, which these, artel's own among them, name plainly.
        kind = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
        if kind in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(name)
    from transformers import AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

    if {"vocab.json", "merges.txt"} <= names and not names & {"tokenizer.json", "tokenizer_config.json"}:
        # Older folders (fairseq's RoBERTa, GPT-2 as OpenAI gave it) do not say whose tokenizer this is; the
        # vocabulary does: RoBERTa's has <s> and </s>, GPT-2's has only <|endoftext|>.
        words = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        if {"<s>", "</s>"} <= words.keys() and not is_of_gpt2(folder):
            return RobertaTokenizer.from_pretrained(name, mask_token=mask_token("<mask>"))
        hf = GPT2Tokenizer.from_pretrained(name)
    else:
        hf = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    roles = roles_by_config(hf, name)
    return type(hf).from_pretrained(name, **roles) if roles else hf


def _open_own(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose own code may be run; without that code, so that what is saved of it opens everywhere."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    check_whose(get_tokenizer_config(name), name)
    hf = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    if not type(hf).__module__.startswith("transformers_modules.") or not hasattr(hf, "backend_tokenizer"):
        return hf
    return PreTrainedTokenizerFast(
        tokenizer_object=hf.backend_tokenizer, chat_template=hf.chat_template, **hf.special_tokens_map
    )


def _remedy(folder: Path) -> str:
    if folder.is_dir():
        return "check its tokenizer.json, or vocab.json and merges.txt"
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    return f"a hub id needs network{offline}; give a folder, or download it first with: hf download NAME"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _kinds(pre_tokenizer: Any) -> set[str]:
    """The names of a pre-tokenizer's parts; none where there is no pre-tokenizer."""
    if pre_tokenizer is None:
        return set()
    state = json.loads(pre_tokenizer.__getstate__())
    return {part["type"] for part in state.get("pretokenizers", [state])}


def mask_token(name: str) -> Any:
    """A mask takes the space before it in, as RoBERTa's does: what is hidden is a word with its space."""
    from tokenizers import AddedToken

    return AddedToken(name, lstrip=True, special=True, normalized=False)
