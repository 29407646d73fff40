"""The JSON of seven keys of a masked-LM script for CPUs, as a run."""

from __future__ import annotations

import difflib
from typing import Any

from artel.config.converters.keys import Reader, a_text, above_zero, at_least_one
from artel.errors import InputError, Problem


def is_masked_lm_json(tree: dict[str, Any]) -> bool:
    """True for the masked-LM script's JSON, also with a wrong or a missing key."""
    return "data" not in tree and len(tree.keys() & KEYS.keys()) >= 2


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
