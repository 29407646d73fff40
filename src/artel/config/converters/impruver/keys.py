"""The keys of impruver's YAML, flat, with the place of each."""

from __future__ import annotations

from typing import Any

from artel.config.converters.keys import OldKeys, shown
from artel.config.converters.training_arguments import TRAINER_DEFAULTS
from artel.config.yaml_lines import Key, parse
from artel.errors import Problem

SECTIONS = ("model", "lora", "tokenizer", "trainer", "ddp")
_DEFAULTS = {
    **{f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()},
    # defaults of peft's LoraConfig
    "lora.r": 8,
    "lora.lora_alpha": 8,
    "lora.lora_dropout": 0,
    "lora.bias": "none",
    "lora.task_type": "CAUSAL_LM",
}


class Impruver(OldKeys):
    """impruver's configuration while it is turned into a run file; `datasets.0.name`, `model.config.n_layer`."""

    def __init__(self, text: str, place: str) -> None:
        super().__init__(place, _DEFAULTS, {})
        tree, self._places = parse(text, place)
        self.datasets = 0
        """How many data sets there are."""
        for name, value in tree.items():
            if name in SECTIONS:
                self._give_section((name,), value)
            elif name == "datasets":
                self._give_datasets(value)
            else:
                self._give_key((name,), value)

    def where(self, *key: str | int) -> str:
        """`file:line: key` of a key or section in the file."""
        return f"{self._places[key]}: {'.'.join(map(str, key))}"

    def _give_section(self, key: Key, section: Any) -> None:
        if section is None:
            return
        if not isinstance(section, dict):
            self.problems.append(
                Problem(self.where(*key), f"{section!r} is not a section", f"write {key[-1]}: with keys below it")
            )
            return
        for name, value in section.items():
            if key == ("model",) and name == "config":
                self._give_section((*key, name), value)
            else:
                self._give_key((*key, name), value)

    def _give_datasets(self, datasets: Any) -> None:
        if datasets is None:
            return
        if not isinstance(datasets, list):
            what = f"{datasets!r} is not a list of data sets"
            self.problems.append(Problem(self.where("datasets"), what, "write - name: FILE below it"))
            return
        self.datasets = len(datasets)
        for number, dataset in enumerate(datasets):
            if dataset and isinstance(dataset, dict):
                self._give_section(("datasets", number), dataset)
            else:
                what = f"{dataset!r} is no data set"
                self.problems.append(Problem(self.where("datasets", number), what, "write - name: FILE, or OWNER/NAME"))

    def _give_key(self, key: Key, value: Any) -> None:
        where = self._places.get(key, self.place)  # a key that is a number or a date has its place under its text
        self.give(".".join(map(str, key)), value, shown(value), where)
