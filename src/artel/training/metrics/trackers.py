"""All trackers of a run, and artel's own: terminal, notebook, metrics.jsonl. A failing tracker never stops a run."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from artel.config import RunConfig
from artel.elapsed import pause_elapsed, resume_elapsed
from artel.errors import InputError, missing_extra
from artel.notebooks import in_notebook
from artel.plugins import describe_exception
from artel.printable import escape_line
from artel.registry import OBJECTIVES, TRACKERS
from artel.secrets import hide_secrets
from artel.training.metrics.jsonl import JsonLinesFile, drop_lines_after
from artel.training.metrics.tracker import Metrics as Metrics
from artel.training.metrics.tracker import Tracker as Tracker
from artel.training.metrics.tracker import tasks_text, validation_row
from artel.training.run_folder import RunFolder

_BAR_SECONDS = 0.1  # redraw the bar ten times a second: an update takes 50 µs, longer than some steps
_LINE_SECONDS = 10.0
_BUDGET_BAR_LENGTH = 1000  # total of the progress bar with a budget


def check_trackers(track: list[str]) -> None:
    """Raise InputError for each tracker whose package is not installed."""
    packages = {name: TRACKERS[name].package for name in track}
    missing = {name: package for name, package in packages.items() if package and find_spec(package) is None}
    problems = [missing_extra(package, package, f"track: {name}").problems for name, package in missing.items()]
    if problems:
        raise InputError(chain.from_iterable(problems))


class Trackers:
    """All trackers of a run. A tracker that raises an error is dropped."""

    def __init__(self, config: RunConfig, folder: RunFolder, *, step: int, steps: int | None) -> None:
        self._active: dict[str, Tracker] = {}
        self._closed = False
        pause_elapsed()  # from now on a bar or lines of metrics show the progress
        self.doing = ""
        """Work of the run between two steps: the last argument of `show_progress`."""
        for name in config.track:
            try:
                self._active[name] = TRACKERS[name].for_this_process()(config, folder, step, steps)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # other packages raise all types
                _warn(name, error)

    @property
    def hints(self) -> list[str]:
        return [hint for tracker in self._active.values() if (hint := tracker.hint())]

    def log_training(self, metrics: Metrics) -> None:
        self._call_all("log_training", metrics)

    def log_validation(self, metrics: Metrics) -> None:
        self._call_all("log_validation", metrics)

    def log_tasks(self, metrics: Metrics) -> None:
        self._call_all("log_tasks", metrics)

    def log_samples(self, lines: list[Metrics]) -> None:
        self._call_all("log_samples", lines)

    def on_step(self, step: int) -> None:
        self._call_all("on_step", step)

    def show_progress(self, activity: str, fraction: float | None = None) -> None:
        self.doing = activity
        self._call_all("show_progress", activity, fraction)

    def on_finish(self, make_report: Callable[[], str | None]) -> None:
        """Record that the run is done. `make_report` returns its HTML page or None, and is called only if needed."""
        with TemporaryDirectory() as folder:
            report = None
            if any(tracker.wants_report for tracker in self._active.values()):
                self.show_progress("making the report")
                report = _write_report(make_report, Path(folder) / "report.html")
            self._call_all("on_finish", report)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._call_all("close")
            resume_elapsed()

    def _call_all(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self._active.items()):
            try:
                getattr(tracker, method)(*arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                del self._active[name]
                _warn(name, error)


def _write_report(make: Callable[[], str | None], file: Path) -> Path | None:
    try:
        html = make()
    except Exception as error:  # only trackers need the report, and the run is done
        print(escape_line(f"trackers get no report of the run: {error}"), file=sys.stderr)
        return None
    if html is None:
        return None
    file.write_text(html, encoding="utf-8")
    return file


def _warn(name: str, error: BaseException) -> None:
    reason = hide_secrets(describe_exception(error))
    print(escape_line(f"tracker {name} failed and is disabled from now on: {reason}"), file=sys.stderr)


class JsonLinesTracker(Tracker):
    """metrics.jsonl: a line per logged step, validation or tasks. Resuming drops lines after the checkpoint."""

    def __init__(self, config: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        drop_lines_after(folder.metrics, step)
        self._lines = JsonLinesFile(folder.metrics)
        self._hint = f"artel report {shlex.quote(str(folder.path))}"

    def log_training(self, metrics: Metrics) -> None:
        self._lines.add(metrics)

    log_validation = log_tasks = log_training

    def hint(self) -> str:
        return self._hint

    def close(self) -> None:
        self._lines.close()


class ConsoleTracker(Tracker):
    """On standard error: a validation table, and a progress bar on a terminal, otherwise a line every ten seconds."""

    @classmethod
    def for_this_process(cls) -> type[Tracker]:
        return NotebookTracker if in_notebook() else cls

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        step: int,
        steps: int | None,
        stream: TextIO | None = None,
        *,
        bar_seconds: float = _BAR_SECONDS,
        line_seconds: float = _LINE_SECONDS,
    ) -> None:
        self._bar_seconds, self._line_seconds = bar_seconds, line_seconds
        self._console = Console(file=stream or sys.stderr, soft_wrap=True, highlight=False)
        self._has_header = False
        self._loss: float | None = None
        self._main_metric: str = OBJECTIVES[config.objective].main_metric
        self._step, self._steps, self._budget = step, steps, config.train.budget
        self._used_fraction = 0.0
        """Used fraction of the budget, if there is one."""
        self._last_update = time.monotonic()
        self._first_step: tuple[int, float] | None = None
        """First step of this start, which compiles and warms up, and the time when it ended."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn() if self._budget is None else TaskProgressColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        bar_length = steps if self._budget is None else _BUDGET_BAR_LENGTH
        self._task = self._bar.add_task("training", total=bar_length, completed=self._completed(step), metrics="")
        self._bar.start()

    def on_step(self, step: int) -> None:
        self._step = step
        self._first_step = self._first_step or (step, time.monotonic())
        if not self._bar.disable and (self._is_due(self._bar_seconds) or step == self._steps):
            self._bar.update(self._task, description="training", completed=self._completed(step))

    def show_progress(self, activity: str, fraction: float | None = None) -> None:
        text = activity if fraction is None else f"{activity} {fraction:.0%}"
        if not self._bar.disable:
            self._bar.update(self._task, description=text, completed=self._completed(self._step))
        elif self._is_due(self._line_seconds):
            self._console.print(f"{self._position(self._step)} · {text}")

    def log_training(self, metrics: Metrics) -> None:
        self._loss, self._used_fraction = metrics["loss"], metrics.get("budget_used", 0.0)
        text = f"{_headline(metrics, self._main_metric)} · {metrics['tokens_per_second']:,.0f} tokens/s"
        if not self._bar.disable:
            self._bar.update(self._task, completed=self._completed(metrics["step"]), metrics=text)
        elif self._is_due(self._line_seconds) or metrics["step"] == self._steps:
            self._console.print(f"{self._position(metrics['step'])} · {text}{self._time_left(metrics['step'])}")

    def _position(self, step: int) -> str:
        if self._steps is not None:
            return f"step {step:,} of {self._steps:,}"
        return f"step {step:,}, {self._used_fraction:.0%} of the time"

    def _completed(self, step: int) -> int:
        """Return the bar's position: steps, or the fraction of the budget used at the newest logged step."""
        return step if self._budget is None else round(_BUDGET_BAR_LENGTH * self._used_fraction)

    def _time_left(self, step: int) -> str:
        """Return the time left: of the budget, or at the pace since the first step, including validations."""
        if self._budget is not None:
            return f" · {timedelta(seconds=max(0, round((1 - self._used_fraction) * self._budget)))} left"
        first_step, first_step_end = self._first_step or (step, 0.0)
        if self._steps is None or step <= first_step or step >= self._steps:
            return ""
        seconds = (time.monotonic() - first_step_end) / (step - first_step) * (self._steps - step)
        return f" · {timedelta(seconds=round(seconds))} left"

    def _is_due(self, seconds: float) -> bool:
        """True if nothing was shown for `seconds`. If so, restart the interval."""
        now = time.monotonic()
        is_due = now - self._last_update >= seconds
        if is_due:
            self._last_update = now
        return is_due

    def log_validation(self, metrics: Metrics) -> None:
        """Print a row of the table: step, training loss and the objective's metrics."""
        row = validation_row(metrics, self._loss)
        if not self._has_header:
            self._console.print("  ".join(f"{title:>8}" for title in row))
            self._has_header = True
        self._console.print("  ".join(f"{value:>{max(8, len(title))}}" for title, value in row.items()))

    def log_tasks(self, metrics: Metrics) -> None:
        self._console.print(f"{self._position(metrics['step'])} · {tasks_text(metrics)}")

    def on_finish(self, report: Path | None) -> None:
        """Fill the bar: a run may stop early, and the used budget is known only at logged steps."""
        bar_length = self._step if self._budget is None else _BUDGET_BAR_LENGTH
        self._bar.update(self._task, description="training", total=bar_length, completed=bar_length)

    def close(self) -> None:
        self._bar.stop()


