"""Convert the JSON of a masked-LM script for CPUs. It has seven keys."""

from __future__ import annotations

import difflib
import json
from typing import Any

from artel.config.converters import readers as read
from artel.config.converters.conversion import ConvertedConfig
from artel.config.converters.tools import Tool
from artel.errors import InputError, Problem

# Key → (reader, example, keys of the run file that depend on it).
_KEYS: dict[str, tuple[read.Reader, str, list[str]]] = {
    "inputs_path": (read.text, '"pairs.csv"', ["data.sources"]),
    "outputs_path": (read.text, '"pairs.csv"', ["data.sources"]),
    "model_path": (read.text, '"FOLDER"', ["model.from"]),
    "epochs": (read.positive_number, "3", ["train.epochs"]),
    "batch_size": (read.positive_int, "32", ["train.batch"]),
    "learning_rate": (read.positive_number, "5e-5", ["train.learning_rate"]),
    "world_size": (read.positive_int, "2", ["parallel.data", "train.batch"]),
}


def check_other_json(tree: dict[str, Any], location: str) -> None:
    """Raise InputError if the JSON is the configuration of a transformers model or of DeepSpeed."""
    if "data" not in tree and tree.keys() & {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}:
        fix = f"use a run file with parallel: {{deepspeed: {location}}}"
        raise InputError.at(location, "is a DeepSpeed configuration, not a run", fix)
    is_model = "model_type" in tree or "architectures" in tree or {"hidden_size", "vocab_size"} <= tree.keys()
    if is_model and "data" not in tree and "inputs_path" not in tree:
        fix = "use a run file with the model's folder: model: {from: FOLDER}"
        raise InputError.at(location, "is a model's config.json, not a run", fix)


def is_masked_lm_json(tree: dict[str, Any]) -> bool:
    """True for the masked-LM script's JSON, even if it has invalid or missing keys."""
    return "data" not in tree and len(tree.keys() & _KEYS.keys()) >= 2


def convert_masked_lm_json(text: str, location: str) -> ConvertedConfig:
    """Convert the JSON. Raise InputError with all problems."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise InputError.at(location, f"is not valid JSON: {error}", "check its commas and quotes") from None
    check_other_json(tree, location)
    if not is_masked_lm_json(tree):
        fix = f"its keys are: {', '.join(_KEYS)}; a run file needs no conversion"
        raise InputError.at(location, "is not the JSON of the masked-LM script", fix)
    return ConvertedConfig(from_masked_lm_json(tree, location), [], [], {}, {key: _KEYS[key][2] for key in tree})


def from_masked_lm_json(tree: dict[str, Any], location: str) -> dict[str, Any]:
    """Return the run that the JSON describes. Raise InputError with all problems."""
    problems = []
    for key in tree.keys() - _KEYS.keys():
        near = difflib.get_close_matches(str(key), _KEYS, 1)
        keys_fix = f"its keys are: {', '.join(_KEYS)}; for other keys convert it to a run file: artel config convert"
        fix = f"did you mean {near[0]}?" if near else keys_fix
        problems.append(Problem(f"{location}: {key}", "there is no such key", fix))
    values: dict[str, Any] = {"world_size": 1}
    for key, (reader, example, _) in _KEYS.items():
        try:
            if key in tree:
                values[key] = reader(tree[key])
            elif key not in values:
                problems.append(Problem(f"{location}: {key}", "is missing", f'write "{key}": {example}'))
        except ValueError as error:
            what, _, fix = str(error).partition("; ")
            problems.append(Problem(f"{location}: {key}", what, fix or f"write, for example, {example}"))
    if problems:
        raise InputError(problems)
    source = {"path": values["inputs_path"], "format": "pairs"}
    if values["outputs_path"] != values["inputs_path"]:
        source["outputs"] = values["outputs_path"]
    return {
        "objective": "masked",
        "data": {"sources": [source], "block": 512},  # RoBERTa has 512 positions
        "model": {"from": values["model_path"]},
        "train": {
            "epochs": values["epochs"],
            "batch": values["batch_size"] * values["world_size"],  # in the script, batch_size is per process
            "learning_rate": values["learning_rate"],
        },
        "parallel": {"data": values["world_size"]},
    }


MASKED_LM_JSON = Tool("the masked-LM script", lambda text: text.lstrip().startswith("{"), convert_masked_lm_json)
