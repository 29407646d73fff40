"""The JSON of seven keys of a masked-LM script for CPUs, as a run."""

from __future__ import annotations

import difflib
import json
from typing import Any

from artel.config.converters.keys import Converted, Reader, a_text, above_zero, at_least_one
from artel.config.converters.tool import Tool
from artel.errors import InputError, Problem


def refuse_other_json(tree: dict[str, Any], place: str) -> None:
    """Raises InputError for the configuration of a transformers model or of DeepSpeed."""
    if "data" not in tree and tree.keys() & {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}:
        fix = f"give a run file, and name this one there: parallel: {{deepspeed: {place}}}"
        raise InputError.at(place, "is a file of DeepSpeed's, not a run", fix)
    is_model = "model_type" in tree or "architectures" in tree or {"hidden_size", "vocab_size"} <= tree.keys()
    if is_model and "data" not in tree and "inputs_path" not in tree:
        fix = "give a run file, and name the model's folder there: model: {from: FOLDER}"
        raise InputError.at(place, "is a model's config.json, not a run", fix)


def is_masked_lm_json(tree: dict[str, Any]) -> bool:
    """True for the masked-LM script's JSON, also with a wrong or a missing key."""
    return "data" not in tree and len(tree.keys() & KEYS.keys()) >= 2


def convert_masked_lm_json(text: str, place: str) -> Converted:
    """The run that the JSON describes. Raises InputError with all its problems."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise InputError.at(place, f"is not valid JSON: {error}", "check its commas and quotes") from None
    refuse_other_json(tree, place)
    if not is_masked_lm_json(tree):
        fix = f"its keys are: {', '.join(KEYS)}; a run file needs no conversion"
        raise InputError.at(place, "is not the JSON of the masked-LM script", fix)
    return Converted(from_masked_lm_json(tree, place), [], [], {}, {key: _DECIDES[key] for key in tree})


def from_masked_lm_json(tree: dict[str, Any], place: str) -> dict[str, Any]:
    """The run that the JSON describes. Raises InputError with all its problems."""
    unknown = [key for key in tree if key not in KEYS]
    problems = [Problem(f"{place}: {key}", "there is no such key", _key_advice(str(key))) for key in unknown]
    values: dict[str, Any] = {"world_size": 1}
    for key, read in KEYS.items():
        if key not in tree:
            if key not in values:
                problems.append(Problem(f"{place}: {key}", "is missing", f'write "{key}": {_EXAMPLES[key]}'))
            continue
        try:
            values[key] = read(tree[key])
        except ValueError as error:
            what, _, fix = str(error).partition("; ")
            problems.append(Problem(f"{place}: {key}", what, fix or f"write it like {_EXAMPLES[key]}"))
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


def _key_advice(key: str) -> str:
    near = difflib.get_close_matches(key, KEYS, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"its keys are: {', '.join(KEYS)}; artel config convert makes a run file of it, which has more"


KEYS: dict[str, Reader] = {
    "inputs_path": a_text,
    "outputs_path": a_text,
    "model_path": a_text,
    "epochs": above_zero,
    "batch_size": at_least_one,
    "learning_rate": above_zero,
    "world_size": at_least_one,
}
_EXAMPLES = {
    "inputs_path": '"pairs.csv"',
    "outputs_path": '"pairs.csv"',
    "model_path": '"FOLDER"',
    "epochs": "3",
    "batch_size": "32",
    "learning_rate": "5e-5",
    "world_size": "2",
}
_DECIDES = {
    "inputs_path": ["data.sources"],
    "outputs_path": ["data.sources"],
    "model_path": ["model.from"],
    "epochs": ["train.epochs"],
    "batch_size": ["train.batch"],
    "learning_rate": ["train.learning_rate"],
    "world_size": ["parallel.data", "train.batch"],
}
MASKED_LM_JSON = Tool("the masked-LM script", lambda text: text.lstrip().startswith("{"), convert_masked_lm_json)
