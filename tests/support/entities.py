"""Texts with names, and the windows and tags that the objective makes of them."""

import numpy as np
import torch
from transformers import BertConfig, BertForTokenClassification

from artel.config import RunConfig
from artel.objectives import Tokens
from artel.objectives.tokens.word_windows import NO_WORD
from artel.text import Document, Record, TaggedText
from support.saved_models import word_pieces


def objective(tokenizer, block=128, **tokens):
    run = {"objective": "tokens", "data": {"block": block}, "tokens": tokens}
    return Tokens(RunConfig.model_validate(run), tokenizer)


def document(text, *spans, split="validation"):
    return Document(Record(text, "a.jsonl:1", "set", TaggedText(text, spans)), split)


def tags_of(made, names):
    """The tags of a text's words, put together from all its windows."""
    flags = np.concatenate([sample.flags[sample.flags != NO_WORD] for sample in made.samples])
    return [names[flag - 1] for flag in flags.tolist()]


def foreign(folder, tags):
    """A BERT with WordPiece as the hub has them, its head as it was initialized."""
    torch.manual_seed(0)
    tokenizer = word_pieces(folder)
    model = BertForTokenClassification(BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=len(tokenizer),
        id2label=dict(enumerate(tags)), label2id={tag: at for at, tag in enumerate(tags)}, initializer_range=1.0,
    ))  # fmt: skip
    model.save_pretrained(folder)
    return str(folder)
