"""Tiny models and conversations that the tests of `artel chat` share."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from artel.config import TokenizerTraining
from artel.inference import ChatSession, ChatSettings, open_model
from artel.objectives import DocumentSamples
from artel.tokens import Tokenizer, train_tokenizer
from artel.tokens.tokenizer.chat_template import render, resolve_template

# For commands in processes of their own, as `_one_thread` in conftest.py is for tests in this one.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


# What the small model learns by heart: its answers depend on the system message and on what was said before.
CONVERSATIONS = [
    [("user", "Who are you?"), ("assistant", "I am a tiny model.")],
    [("system", "Speak Russian."), ("user", "Who are you?"), ("assistant", "Я маленькая модель.")],
    [("user", "What is my name?"), ("assistant", "I do not know.")],
    [("user", "My name is Ann."), ("assistant", "Hello, Ann!"), ("user", "What is my name?"), ("assistant", "Ann.")],
]
MARKS = ["<|im_start|>", "<|im_end|>"]


def as_messages(conversation) -> list[dict[str, str]]:
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


def learned_by_heart(
    folder: Path, special: list[str], own_template: str | None, conversations=None, tools=None, steps=80, **sizes
) -> Path:
    """A model that knows `CONVERSATIONS`, or others; its tokenizer has the marks as tokens and a template, or not."""
    tokenizer = trained_tokenizer(special)
    tokenizer.hf.chat_template = own_template
    template = resolve_template(tokenizer, "auto")
    model = llama(tokenizer, **sizes).train()
    conversations = conversations or [as_messages(conversation) for conversation in CONVERSATIONS]
    texts = [render(tokenizer, template, conversation, False, tools) for conversation in conversations]
    rows = [torch.tensor(encoded.ids) for encoded in tokenizer.encode_with_offsets(texts, control=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = model(input_ids=ids.clamp(min=0), labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return saved(folder, model, tokenizer)


def never_ending(folder: Path, positions: int = 1_000_000) -> Path:
    """Random weights that never end a text: its end tokens have the logit 0, and others are likelier."""
    tokenizer = trained_tokenizer(MARKS)
    model = llama(tokenizer, max_position_embeddings=positions)
    with torch.no_grad():
        for token in [*tokenizer.special_ids, *tokenizer.hf.convert_tokens_to_ids(MARKS)]:
            model.lm_head.weight[token] = 0
    return saved(folder, model, tokenizer)


def talk_with(folder: Path, system: str = "", **settings) -> ChatSession:
    return ChatSession(open_model(str(folder)), ChatSettings(**settings), system)


def learned_texts(made, tokenizer):
    """The learned texts of a conversation, one a turn."""
    assert isinstance(made, DocumentSamples), made
    (sample,) = made.samples
    runs, current = [], []
    for token, flag in zip([*sample.ids, 0], [*sample.flags, 0], strict=True):
        if flag:
            current.append(token)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return runs
