"""Training a tokenizer: byte-pair encoding on the pieces of a text split by a pattern."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import orjson

from artel.config import TokenizerTraining
from artel.tokens.tokenizer.tokenizer import Tokenizer, mask_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTES_PER_ID = 700  # novel-small: a vocabulary of 4,096 for a novel of 3 MB
_MIN_AUTO_VOCABULARY, MAX_AUTO_VOCABULARY = 1024, 32768
TRAINING_BYTES = 2_000_000_000
"""Bytes of text, at most, that a tokenizer is trained on."""
_MIN_FREQUENCY = 2  # pairs seen less often are not merged

# The pattern of cl100k_base, the tokenizer of GPT-4 (openai/tiktoken, tiktoken_ext/openai_public.py): a word may start
# with any single character, not only a space; numbers have up to three digits; line ends stay with characters before.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterator[str], settings: TokenizerTraining, *, encoder: bool = False) -> Tokenizer:
    """Train byte-pair encoding (Sennrich et al. 2016) on texts split by `settings.pattern`.

    gpt2 and gpt4 work on bytes of UTF-8, like GPT-2: decoding restores every text exactly. whitespace is the tokenizer
    in the quick tour of Hugging Face's tokenizers: runs of letters and runs of other characters, merged from the
    characters of the text. It loses white space, and characters that are not in the training text become <unk>, so
    decoding does not restore a text (`Tokenizer.loses_spacing`): it puts a space between all tokens.

    For an `encoder` the tokenizer has RoBERTa's special tokens in RoBERTa's order, and adds them around a text. The
    vocabulary is smaller than `settings.vocab` if the text yields fewer tokens, and larger if it has more characters.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    is_bytewise = settings.pattern != "whitespace"
    names = _special_tokens(settings.pattern, encoder)
    special = list(dict.fromkeys([*names.values(), *settings.special]))
    backend = Backend(models.BPE(unk_token=None if is_bytewise else names["unk_token"]))
    backend.pre_tokenizer = _pre_tokenizer(settings.pattern)
    if is_bytewise:
        backend.decoder = decoders.ByteLevel()
    if encoder:
        frame_tokens = [(names[role], special.index(names[role])) for role in ("eos_token", "bos_token")]
        backend.post_processor = processors.RobertaProcessing(frame_tokens[0], frame_tokens[1], add_prefix_space=False)
    elif is_bytewise:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    num_bytes = 0

    def count_bytes() -> Iterator[str]:
        nonlocal num_bytes
        for text in _take_bytes(texts, TRAINING_BYTES):
            num_bytes += len(text.encode("utf-8", "surrogatepass"))
            yield text

    trainer = trainers.BpeTrainer(
        vocab_size=MAX_AUTO_VOCABULARY if settings.vocab == "auto" else settings.vocab,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[mask_token(name) if name == names.get("mask_token") else name for name in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if is_bytewise else [],
        show_progress=False,
    )
    backend.train_from_iterator(count_bytes(), trainer)
    if settings.vocab == "auto":  # the amount of text was not known before
        backend = _cut_vocabulary(backend, auto_vocabulary(num_bytes))
    return Tokenizer(_as_transformers(backend, names), "tokenizer.train")


def _pre_tokenizer(pattern: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pattern == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == "whitespace":
        return pre_tokenizers.Whitespace()
    split = pre_tokenizers.Split(Regex(_GPT4), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def auto_vocabulary(text_bytes: int) -> int:
    """Return the size of a vocabulary for a text of `text_bytes`: a power of two, about one id per 700 bytes."""
    power = round(math.log2(max(1, text_bytes / _BYTES_PER_ID)))
    return min(MAX_AUTO_VOCABULARY, max(_MIN_AUTO_VOCABULARY, 2**power))


def describe_vocabulary(requested: int | Literal["auto"], reached: int, pattern: str) -> str:
    """Return a note for the user if the vocabulary does not have the requested size, else ""."""
    if requested == "auto":
        return f"tokenizer.train.vocab: auto is {reached:,} for this text"
    if reached < requested:
        return f"tokenizer.train.vocab: {reached:,} instead of {requested:,}: this text yields no more"
    if reached > requested:
        advice = "" if pattern != "whitespace" else "; tokenizer.train.pattern: gpt4 begins with the 256 bytes instead"
        what = f"tokenizer.train.vocab: {reached:,} instead of {requested:,}: the text has so many characters"
        return f"{what}, with the special tokens, and none are merged{advice}"
    return ""


def _cut_vocabulary(backend: Any, num_ids: int) -> Any:
    """Truncate the tokenizer to its first `num_ids` ids. Training for that size gives the same tokenizer."""
    from tokenizers import Tokenizer as Backend

    state = orjson.loads(backend.to_str())
    model = state["model"]
    vocabulary, merges = model["vocab"], model["merges"]
    num_ids = max(num_ids, len(vocabulary) - len({"".join(merge) for merge in merges}))  # the alphabet stays
    num_merges = next(
        (index for index, merge in enumerate(merges) if vocabulary["".join(merge)] >= num_ids), len(merges)
    )
    model["merges"] = merges[:num_merges]
    model["vocab"] = {token: token_id for token, token_id in vocabulary.items() if token_id < num_ids}
    return Backend.from_str(orjson.dumps(state).decode())


def _take_bytes(texts: Iterator[str], max_bytes: int) -> Iterator[str]:
    """Yield texts, long ones in pieces, until they sum to `max_bytes` bytes of UTF-8."""
    for text in texts:
        yield from split_long_text(text)
        max_bytes -= len(text.encode("utf-8", "surrogatepass"))
        if max_bytes <= 0:
            return


# Characters that tokenizers splits at a time: each of its threads needs 60 to 120 bytes of memory per character.
_PIECE_CHARACTERS = 100_000
# Positions where every pattern ends a word: between other characters, after a line feed or before a space.
_END_OF_WORD = re.compile(r"\S\n(?=\S)|\S(?= \S)")


def split_long_text(text: str, chunk_characters: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Yield the text, or chunks of a long text with the same words. Splits a word only if a chunk has no other end."""
    position = 0
    while len(text) - position > 2 * chunk_characters:
        word_end = _END_OF_WORD.search(text, position + chunk_characters, position + 2 * chunk_characters)
        end = word_end.end() if word_end else position + 2 * chunk_characters
        yield text[position:end]
        position = end
    yield text[position:] if position else text


def _special_tokens(pattern: str, encoder: bool) -> dict[str, str]:
    """Return special tokens by their roles in transformers, in the order of their ids."""
    if encoder:
        return {
            "bos_token": "<s>",
            "pad_token": "<pad>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "mask_token": "<mask>",
        }
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    return names | {"unk_token": "<unk>"} if pattern == "whitespace" else names


def _as_transformers(backend: Any, names: dict[str, str]) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    roles: dict[str, Any] = dict(names)
    if "mask_token" in roles:
        roles |= {"cls_token": names["bos_token"], "sep_token": names["eos_token"]}
    else:
        roles["bos_token"] = names["eos_token"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)
