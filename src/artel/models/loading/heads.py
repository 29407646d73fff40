"""The transformers class with the head that an objective needs, and the modules that the objective adds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from artel.errors import InputError, Problem
from artel.models.loading.language_part import text_class

# A layer takes milliseconds to build, even without weights; the deepest published models have 1,000 (arXiv:2203.00555).
# The other limits are a hundred times the largest published sizes.
_MAX_SIZES = {
    "num_hidden_layers": 1_000,
    "hidden_size": 10**7,
    "num_attention_heads": 10**5,
    "vocab_size": 10**8,
}

# The purpose of each head, and architectures that have it, for the error message.
_PURPOSE = {
    "AutoModelForCausalLM": ("next tokens (causal)", "gpt2, llama or qwen3"),
    "AutoModelForMaskedLM": ("masked tokens (masked)", "roberta, bert or modernbert"),
    "AutoModelForSequenceClassification": ("labels of texts (classification, reward)", "bert, roberta or llama"),
    "AutoModelForTokenClassification": ("labels of tokens (tokens)", "bert, roberta or modernbert"),
    "AutoModelForSeq2SeqLM": ("texts written for texts (seq2seq)", "t5, mt5 or bart"),
    "AutoModel": ("vectors of texts (embedding)", "bert, roberta or modernbert"),
    "AutoModelForQuestionAnswering": ("answers in documents (span_qa)", "bert, roberta or modernbert"),
}

Head = int | Callable[[PreTrainedConfig], nn.Module]
"""A module that an objective adds: the outputs of a linear layer on hidden states, or a function that builds it."""

_POOLER = "pooler"
"""A layer of headless models (`AutoModel`) that transforms the first token's state. No objective uses it. It stays
unchanged, so the saved folder opens as before. A folder may lack it."""


def is_unused(model: PreTrainedModel, key: str) -> bool:
    """True for a tensor of a model without a head that no objective uses."""
    return model.base_model is model and key.startswith(f"{_POOLER}.")


def freeze_unused(model: PreTrainedModel) -> None:
    """Freeze parameters that get no gradient: data-parallel processes would wait for it."""
    for name, parameter in model.named_parameters():
        if is_unused(model, name):
            parameter.requires_grad = False


def check_head(model_type: str, auto_class: str, where: str, custom: Collection[str] = ()) -> None:
    """Raise InputError if an architecture has no such head. `custom`: the auto classes of the model's own code."""
    if auto_class in custom:
        return
    if model_type not in getattr(transformers, auto_class)._model_mapping._model_mapping:
        purpose, examples = _PURPOSE[auto_class]
        fix = f"use {examples}"
        if auto_class == "AutoModelForCausalLM" and model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            fix = f"write objective: masked, since {model_type} is an encoder; or {fix}"
        raise InputError.at(where, f"{model_type} has no head for {purpose}: no {auto_class}", fix)


def check_direction(config: PreTrainedConfig, auto_class: str, where: str) -> None:
    """Raise InputError if a model is to predict next tokens but is configured as a bidirectional encoder.

    transformers has a causal mode for models like BERT, which `is_decoder` turns on (`causal` for XLM). They have a
    masked head, except BertGeneration, whose headless class is called an encoder.
    """
    if auto_class != "AutoModelForCausalLM" or config.is_encoder_decoder:
        return
    key = next((key for key in ("is_decoder", "causal") if getattr(config, key, None) is False), None)
    if key is None:
        return
    kind = config.model_type
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or str(MODEL_MAPPING_NAMES.get(kind)).endswith("Encoder"):
        what = f"{kind} is an encoder: it reads in both directions, so it would see the token that it has to predict"
        setting = (
            f"model.config.{key}: true" if where.startswith("model.config") else f'"{key}": true in its config.json'
        )
        fix = f"write {setting} to train it as a decoder"
        if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            fix = f"write objective: masked to train it as an encoder, or {setting} to train it as a decoder"
        raise InputError.at(where, what, fix)


def custom_classes(config: PreTrainedConfig, *, runs_code: bool) -> dict[str, str]:
    """Return the classes of the model's own code by auto class; none if that code may not run."""
    return dict(getattr(config, "auto_map", None) or {}) if runs_code else {}


def check_sizes(config: PreTrainedConfig) -> None:
    """Raise InputError for impossible sizes in a configuration, with the names that its architecture uses."""
    text = config.get_text_config()
    problems = []
    for name, limit in _MAX_SIZES.items():
        try:
            size = getattr(text, name, None)
        except AmbiguousGlobalPerLayerAttributeError:  # it differs between layers
            continue
        if isinstance(size, bool | str | float) or (isinstance(size, int) and not 0 < size <= limit):
            key = text.attribute_map.get(name, name)
            problems.append(Problem("model.config", f"{key} is {size!r}", f"write a number from 1 to {limit:,}"))
    if problems:
        raise InputError(problems)


def model_class(
    config: PreTrainedConfig, auto_class: str, heads: Mapping[str, Head], *, runs_code: bool = False
) -> Any:
    """Return the model class for a configuration, with `heads` as modules of those names.

    With `runs_code` the class may come from the model's own code, which then runs. Raise InputError for impossible
    sizes in the configuration.
    """
    check_sizes(config)
    custom = custom_classes(config, runs_code=runs_code).get(auto_class)
    if custom is not None:
        base = get_class_from_dynamic_module(custom, config.name_or_path)
        base.register_for_auto_class(auto_class)  # so that its code is saved with it
    else:
        mapping = getattr(transformers, auto_class)._model_mapping
        part_class = text_class(config) if type(config) not in mapping else None
        classes = part_class or mapping[type(config)]
        base = classes[0] if isinstance(classes, tuple) else classes
    return _add_heads(base, tuple(heads.items())) if heads else base


@functools.cache
def _add_heads(base: type[PreTrainedModel], heads: tuple[tuple[str, Head], ...]) -> type[PreTrainedModel]:
    """Return a subclass of the same name. Its files open as the base class, with the heads as additional tensors."""

    def build(self: Any, config: PreTrainedConfig) -> None:
        base.__init__(self, config)
        for name, head in heads:
            setattr(self, name, nn.Linear(config.hidden_size, head) if isinstance(head, int) else head(config))
        self.post_init()

    return type(base.__name__, (base,), {"__init__": build, "__module__": base.__module__})
