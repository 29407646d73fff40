"""Training a tokenizer: byte-pair encoding over what a pattern cuts a text into."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from artel.config import TokenizerTraining
from artel.errors import InputError
from artel.tokens.tokenizer.tokenizer import Tokenizer, mask_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What cl100k_base, the tokenizer of GPT-4, cuts a text into (openai/tiktoken, tiktoken_ext/openai_public.py): any one
# sign may lead a word, not only a space; numbers go in threes; line ends stay with the signs before them.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    texts: Iterator[str], wanted: TokenizerTraining, *, encoder: bool = False, where: str = "tokenizer.train"
) -> Tokenizer:
    """Byte-pair encoding (Sennrich et al. 2016) of the parts that `wanted.pattern` cuts a text into.

    gpt2 and gpt4 work on the bytes of UTF-8, as GPT-2 does: every text comes back exactly. whitespace is what the quick
    tour of Hugging Face's tokenizers trains: runs of letters and runs of signs, merged from the characters of the text.
    What stood between them is lost and a character that was not in the training text becomes <unk>: no text comes back
    as it was (`Tokenizer.spacing_is_lost` says so), and generated text has a space between all tokens.

    For an encoder it has RoBERTa's special tokens in RoBERTa's order, and puts them around a text. Raises InputError
    when the text does not yield the vocabulary asked for.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    bytewise = wanted.pattern != "whitespace"
    names = _special_tokens(wanted, encoder)
    special = list(dict.fromkeys([*names.values(), *wanted.special]))
    backend = Backend(models.BPE(unk_token=None if bytewise else names["unk_token"]))
    backend.pre_tokenizer = _pre_tokenizer(wanted.pattern)
    if bytewise:
        backend.decoder = decoders.ByteLevel()
    if encoder:
        around = [(names[role], special.index(names[role])) for role in ("eos_token", "bos_token")]
        backend.post_processor = processors.RobertaProcessing(around[0], around[1], add_prefix_space=False)
    elif bytewise:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=wanted.vocab,
        min_frequency=wanted.minimum_frequency,
        special_tokens=[mask_token(name) if name == names.get("mask_token") else name for name in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if bytewise else [],
        show_progress=False,
    )
    backend.train_from_iterator(_up_to(texts, wanted.sample), trainer)
    _check_size(backend.get_vocab_size(with_added_tokens=True), wanted.vocab, where)
    return Tokenizer(_as_transformers(backend, names), where)


def _pre_tokenizer(pattern: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pattern == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == "whitespace":
        return pre_tokenizers.Whitespace()
    cut = pre_tokenizers.Split(Regex(_GPT4), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _check_size(reached: int, wanted: int, where: str) -> None:
    if reached < wanted:
        raise InputError.at(
            f"{where}.vocab",
            f"{wanted:,} tokens are more than this text yields: it has {reached:,}",
            f"write tokenizer.train.vocab: {reached} or less, give more text, or lower minimum_frequency",
        )
    if reached > wanted:  # every character is a token before anything is merged
        raise InputError.at(
            f"{where}.vocab",
            f"{wanted:,} tokens do not hold the characters of this text and the special tokens: {reached:,}",
            f"write tokenizer.train.vocab: {reached * 2} or so; or tokenizer.train.pattern: gpt4, whose "
            "alphabet is the 256 bytes",
        )


def _up_to(texts: Iterator[str], budget: int) -> Iterator[str]:
    """Texts, long ones in pieces, until `budget` bytes of UTF-8 have gone through."""
    for text in texts:
        yield from pieces_of(text)
        budget -= len(text.encode("utf-8", "surrogatepass"))
        if budget <= 0:
            return


# Characters that tokenizers cuts into words at a time, in 60 to 120 bytes of memory each and in each of its threads.
_PIECE = 100_000
# A place where every pattern ends a word: behind a line feed, or before a space, that stands alone between other signs.
_END_OF_WORD = re.compile(r"\S\n(?=\S)|\S(?= \S)")


def pieces_of(text: str, size: int = _PIECE) -> Iterator[str]:
    """The text, or of a long one pieces that have the same words; where a piece has no end of a word, one is cut."""
    at = 0
    while len(text) - at > 2 * size:
        end = _END_OF_WORD.search(text, at + size, at + 2 * size)
        stop = end.end() if end else at + 2 * size
        yield text[at:stop]
        at = stop
    yield text[at:] if at else text


def _special_tokens(wanted: TokenizerTraining, encoder: bool) -> dict[str, str]:
    """Special tokens by the role that transformers knows them by, in the order of their ids."""
    if encoder:
        return {
            "bos_token": "<s>",
            "pad_token": wanted.pad or "<pad>",
            "eos_token": wanted.end or "</s>",
            "unk_token": "<unk>",
            "mask_token": "<mask>",
        }
    names = {"eos_token": wanted.end or "<|endoftext|>", "pad_token": wanted.pad or "<|pad|>"}
    return names | {"unk_token": "<unk>"} if wanted.pattern == "whitespace" else names


def _as_transformers(backend: Any, names: dict[str, str]) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    roles: dict[str, Any] = dict(names)
    if "mask_token" in roles:
        roles |= {"cls_token": names["bos_token"], "sep_token": names["eos_token"]}
    else:
        roles["bos_token"] = names["eos_token"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)
