"""Rows of a pretrained head that are kept by the names of their labels.

A head has one row for each label. Further training may list the labels in another order, or have others: a row follows
the name of its label, and only rows of new labels are initialized. The names are `id2label` of the two configurations.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from artel.models.loading.materialize import fill_rows
from artel.models.loading.model_folder import read_config
from artel.models.loading.request import ModelRequest
from artel.models.loading.safetensors_files import find_files
from artel.models.loading.structure import without_weights
from artel.printable import listed

_NO_NAME = re.compile(r"LABEL_([0-9]+)")
"""The name that transformers gives a label without one."""
_LISTED = 12


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of a pretrained head that are kept, if its labels differ from those of the run or in order."""

    tensors: frozenset[str]
    """Parameters with one row for each label, by their names in the model and in its files."""
    kept: Mapping[int, int]
    """For each row that is kept: its number in the model, and in the files."""
    note: str

    def copy_into(self, model: PreTrainedModel, name: str) -> None:
        """Copy the rows that are kept from the files of the folder or hub id `name` into a model in memory."""
        parameters = dict(model.named_parameters())
        with find_files(name, model.config) as files, torch.no_grad():
            for tensor in self.tensors:
                fill_rows(parameters[tensor], files.read(tensor), self.kept)


def find_head_rows(request: ModelRequest, config: PreTrainedConfig) -> HeadRows | None:
    """Return the rows of a pretrained head that have to move, or None if the head is loaded unchanged.

    `config` is the configuration with the labels of the run. No weights are read.
    """
    if "id2label" not in request.head_config:
        return None
    name, runs_code = str(request.config.from_), request.config.runs_code
    saved, _ = read_config(name, runs_code=runs_code)
    old, new = _labels(saved), _labels(config)
    if old == new or len(old) == len(new) == 1:  # one row has no order: a score, a number
        return None
    with find_files(name, saved) as files:
        tensors = frozenset(_tensors_of_labels(request, config) & set(files.names))
    if not tensors:
        return None
    kept = _kept_rows(old, new)
    return HeadRows(tensors, kept, _in_words(name, old, new, kept))


def _labels(config: PreTrainedConfig) -> list[str]:
    return [str(config.id2label[number]) for number in sorted(config.id2label)]


def _tensors_of_labels(request: ModelRequest, config: PreTrainedConfig) -> set[str]:
    """Names of the parameters that get one more row with one more label."""
    larger = copy.deepcopy(config)
    larger.num_labels = config.num_labels + 1
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for model in (
            without_weights(each, request.auto_class, request.heads, request.config.runs_code)
            for each in (config, larger)
        )
    ]
    few, many = shapes
    return {name for name, shape in few.items() if shape and many[name] == (shape[0] + 1, *shape[1:])}


def _kept_rows(old: Sequence[str], new: Sequence[str]) -> dict[int, int]:
    """For each new row with a label of the saved head: the number of the saved row.

    Upper and lower case differ only where both are in use. LABEL_3 is label 3; where the labels have names and the
    saved ones have none, and there are as many, rows stay in their order.
    """
    if all(_NO_NAME.fullmatch(label) for label in old) and not any(_NO_NAME.fullmatch(label) for label in new):
        old = [label.removeprefix("LABEL_") for label in old]
        if len(old) == len(new) and not set(old) & set(new):
            return {number: number for number in range(len(new))}
    exact = {label: number for number, label in enumerate(old)}
    kept = {number: exact[label] for number, label in enumerate(new) if label in exact}
    folded_old, folded_new = ([label.casefold() for label in labels] for labels in (old, new))
    rows = {label: number for number, label in enumerate(folded_old)}
    counts = Counter(folded_old), Counter(folded_new)
    for number, label in enumerate(folded_new):
        if number not in kept and all(count[label] == 1 for count in counts):
            kept[number] = rows[label]
    return kept


def _in_words(name: str, old: Sequence[str], new: Sequence[str], kept: Mapping[int, int]) -> str:
    """Note for the user: labels whose rows are kept, initialized anew and left out."""
    rows = [new[a] if new[a] == old[b] else f"{new[a]} (there {old[b]})" for a, b in kept.items()]
    anew = [label for number, label in enumerate(new) if number not in kept]
    left_out = [old[number] for number in sorted({*range(len(old))} - {*kept.values()})]
    groups = (("rows kept", rows), ("initialized anew", anew), ("left out", left_out))
    parts = [f"{words}: {listed(labels, _LISTED)}" for words, labels in groups if labels]
    said = f"head of {name}, by label: {'; '.join(parts)}"
    if rows and not anew and all(_NO_NAME.fullmatch(label) for label in old) and not any(map(str.isdigit, new)):
        said += ". Its labels have no names there: if this is not their order, write the labels in it"
    return said
