"""Reads the head of a pretrained model before loading it: its labels, or whether it returns a score."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from artel.config import RunConfig
from artel.tokens import Tokenizer


def base_labels(config: RunConfig, auto_class: str) -> list[str]:
    """Return the labels of the pretrained model's head in the order of its rows; [] without such a head or names.

    Reads only config.json, from a folder or the hub's cache, without PyTorch or the network. A damaged file is reported
    when the model is loaded.
    """
    file = _find_config_file(config.model.from_)
    if file is None:
        return []
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        names = {int(label_id): str(label) for label_id, label in values["id2label"].items()}
        (saved_by,) = values["architectures"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return []
    has_head = str(saved_by).endswith(auto_class.removeprefix("AutoModel"))
    has_names = not all(re.fullmatch(r"LABEL_\d+", label) for label in names.values())
    return [names[label_id] for label_id in sorted(names)] if has_head and has_names else []


def order_like(labels: Sequence[str], base: Sequence[str]) -> list[str]:
    """Sort `labels` like `base`; labels that `base` does not have come last. Ignores case."""
    order = {label.casefold(): index for index, label in reversed(list(enumerate(base)))}
    return sorted(labels, key=lambda label: order.get(label.casefold(), len(base)))


def _find_config_file(name: str | None) -> Path | None:
    if name is None:
        return None
    file = Path(name, "config.json")
    if file.is_file():
        return file
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def has_score_head(architecture: str, folder: str) -> bool:
    """True if a model returns one number per text: a reward model, a reranker, or a regression model."""
    from artel.models.loading.model_folder import read_config

    return architecture.endswith("ForSequenceClassification") and read_config(folder)[0].num_labels == 1


def has_chat_template(folder: str) -> bool:
    """True if the tokenizer has a chat template, like those of reward models."""
    from artel.tokens import load_tokenizer

    return bool(load_tokenizer(folder).hf.chat_template)


def score_config(name: str, problem_type: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the values of the transformers configuration for a head with one output."""
    return {
        "num_labels": 1,
        "id2label": {0: name},
        "label2id": {name: 0},
        "problem_type": problem_type,
        "pad_token_id": tokenizer.pad_id,  # a decoder's score is taken at the last token that is not padding
    }


def has_problem_type(folder: str) -> bool:
    """True if the configuration has a `problem_type`; rerankers have none."""
    from artel.models.loading.model_folder import read_config

    return getattr(read_config(folder)[0], "problem_type", None) is not None
