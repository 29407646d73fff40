"""Tiny models and conversations that the tests of `artel chat` share."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from artel.config import TokenizerTraining
from artel.tokens import Tokenizer, train_tokenizer

# Models this small gain nothing from a second thread, and where others work too they wait for it: 40 s instead of 1.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What the small model learns by heart: its answers depend on the system message and on what was said before.
CONVERSATIONS = [
    [("user", "Who are you?"), ("assistant", "I am a tiny model.")],
    [("system", "Speak Russian."), ("user", "Who are you?"), ("assistant", "Я маленькая модель.")],
    [("user", "What is my name?"), ("assistant", "I do not know.")],
    [("user", "My name is Ann."), ("assistant", "Hello, Ann!"), ("user", "What is my name?"), ("assistant", "Ann.")],
]
MARKS = ["<|im_start|>", "<|im_end|>"]


def told(conversation) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in conversation]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def trained_tokenizer(special: list[str]) -> Tokenizer:
    texts = [content for conversation in CONVERSATIONS for _, content in conversation]
    texts += ["system user assistant <|im_start|> <|im_end|> the of and to in a is that"]
    return train_tokenizer(iter(texts * 20), TokenizerTraining(vocab=330, special=special))


def llama(tokenizer: Tokenizer, **changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**{
        "vocab_size": tokenizer.vocabulary, "max_position_embeddings": 512, "eos_token_id": tokenizer.end_id,
        "bos_token_id": None, "pad_token_id": tokenizer.hf.pad_token_id, **sizes, **changes
    })  # fmt: skip
    return LlamaForCausalLM(config).eval()


def saved(folder: Path, model, tokenizer: Tokenizer) -> Path:
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def said(pieces) -> str:
    return "".join(pieces)
