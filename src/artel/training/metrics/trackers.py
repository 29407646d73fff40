"""Where figures go: the terminal, metrics.jsonl, trackers of other packages. One that fails never stops a run."""

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
from artel.elapsed import pause, resume
from artel.errors import InputError, missing_extra
from artel.notebooks import in_notebook
from artel.plugins import raised
from artel.printable import in_a_line
from artel.registry import TRACKERS
from artel.secrets import hide_secrets
from artel.training.metrics.jsonl import Lines, drop_lines_after
from artel.training.metrics.notebook import NotebookTracker
from artel.training.metrics.tracker import Figures as Figures
from artel.training.metrics.tracker import Tracker as Tracker
from artel.training.metrics.tracker import tasks_text, validation_row
from artel.training.run_folder import RunFolder

_BAR_SECONDS = 0.1  # the bar is drawn ten times a second; an update takes 50 µs, which many a step does not
_LINE_SECONDS = 10.0
_PARTS = 1000  # of the bar of a run on a budget


def check_trackers(track: list[str]) -> None:
    """Raise InputError for trackers whose packages are not installed."""
    packages = {name: TRACKERS[name].package for name in track}
    missing = {name: package for name, package in packages.items() if package and find_spec(package) is None}
    problems = [missing_extra(package, package, f"track: {name}").problems for name, package in missing.items()]
    if problems:
        raise InputError(chain.from_iterable(problems))


