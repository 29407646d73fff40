"""Which class of transformers has the head that an objective asks for, and linear heads beside it."""

from __future__ import annotations

import functools
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from artel.errors import InputError, Problem

# What each head is for, and architectures that have it, to be named when another is asked for it.
_PURPOSE = {
    "AutoModelForCausalLM": ("next tokens (causal)", "gpt2, llama or qwen3"),
    "AutoModelForMaskedLM": ("masked tokens (masked)", "roberta, bert or modernbert"),
    "AutoModelForQuestionAnswering": ("answers in documents (span_qa)", "bert, roberta or modernbert"),
}


def check_head(model_type: str, auto_class: str, where: str) -> None:
    """Raise InputError when an architecture has no such head."""
    if model_type not in getattr(transformers, auto_class)._model_mapping._model_mapping:
        purpose, have = _PURPOSE[auto_class]
        raise InputError([Problem(where, f"{model_type} has no head for {purpose}: no {auto_class}", f"take {have}")])


def model_class(config: PreTrainedConfig, auto_class: str, heads: dict[str, int]) -> Any:
    """The model class for a configuration, with linear `heads` (name -> outputs) as modules of those names."""
    found = getattr(transformers, auto_class)._model_mapping[type(config)]
    base = found[0] if isinstance(found, tuple) else found
    return _with_heads(base, tuple(heads.items())) if heads else base


@functools.cache
def _with_heads(base: type[PreTrainedModel], heads: tuple[tuple[str, int], ...]) -> type[PreTrainedModel]:
    """A subclass of the same name, so that what it saves opens as the base class: the heads are further tensors."""

    def build(self: Any, config: PreTrainedConfig) -> None:
        base.__init__(self, config)
        for name, outputs in heads:
            setattr(self, name, nn.Linear(config.hidden_size, outputs))
        self.post_init()

    return type(base.__name__, (base,), {"__init__": build, "__module__": base.__module__})
