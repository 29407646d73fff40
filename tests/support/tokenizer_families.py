"""Tiny tokenizers with the pipelines of twelve families, and models of their types: folders as the hub has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertTokenizer,
    DebertaV2Tokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    RobertaTokenizer,
    T5Tokenizer,
)

from artel.tokens.tokenizer.word_cache import byte_letters

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BYTE_LETTERS = [chr(letter) for letter in byte_letters().values()]
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
BEGINNING = (
    "{{ bos_token or '' }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**SIZES, "max_position_embeddings": 80}
LLAMA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}


def numbered(*tokens: str) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def sentencepiece(*special: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of Llama 2's kind, and its merges: a letter with the space before it is a token."""
    vocab = numbered(*special, *FALLBACK, "▁", *LETTERS, *(f"▁{letter}" for letter in LETTERS))
    return vocab, [("▁", letter) for letter in LETTERS]


def bytewise(*special: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of GPT-2's kind, and its merges."""
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    return numbered(*special, *BYTE_LETTERS, *("".join(pair) for pair in merges)), merges


def unigram(*special: str) -> list[tuple[str, float]]:
    return [*((token, 0.0) for token in special), ("▁", -2.0), *((letter, -4.0) for letter in LETTERS)]


def framed(begin: str, end: str, *special: str, **roles: str) -> PreTrainedTokenizerFast:
    """A tokenizer.json of bytes with its own frame of special tokens: Llama 3 and ModernBERT."""
    vocab, merges = bytewise(*special)
    backend = Backend(models.BPE(vocab, merges))
    backend.add_special_tokens(list(special))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    single = " ".join(part for part in (begin, "$A", end) if part)
    pair = f"{begin} $A {end} $B {end}" if end else f"{begin} $A {begin} $B"
    marks = [(token, vocab[token]) for token in (begin, end) if token]
    frame = processors.TemplateProcessing(single=single, pair=pair, special_tokens=marks)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), frame])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)


def llama_2() -> Any:
    vocab, merges = sentencepiece("<unk>", "<s>", "</s>")
    return LlamaTokenizer(vocab=vocab, merges=merges)


def mistral() -> Any:
    """The older tokenizer.json of SentencePiece models: the space before a text comes from a normalizer."""
    vocab, merges = sentencepiece("<unk>", "<s>", "</s>")
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)


def gemma() -> Any:
    vocab, merges = sentencepiece("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    return GemmaTokenizer(vocab=vocab, merges=merges)


def qwen() -> Any:
    vocab, merges = bytewise("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def roberta() -> Any:
    vocab, merges = bytewise("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    mask = AddedToken("<mask>", lstrip=True, special=True)
    return RobertaTokenizer(vocab=vocab, merges=merges, mask_token=mask)


def bert() -> Any:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    return BertTokenizer(vocab=numbered(*special, *LETTERS, *(f"##{letter}" for letter in LETTERS), *"—.():0123456789"))


def rugpt(folder: Path) -> None:
    """vocab.json and merges.txt alone: GPT-2's <|endoftext|> is not among its tokens."""
    vocab, merges = bytewise("<pad>", "<s>", "</s>", "<unk>", "<mask>")
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n")


@dataclass(frozen=True)
class TokenizerFamily:
    make: Callable[..., Any]
    """Returns the tokenizer of transformers, or writes its files into a folder."""
    model_type: str
    sizes: dict[str, Any]
    ids: dict[str, int]
    """The special ids in config.json."""
    kind: str = "causal"
    """causal, seq2seq, or encoder."""
    end: str = ""
    """The token that ends a text, where that is not the tokenizer's eos_token as its files have it."""

    def write(self, folder: Path) -> None:
        """Write the tokenizer and a model with random weights."""
        folder.mkdir(parents=True)
        if self.make is rugpt:
            rugpt(folder)
            size = 5 + 256 + 3
        else:
            tokenizer = self.make()
            if self.kind == "causal":
                tokenizer.chat_template = BEGINNING
            tokenizer.save_pretrained(folder)
            size = len(tokenizer)
        config = CONFIG_MAPPING[self.model_type](vocab_size=size, **self.sizes, **self.ids)
        auto = {"causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM, "encoder": AutoModelForMaskedLM}
        torch.manual_seed(0)
        auto[self.kind].from_config(config).save_pretrained(folder)


def ids(begin: int | None, end: int, pad: int | None = None) -> dict[str, Any]:
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}


LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
MODERN = ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
FAMILIES = {
    "Llama 2": TokenizerFamily(llama_2, "llama", LLAMA, ids(1, 2)),
    "Llama 3": TokenizerFamily(
        lambda: framed(LLAMA_3[0], "", *LLAMA_3, bos_token=LLAMA_3[0], eos_token=LLAMA_3[2]), "llama", LLAMA, ids(0, 1)
    ),
    "Gemma": TokenizerFamily(gemma, "gemma", LLAMA, ids(2, 1, 0)),
    "Mistral": TokenizerFamily(mistral, "mistral", {**LLAMA, "sliding_window": None}, ids(1, 2)),
    "Qwen": TokenizerFamily(qwen, "qwen2", {**SIZES, "num_key_value_heads": 2}, ids(None, 0)),
    "GPT-2": TokenizerFamily(
        lambda: GPT2Tokenizer(**dict(zip(("vocab", "merges"), bytewise("<|endoftext|>"), strict=True))),
        "gpt2", GPT2, ids(0, 0),
    ),
    "ruGPT-3": TokenizerFamily(rugpt, "gpt2", GPT2, ids(1, 2, 0), end="</s>"),
    "T5": TokenizerFamily(
        lambda: T5Tokenizer(vocab=unigram("<pad>", "</s>", "<unk>"), extra_ids=2), "t5", T5,
        {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}, "seq2seq",
    ),
    "BERT": TokenizerFamily(bert, "bert", ENCODER, {"pad_token_id": 0}, "encoder"),
    "RoBERTa": TokenizerFamily(roberta, "roberta", ENCODER, ids(0, 2, 1), "encoder"),
    "DeBERTa": TokenizerFamily(
        lambda: DebertaV2Tokenizer(vocab=unigram("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"), unk_id=3),
        "deberta-v2", ENCODER, {"pad_token_id": 0}, "encoder",
    ),
    "ModernBERT": TokenizerFamily(
        lambda: framed("[CLS]", "[SEP]", *MODERN, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]",
                       unk_token="[UNK]", mask_token="[MASK]"),
        "modernbert", ENCODER, {"cls_token_id": 0, "sep_token_id": 1, "pad_token_id": 2, "bos_token_id": 0,
                                "eos_token_id": 1}, "encoder",
    ),
}  # fmt: skip
