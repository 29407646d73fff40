"""Small models for the engines, and what they write: each prompt alone, or many together."""

from __future__ import annotations

import queue

import torch
from transformers import AutoModelForCausalLM

from artel.generation.base import EngineError, Generation
from artel.generation.generate import continue_ids
from artel.generation.sampler import Sampler, SamplingOptions
from support.waiting import LIMIT

CONTEXT = 512
ROWS = 330
SIZES = {
    "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def made(config):
    """A model whose logits lie far enough apart that sums in another order choose the same tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.ndim > 1 else 1)
    return model


def alone(model, tokenizer, prompt, count):
    greedy = lambda row: int(row[: tokenizer.vocabulary].argmax())  # noqa: E731
    return list(continue_ids(model, tokenizer, prompt, greedy, count, None, frozenset()))


def together(engine, tokenizer, prompts, count):
    """The greedy tokens of each prompt, or what it ended in."""
    items = queue.SimpleQueue()
    generations = []
    for number, prompt in enumerate(prompts):
        sampler = Sampler(SamplingOptions(temperature=0), prompt, tokenizer.vocabulary)
        deliver = lambda item, number=number: items.put((number, item))  # noqa: E731
        generations.append(Generation(sampler, count, frozenset(), deliver))
        engine.submit(prompt, generations[-1])
    written, left = [[] for _ in prompts], len(prompts)
    while left:
        number, item = items.get(timeout=LIMIT)
        if item is None or isinstance(item, EngineError):
            left -= 1
            engine.cancel(generations[number])
            written[number] = written[number] if item is None else item
        else:
            written[number].append(item.id)
    return written


def prompt_of(length, seed):
    return torch.randint(1, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