class Trackers:
    """All trackers of a run as one."""

    def __init__(self, run: RunConfig, folder: RunFolder, *, step: int, steps: int | None) -> None:
        self._alive: dict[str, Tracker] = {}
        self._closed = False
        pause()  # a bar, or lines of metrics, show the progress
        self.doing = ""
        """Work of the run between two steps, as last given to `busy`."""
        for name in run.track:
            try:
                self._alive[name] = TRACKERS[name].for_this_process()(run, folder, step, steps)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a tracker is another's program: the run continues without it
                _warn(name, error)

    @property
    def hints(self) -> list[str]:
        return [hint for tracker in self._alive.values() if (hint := tracker.hint())]

    def training(self, figures: Figures) -> None:
        self._each("training", figures)

    def validation(self, figures: Figures) -> None:
        self._each("validation", figures)

    def tasks(self, figures: Figures) -> None:
        self._each("tasks", figures)

    def samples(self, lines: list[Figures]) -> None:
        self._each("samples", lines)

    def step(self, step: int) -> None:
        self._each("step", step)

    def busy(self, what: str, share: float | None = None) -> None:
        self.doing = what
        self._each("busy", what, share)

    def finished(self, make_report: Callable[[], str | None]) -> None:
        """The run is done. `make_report` gives its page, as HTML, or None; it is called where a tracker keeps it."""
        with TemporaryDirectory() as folder:
            report = None
            if any(tracker.keeps_report for tracker in self._alive.values()):
                self.busy("making the report")
                report = _report(make_report, Path(folder) / "report.html")
            self._each("finished", report)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._each("close")
            resume()

    def _each(self, what: str, *arguments: Any) -> None:
        for name, tracker in list(self._alive.items()):
            try:
                getattr(tracker, what)(*arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                del self._alive[name]
                _warn(name, error)


def _report(make: Callable[[], str | None], file: Path) -> Path | None:
    try:
        html = make()
    except Exception as error:  # it is the trackers' page alone: the run is done all the same
        print(in_a_line(f"trackers get no report of the run: {error}"), file=sys.stderr)
        return None
    if html is None:
        return None
    file.write_text(html, encoding="utf-8")
    return file


def _warn(name: str, error: BaseException) -> None:
    reason = hide_secrets(raised(error))
    print(in_a_line(f"tracker {name} failed and is left out from here on: {reason}"), file=sys.stderr)


class JsonLines(Tracker):
    """metrics.jsonl: a line a logged step, a validation or tasks; on resume, lines after the checkpoint are dropped."""

    def __init__(self, run: RunConfig, folder: RunFolder, step: int, steps: int | None) -> None:
        drop_lines_after(folder.metrics, step)
        self._lines = Lines(folder.metrics)
        self._hint = f"artel report {shlex.quote(str(folder.path))}"

    def training(self, figures: Figures) -> None:
        self._lines.add(figures)

    validation = tasks = training

    def hint(self) -> str:
        return self._hint

    def close(self) -> None:
        self._lines.close()


class ConsoleTracker(Tracker):
    """A progress bar on a terminal, else a line now and then; a table of validations anywhere; on standard error."""

    @classmethod
    def for_this_process(cls) -> type[Tracker]:
        return NotebookTracker if in_notebook() else cls

    def __init__(
        self,
        run: RunConfig,
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
        self._header = False
        self._loss: float | None = None
        self._step, self._steps, self._budget = step, steps, run.train.budget
        self._used = 0.0
        """Share of the budget that is over, where there is one."""
        self._shown = time.monotonic()
        self._first: tuple[int, float] | None = None
        """The first step of this start, which compiles and warms up, and when it was done."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn() if self._budget is None else TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        total = steps if self._budget is None else _PARTS
        self._task = self._bar.add_task("training", total=total, completed=self._completed(step), figures="")
        self._bar.start()

    def step(self, step: int) -> None:
        self._step = step
        self._first = self._first or (step, time.monotonic())
        if not self._bar.disable and (self._is_due(self._bar_seconds) or step == self._steps):
            self._bar.update(self._task, description="training", completed=self._completed(step))

    def busy(self, what: str, share: float | None = None) -> None:
        text = what if share is None else f"{what} {share:.0%}"
        if not self._bar.disable:
            self._bar.update(self._task, description=text, completed=self._completed(self._step))
        elif self._is_due(self._line_seconds):
            self._console.print(f"{self._position(self._step)} · {text}")

    def training(self, figures: Figures) -> None:
        self._loss, self._used = figures["loss"], figures.get("budget_used", 0.0)
        text = f"loss {figures['loss']:.4f} · {figures['tokens_per_second']:,.0f} tokens/s"
        if not self._bar.disable:
            self._bar.update(self._task, completed=self._completed(figures["step"]), figures=text)
        elif self._is_due(self._line_seconds) or figures["step"] == self._steps:
            self._console.print(f"{self._position(figures['step'])} · {text}{self._left(figures['step'])}")

    def _position(self, step: int) -> str:
        if self._steps is not None:
            return f"step {step:,} of {self._steps:,}"
        return f"step {step:,}, {self._used:.0%} of the time"

    def _completed(self, step: int) -> int:
        """Of the bar: steps, or of a budget what was over at the newest logged step."""
        return step if self._budget is None else round(_PARTS * self._used)

    def _left(self, step: int) -> str:
        """What is left of the budget; else the time of the rest at the pace since the first step, with validations."""
        if self._budget is not None:
            return f" · {timedelta(seconds=max(0, round((1 - self._used) * self._budget)))} left"
        first, when = self._first or (step, 0.0)
        if self._steps is None or step <= first or step >= self._steps:
            return ""
        seconds = (time.monotonic() - when) / (step - first) * (self._steps - step)
        return f" · {timedelta(seconds=round(seconds))} left"

    def _is_due(self, seconds: float) -> bool:
        """Whether nothing was shown for so long; then it counts as shown now."""
        now = time.monotonic()
        is_due = now - self._shown >= seconds
        if is_due:
            self._shown = now
        return is_due

    def validation(self, figures: Figures) -> None:
        """A line of the table; its columns are the step, the training loss and the objective's own figures."""
        row = validation_row(figures, self._loss)
        if not self._header:
            self._console.print("  ".join(f"{title:>8}" for title in row))
            self._header = True
        self._console.print("  ".join(f"{value:>{max(8, len(title))}}" for title, value in row.items()))

    def tasks(self, figures: Figures) -> None:
        self._console.print(f"{self._position(figures['step'])} · {tasks_text(figures)}")

    def finished(self, report: Path | None) -> None:
        """Complete the bar: a run may stop early, and the time of a budget is known only at logged steps."""
        total = self._step if self._budget is None else _PARTS
        self._bar.update(self._task, description="training", total=total, completed=total)

    def close(self) -> None:
        self._bar.stop()
