"""Tokenizers: train a byte-level BPE, or take one from a folder or a hub id.

Text is encoded as plain text: a document that happens to contain `<|endoftext|>` gets the tokens of those letters,
never the special token, so that no text can end a document or play a role.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from artel.config import TokenizerTraining
from artel.errors import InputError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """A tokenizer of transformers, seen as artel needs it."""

    def __init__(self, hf: PreTrainedTokenizerFast, where: str) -> None:
        self.hf = hf
        self._backend = hf.backend_tokenizer
        end = hf.eos_token_id if hf.eos_token_id is not None else hf.sep_token_id
        if end is None:
            raise InputError(
                [Problem(where, "the tokenizer has no end token", "set eos_token in its tokenizer_config.json")]
            )
        self.end_id: int = int(end)

    @property
    def vocabulary(self) -> int:
        """The number of embedding rows it needs: its largest id and one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints give equal ids for every text."""
        return xxhash.xxh3_128_hexdigest(self._backend.to_str().encode() + str(self.end_id).encode())

    def encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Ids of each text, int64 (tokens,), without special tokens."""
        before = self._backend.encode_special_tokens
        self._backend.encode_special_tokens = True  # "as text" is meant: the library's name says the opposite
        try:
            for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int64)
        finally:
            self._backend.encode_special_tokens = before

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens written out, exactly as encoded (no clean-up of spaces)."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write it so that `AutoTokenizer.from_pretrained(folder)` opens it."""
        self.hf.save_pretrained(str(folder))


def train_tokenizer(texts: Iterator[str], wanted: TokenizerTraining, where: str = "tokenizer.train") -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016 over the bytes of UTF-8, as GPT-2 has it): every text comes back exactly.

    Raises InputError when the text does not yield the vocabulary asked for.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    special = list(dict.fromkeys([wanted.end, wanted.pad, *wanted.special]))
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=wanted.vocab,
        min_frequency=wanted.minimum_frequency,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_up_to(texts, wanted.sample), trainer)
    reached = backend.get_vocab_size(with_added_tokens=True)
    if reached < wanted.vocab:
        raise InputError(
            [
                Problem(
                    f"{where}.vocab",
                    f"{wanted.vocab:,} tokens are more than this text yields: it has {reached:,}",
                    f"write tokenizer.train.vocab: {reached} or less, give more text, or lower minimum_frequency",
                )
            ]
        )
    return Tokenizer(_as_transformers(backend, wanted), where)


def load_tokenizer(name: str, where: str = "tokenizer.from") -> Tokenizer:
    """A tokenizer from a folder (tokenizer.json, or vocab.json + merges.txt) or a hub id.

    Raises InputError when there is none, or it has no fast form, or no end token.
    """
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        raise InputError(
            [Problem(where, f"{name} holds no tokenizer", "it needs tokenizer.json, or vocab.json and merges.txt")]
        )
    if not folder.is_dir() and (folder.exists() or name.startswith((".", "/", "~"))):
        raise InputError([Problem(where, f"{name} is not a folder", "give a folder with a tokenizer, or a hub id")])
    try:
        hf = _open(name, folder)
    except Exception as error:  # the hub, the file system, JSON and Rust each raise their own kinds
        raise InputError([Problem(where, f"{name} cannot be opened: {_first_line(error)}", _remedy(folder))]) from None
    if not hasattr(hf, "backend_tokenizer"):
        raise InputError(
            [Problem(where, f"{name} has no fast tokenizer", "convert it to tokenizer.json with transformers")]
        )
    return Tokenizer(hf, where)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "tokenizer.model",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)


def _open(name: str, folder: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if {"vocab.json", "merges.txt"} <= names and not names & {"tokenizer.json", "tokenizer_config.json"}:
        # Older folders (fairseq's RoBERTa, GPT-2 as OpenAI gave it) do not say whose tokenizer this is; the
        # vocabulary does: RoBERTa's has <s> and </s>, GPT-2's has only <|endoftext|>.
        words = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        kind = RobertaTokenizer if {"<s>", "</s>"} <= words.keys() else GPT2Tokenizer
        return kind.from_pretrained(name)
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def _remedy(folder: Path) -> str:
    if folder.is_dir():
        return "check its tokenizer.json, or vocab.json and merges.txt"
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    return f"a hub id needs network{offline}; give a folder, or download it first with: hf download NAME"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _up_to(texts: Iterator[str], budget: int) -> Iterator[str]:
    """Texts until `budget` bytes of UTF-8 have gone through."""
    for text in texts:
        yield text
        budget -= len(text.encode("utf-8", "surrogatepass"))
        if budget <= 0:
            return


def _as_transformers(backend: Any, wanted: TokenizerTraining) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=wanted.end,
        bos_token=wanted.end,
        pad_token=wanted.pad,
        clean_up_tokenization_spaces=False,
    )
