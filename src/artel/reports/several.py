"""Several runs, read together: what is wrong with any of them is said at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from artel.errors import InputError, Problem
from artel.reports.run_data import RunData, RunReader


class RunsReader:
    """Reads the folders of some runs, again and again."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Raises InputError, with every folder that is none of a run, and for one that is named twice."""
        self._readers: list[RunReader] = []
        problems: list[Problem] = []
        for folder in dict.fromkeys(folders):
            try:
                self._readers.append(RunReader(folder))
            except InputError as error:
                problems += error.problems
        if problems:
            raise InputError(problems)

    def read(self) -> list[RunData]:
        """Raises InputError, with all that is wrong in all folders."""
        runs: list[RunData] = []
        problems: list[Problem] = []
        for reader in self._readers:
            try:
                runs.append(reader.read())
            except InputError as error:
                problems += error.problems
        if problems:
            raise InputError(problems)
        return runs


def read_runs(folders: Sequence[str]) -> list[RunData]:
    """What the folders of some runs tell. Raises InputError, with all that is wrong in all of them."""
    return RunsReader(folders).read()


def compared(runs: Sequence[RunData]) -> tuple[list[dict[str, Any]], list[str]]:
    """Of each run its state, step, training loss and newest validation: as data, and as a table of texts."""
    metrics = dict.fromkeys(name for run in runs for name in run.curves.newest_validation)
    rows: list[dict[str, Any]] = [
        {
            "run": str(run.folder),
            "objective": run.objective,
            "state": run.status.state,
            "steps": run.status.step,
            "loss": run.curves.newest.get("loss"),
            "tokens_per_second": run.tokens_per_second,
            "validation": run.curves.newest_validation,
        }
        for run in runs
    ]
    titles = ["run", "objective", "state", "step", "training loss", "tokens/s", *map(_title, metrics)]
    lines = [titles]
    for row in rows:
        figures = [_figure(row["validation"].get(name)) if name in row["validation"] else "" for name in metrics]
        speed = row["tokens_per_second"]
        about = [row["run"], row["objective"], row["state"], f"{row['steps']:,}", _figure(row["loss"])]
        lines.append([*about, "" if speed is None else f"{speed:,.0f}", *figures])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(cell.ljust(width) if at < 3 else cell.rjust(width)
                       for at, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
             for line in lines]  # fmt: skip
    return rows, texts


def _title(name: str) -> str:
    """Of a figure of a validation, as the table of a training names it."""
    return "validation loss" if name == "loss" else name.replace("_", " ")


def _figure(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
