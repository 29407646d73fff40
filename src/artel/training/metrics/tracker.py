"""The tracker interface, and helpers for trackers of other packages."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import orjson

from artel.config import RunConfig
from artel.errors import InputError
from artel.storage import write_file
from artel.training.run_folder import RunFolder

Metrics = dict[str, Any]


class Tracker:
    """Receives the metrics of logged steps and validations. A custom tracker overrides these methods."""

    package: ClassVar[str] = ""
    """Module that the tracker needs. The extra with the same name installs it."""
    wants_report: ClassVar[bool] = False
    """True if `on_finish` gets the run's report."""

    @classmethod
    def for_this_process(cls) -> type[Tracker]:
        """Return the class to use in this process."""
        return cls

    def __init__(self, config: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        """`step`: steps done so far. `steps`: length of the run; None if `train.budget` ends it."""

    def log_training(self, metrics: Metrics) -> None:
        """Record the metrics of a logged step."""

    def log_validation(self, metrics: Metrics) -> None:
        """Record the metrics of a validation."""

    def log_tasks(self, metrics: Metrics) -> None:
        """Record the metrics of `validate.tasks` after a step."""

    def log_samples(self, lines: list[Metrics]) -> None:
        """Record the model's continuations of `validate.prompts` after a step: lines of samples.jsonl."""

    def on_finish(self, report: Path | None) -> None:
        """Record that the run is done and its model written. Not called for a run that was stopped or failed.

        `report`: its HTML page, a temporary file that is removed after this call.
        """

    def on_step(self, step: int) -> None:
        """Record that a step is done. Called after every step, so it must be cheap."""

    def show_progress(self, activity: str, fraction: float | None = None) -> None:
        """Show work between steps (evaluating, compiling), and the fraction done, from 0 to 1."""

    def hint(self) -> str:
        """Return a command that shows the results, printed when the run is done, or an empty string."""
        return ""

    def close(self) -> None: ...


def add_prefix(group: str, metrics: Metrics) -> Metrics:
    """Return the numbers among `metrics`, with the names used by all trackers: `train/loss`, `validation/loss`."""
    scalars = {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "step"}
    return {f"{group}/{name}": value for name, value in scalars.items()}


def validation_row(metrics: Metrics, training_loss: float | None) -> dict[str, str]:
    """Return a row of the validation table by column title: step, epoch, training loss, the objective's metrics.

    The training loss is a dash before it is first logged.
    """
    validation = metrics["validation"]
    titles = ["validation loss" if name == "loss" else name.replace("_", " ") for name in validation]
    loss = "-" if training_loss is None else f"{training_loss:.4f}"
    row = {"step": f"{metrics['step']}", "epoch": f"{metrics['epoch']:.2f}", "training loss": loss}
    return row | dict(zip(titles, map(_format_metric, validation.values()), strict=True))


def tasks_text(metrics: Metrics) -> str:
    """Return the metrics of tasks in one line: `counting/acc 0.5000`."""
    return " · ".join(f"{name} {_format_metric(value)}" for name, value in metrics["tasks"].items())


def _format_metric(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"


# Ids of a run in other packages


def saved_id(folder: RunFolder, package: str) -> str | None:
    """Return the id that an earlier start of this run got from a package, or None."""
    return _read_saved_ids(folder).get(package)


def save_id(folder: RunFolder, package: str, run_id: str) -> None:
    ids = _read_saved_ids(folder) | {package: run_id}
    write_file(folder.tracker_runs, orjson.dumps(ids, option=orjson.OPT_INDENT_2))


def _read_saved_ids(folder: RunFolder) -> dict[str, str]:
    file = folder.tracker_runs
    try:
        ids = orjson.loads(file.read_bytes()) if file.exists() else {}
    except ValueError:
        ids = None
    if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
        raise InputError.at(str(file), "is damaged", "remove it: trackers will start new runs")
    return ids


def send_earlier(tracker: Tracker, folder: RunFolder, step: int, has: Callable[[str, int], bool]) -> None:
    """Send the lines of metrics.jsonl and samples.jsonl up to `step`, in order, that the tracker does not have yet.

    `has(kind, step)` is True if the tracker has a line; kind is training, validation, tasks or samples.
    """
    metrics = ((line["step"], 0, line) for line in _read_lines(folder.metrics))
    lines_by_step = groupby(_read_lines(folder.samples), itemgetter("step"))
    samples = ((line_step, 1, list(lines)) for line_step, lines in lines_by_step)
    for line_step, is_samples, content in heapq.merge(metrics, samples, key=itemgetter(0, 1)):
        if line_step > step:
            return
        kinds = [kind for kind in ("validation", "tasks") if kind in content]
        kind = "samples" if is_samples else (*kinds, "training")[0]
        if not has(kind, line_step):
            send: Callable[[Any], None] = getattr(tracker, f"log_{kind}")
            send(content)


def read_samples(folder: RunFolder) -> list[Metrics]:
    return list(_read_lines(folder.samples))


def _read_lines(path: Path) -> Iterator[Metrics]:
    """Yield the complete lines of a file. A kill may have left the last one incomplete."""
    if path.exists():
        with path.open("rb") as file:
            yield from (orjson.loads(line) for line in file if line.endswith(b"\n"))
