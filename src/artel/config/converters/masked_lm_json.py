"""The JSON of a masked-LM script for CPUs: seven keys, as a run."""

from __future__ import annotations

import difflib
import json
from typing import Any

from artel.config.converters import readers as read
from artel.config.converters.conversion import Converted
from artel.config.converters.tools import Tool
from artel.errors import InputError, Problem

# Key → reader, an example, the keys of the run file that it decides.
_KEYS: dict[str, tuple[read.Reader, str, list[str]]] = {
    "inputs_path": (read.text, '"pairs.csv"', ["data.sources"]),
    "outputs_path": (read.text, '"pairs.csv"', ["data.sources"]),
    "model_path": (read.text, '"FOLDER"', ["model.from"]),
    "epochs": (read.above_zero, "3", ["train.epochs"]),
    "batch_size": (read.at_least_one, "32", ["train.batch"]),
    "learning_rate": (read.above_zero, "5e-5", ["train.learning_rate"]),
    "world_size": (read.at_least_one, "2", ["parallel.data", "train.batch"]),
}


def refuse_other_json(tree: dict[str, Any], place: str) -> None:
    """Raise InputError for the configuration of a transformers model or of DeepSpeed."""
    if "data" not in tree and tree.keys() & {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}:
        fix = f"give a run file that names this one: parallel: {{deepspeed: {place}}}"
        raise InputError.at(place, "is a DeepSpeed configuration, not a run", fix)
    is_model = "model_type" in tree or "architectures" in tree or {"hidden_size", "vocab_size"} <= tree.keys()
    if is_model and "data" not in tree and "inputs_path" not in tree:
        fix = "give a run file that names the model's folder: model: {from: FOLDER}"
        raise InputError.at(place, "is a model's config.json, not a run", fix)


def is_masked_lm_json(tree: dict[str, Any]) -> bool:
    """True for the masked-LM script's JSON, also with a wrong or a missing key."""
    return "data" not in tree and len(tree.keys() & _KEYS.keys()) >= 2


def convert_masked_lm_json(text: str, place: str) -> Converted:
    """Convert the JSON. Raises InputError with all its problems."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise InputError.at(place, f"is not valid JSON: {error}", "check its commas and quotes") from None
    refuse_other_json(tree, place)
    if not is_masked_lm_json(tree):
        fix = f"its keys are: {', '.join(_KEYS)}; a run file needs no conversion"
        raise InputError.at(place, "is not the JSON of the masked-LM script", fix)
    return Converted(from_masked_lm_json(tree, place), [], [], {}, {key: _KEYS[key][2] for key in tree})


def from_masked_lm_json(tree: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the run that the JSON describes. Raises InputError with all its problems."""
    problems = []
    for key in tree.keys() - _KEYS.keys():
        near = difflib.get_close_matches(str(key), _KEYS, 1)
        more = f"its keys are: {', '.join(_KEYS)}; for more keys convert it to a run file: artel config convert"
        problems.append(
            Problem(f"{place}: {key}", "there is no such key", f"did you mean {near[0]}?" if near else more)
        )
    values: dict[str, Any] = {"world_size": 1}
    for key, (reader, example, _) in _KEYS.items():
        try:
            if key in tree:
                values[key] = reader(tree[key])
            elif key not in values:
                problems.append(Problem(f"{place}: {key}", "is missing", f'write "{key}": {example}'))
        except ValueError as error:
            what, _, fix = str(error).partition("; ")
            problems.append(Problem(f"{place}: {key}", what, fix or f"write, for example, {example}"))
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
            "batch": values["batch_size"] * values["world_size"],  # the script gave batch_size to each process
            "learning_rate": values["learning_rate"],
        },
        "parallel": {"data": values["world_size"]},
    }


MASKED_LM_JSON = Tool("the masked-LM script", lambda text: text.lstrip().startswith("{"), convert_masked_lm_json)
