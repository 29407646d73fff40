"""The transformers configuration of `model.config`: its keys are checked, the tokenizer gives size and special ids."""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.errors import InputError, Problem
from artel.models.loading.heads import check_direction
from artel.models.loading.model_folder import in_words
from artel.tokens import Tokenizer

_SAME_AS_VOCABULARY = {"unpadded_vocab_size"}
"""Keys that are `vocab_size` under another name; their defaults are those of the published models."""

_GETATTR_KEY = re.compile(r"""getattr\(\s*(?:self\.)?config,\s*["'](\w+)["']""")


def check_type(model_type: str) -> None:
    """Raise InputError for a model type that transformers does not know."""
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), 3)
        fix = f"did you mean {' or '.join(near)}?" if near else "see the model types of transformers"
        raise InputError.at("model.config.model_type", f"transformers knows no {model_type!r}", fix)


def known_keys(values: dict[str, Any]) -> tuple[set[str], list[Problem]]:
    """The keys of the model type, and a problem for each key or value in `values` that is wrong."""
    keys = {key: value for key, value in values.items() if key != "model_type"}
    model_type = values["model_type"]
    check_type(model_type)
    try:
        plain = CONFIG_MAPPING[model_type]()
    except Exception as error:  # each configuration checks in its own way
        what = f"the defaults of {model_type} in transformers are no model: {in_words(error)}"
        raise InputError.at(
            "model.config.model_type", what, "take a pretrained model of this kind: model.from"
        ) from None
    known = {*plain.to_dict(), *plain.attribute_map, *_read_by_code(type(plain))}
    problems = []
    for key in keys.keys() - known:
        near = difflib.get_close_matches(key, sorted(known), 1)
        fix = f"did you mean {near[0]}?" if near else f"see transformers' {type(plain).__name__}"
        problems.append(Problem(f"model.config.{key}", f"{model_type} has no such key", fix))
    for key in keys.keys() & known:
        if key.endswith("_token_id"):  # -1 means none
            continue
        value, default = keys[key], _default(plain, key)
        if isinstance(value, int | float) and isinstance(default, int | float) and value < 0 <= default:
            problems.append(Problem(f"model.config.{key}", f"{value} is below zero", f"{default} is its default"))
    return known, problems


def _default(plain: PreTrainedConfig, key: str) -> Any:
    try:
        return getattr(plain, key, None)
    except AmbiguousGlobalPerLayerAttributeError:  # each layer has its own
        return None


def _read_by_code(kind: type[PreTrainedConfig]) -> set[str]:
    """Keys that a model's code reads though its configuration has no default for them (Qwen3-MoE's head_dim)."""
    file = Path(inspect.getfile(kind))
    code = file.with_name(file.name.replace("configuration_", "modeling_", 1))
    return set(_GETATTR_KEY.findall(code.read_text("utf-8"))) if code != file and code.is_file() else set()


def configuration(values: dict[str, Any], tokenizer: Tokenizer, auto_class: str) -> PreTrainedConfig:
    """The configuration of `model.config`, with the tokenizer's vocabulary and special ids. Raises InputError."""
    keys = {key: value for key, value in values.items() if key != "model_type"}
    model_type = values["model_type"]
    known, problems = known_keys(values)
    vocabulary = keys.get("vocab_size", tokenizer.vocabulary)
    if not isinstance(vocabulary, int) or vocabulary < tokenizer.vocabulary:
        problems.append(
            Problem(
                "model.config.vocab_size",
                f"{vocabulary} is less than the tokenizer's {tokenizer.vocabulary}",
                "leave it out: the tokenizer's size is taken",
            )
        )
    for key in _SAME_AS_VOCABULARY & known & keys.keys():
        if keys[key] > vocabulary:
            what = f"{keys[key]} is more than the vocabulary's {vocabulary}"
            problems.append(Problem(f"model.config.{key}", what, "leave it out"))
    if problems:
        raise InputError(problems)
    ids = _special_ids(tokenizer, CONFIG_MAPPING[model_type], known)
    arguments = {**ids, **keys, "vocab_size": vocabulary}
    for key in _SAME_AS_VOCABULARY & known:
        arguments.setdefault(key, vocabulary)
    try:
        config = CONFIG_MAPPING[model_type](**arguments)
    except Exception as error:  # each configuration checks in its own way
        what = f"{model_type} refuses it: {in_words(error)}"
        raise InputError.at("model.config", what, "check its values") from None
    check_direction(config, auto_class, "model.config.model_type")
    return config


def decoder_start_id(model_type: str, tokenizer: Tokenizer) -> int:
    """What the decoder of an encoder-decoder from scratch starts with: the token in the role that its architecture
    takes for it by default, most often padding (T5), or the end token (BART).
    """
    plain = CONFIG_MAPPING[model_type]()
    start = getattr(plain, "decoder_start_token_id", None)
    if start is not None and start == plain.eos_token_id and start != plain.pad_token_id:
        return tokenizer.end_id
    return tokenizer.pad_id


def _special_ids(tokenizer: Tokenizer, kind: type[PreTrainedConfig], known: set[str]) -> dict[str, int | None]:
    """The ids of special tokens. The end token replaces one that the configuration needs and the tokenizer lacks."""
    ids: dict[str, int | None] = {"eos_token_id": tokenizer.end_id}
    ids |= {name: getattr(tokenizer.hf, name) for name in ("bos_token_id", "pad_token_id")}
    ids |= {name: getattr(tokenizer.hf, name) for name in ("cls_token_id", "sep_token_id") if name in known}
    fields = getattr(kind, "__dataclass_fields__", {})
    needed = {name for name in ids if name in fields and fields[name].type is int}
    return ids | {name: tokenizer.end_id for name in needed if ids[name] is None}