def _headline(metrics: Metrics, main_metric: str) -> str:
    """Return the objective's main metric if training logs it, else the loss."""
    name = main_metric if main_metric in metrics else "loss"
    return f"{name} {metrics[name]:.4f}"


class NotebookTracker(Tracker):
    """Below the cell of a notebook: the progress bar and validation table of transformers' Trainer."""

    def __init__(self, config: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        from transformers.utils.notebook import NotebookTrainingTracker

        self._loss: float | None = None
        self._main_metric: str = OBJECTIVES[config.objective].main_metric
        self._used_fraction = 0.0
        self._step, self._steps = step, steps
        self._bar = NotebookTrainingTracker(_BUDGET_BAR_LENGTH if steps is None else steps)
        self._bar.update(self._completed(), comment="begins")

    def on_step(self, step: int) -> None:
        self._step = step
        self._bar.update(self._completed())

    def show_progress(self, activity: str, fraction: float | None = None) -> None:
        self._bar.update(
            self._completed(), force_update=True, comment=activity if fraction is None else f"{activity} {fraction:.0%}"
        )

    def log_training(self, metrics: Metrics) -> None:
        self._loss, self._used_fraction = metrics["loss"], metrics.get("budget_used", 0.0)
        text = f"{_headline(metrics, self._main_metric)}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(self._completed(), comment=text)

    def log_validation(self, metrics: Metrics) -> None:
        self._bar.write_line(validation_row(metrics, self._loss))

    def log_tasks(self, metrics: Metrics) -> None:
        self._bar.update(self._completed(), force_update=True, comment=tasks_text(metrics))

    def close(self) -> None:
        self._bar.update(self._completed(), force_update=True, comment=f"loss {self._loss:.4f}")

    def _completed(self) -> int:
        return self._step if self._steps is not None else round(_BUDGET_BAR_LENGTH * self._used_fraction)
