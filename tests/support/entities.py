"""Texts with names, and the windows and tags that the objective makes of them."""

import numpy as np

from artel.config import RunConfig
from artel.objectives import Tokens
from artel.objectives.tokens.windows import NO_WORD
from artel.text import Document, Record, Tagged


def objective(tokenizer, block=128, **tokens):
    run = {"objective": "tokens", "data": {"block": block}, "tokens": tokens}
    return Tokens(RunConfig.model_validate(run), tokenizer)


def document(text, *spans, split="validation"):
    return Document(Record(text, "a.jsonl:1", "set", Tagged(text, spans)), split)


def tags_of(made, names):
    """The tags of a text's words, put together from all its windows."""
    flags = np.concatenate([sample.flags[sample.flags != NO_WORD] for sample in made.samples])
    return [names[flag - 1] for flag in flags.tolist()]
