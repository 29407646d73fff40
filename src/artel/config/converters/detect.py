"""Detect configurations of other tools."""

from __future__ import annotations

import re
from typing import Any

from artel.errors import InputError


def is_impruver(text: str) -> bool:
    """True for impruver's YAML, also a broken one; `model` and `tokenizer` are keys of run files too."""
    keys = set(re.findall(r"^[\"']?(\w+)[\"']?\s*:", text, re.MULTILINE))
    own = {"output_dir", "train_path", "val_path", "datasets", "lora", "trainer", "ddp"}
    return "data" not in keys and len(keys & own) >= 2


def refuse_other_json(tree: dict[str, Any], place: str) -> None:
    """Raises InputError for the configuration of a transformers model or of DeepSpeed."""
    if "data" not in tree and tree.keys() & {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}:
        fix = f"give a run file, and name this one there: parallel: {{deepspeed: {place}}}"
        raise InputError.at(place, "is a file of DeepSpeed's, not a run", fix)
    is_model = "model_type" in tree or "architectures" in tree or {"hidden_size", "vocab_size"} <= tree.keys()
    if is_model and "data" not in tree and "inputs_path" not in tree:
        fix = "give a run file, and name the model's folder there: model: {from: FOLDER}"
        raise InputError.at(place, "is a model's config.json, not a run", fix)
