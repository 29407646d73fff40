"""The curves of a run: every metric of metrics.jsonl over steps, tokens and seconds, also while the run goes on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artel.errors import InputError, Problem, WorkError
from artel.host import usable_cores
from artel.reports.metric_lines import Lines, Points, read_lines, thinned, unpacked
from artel.storage import check_regular

_LONG = 64 << 20
"""Bytes of a file that several processes read: one takes half a second for so much."""
_MOST_PROCESSES = 4
_BLOCK = 1 << 16
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the run, by step. Points are left out where a run logged more than can be shown."""

    step: Column
    tokens: Column
    """Input tokens trained on so far; NaN where the run does not tell."""
    seconds: Column
    """Wall time of the run so far, all its starts together; NaN where the run does not tell."""
    value: Column
    nulls: int = 0
    """Lines where the metric was NaN or infinite: they have no point."""

    @property
    def newest(self) -> float:
        return float(self.value[-1])


@dataclass(frozen=True, slots=True)
class Curves:
    """All metrics of a run."""

    training: dict[str, Curve] = field(default_factory=dict)
    """loss, gradient_norm, learning_rate, tokens_per_second, mfu, memory_gib, and what callbacks log."""
    validation: dict[str, Curve] = field(default_factory=dict)
    """The objective's metrics on the validation split, and the figures of `validate.tasks`."""
    newest: dict[str, Any] = field(default_factory=dict)
    """The newest line of a training step, as it stands in the file."""
    validation_line: dict[str, Any] = field(default_factory=dict)
    """The newest line of a validation."""
    tasks_line: dict[str, Any] = field(default_factory=dict)
    """The newest line with the figures of `validate.tasks`."""
    lines: int = 0
    torn: bool = False
    """The last line has no end: a kill has cut it off, or it is being written. It is left out."""

    @property
    def newest_validation(self) -> dict[str, float | None]:
        """The metrics of the newest validation, and the newest of tasks; None where one was NaN."""
        return self.validation_line.get("validation", {}) | self.tasks_line.get("tasks", {})

    @property
    def newest_validation_step(self) -> int | None:
        return self.validation_line.get("step")

    @property
    def step(self) -> int:
        """The newest step that is logged; 0 where there is none."""
        return max(line.get("step", 0) for line in (self.newest, self.validation_line, self.tasks_line))


class CurveReader:
    """Reads metrics.jsonl, and later what was added to it. A file that was made anew is read anew."""

    def __init__(self, path: Path, points: int | None = 2000) -> None:
        """`points` is how many are kept of each metric at most; None for all of them."""
        self._path, self._points = path, points
        self._file: tuple[int, int] | None = None  # device and inode
        self._end = 0  # bytes read
        self._lines = Lines()

    def read(self) -> Curves:
        """All that there is by now; no curves where there is no file.

        Raises InputError for lines that no run writes, and where the file cannot be read.
        """
        check_regular(self._path)
        try:
            torn = self._read_on()
        except (FileNotFoundError, NotADirectoryError):
            return Curves()
        except OSError as error:
            raise InputError.at(str(self._path), f"cannot be read: {error.strerror}", "it must be a file") from None
        if self._lines.problems:
            raise InputError(self._problems())
        return self._curves(torn)

    def _problems(self) -> list[Problem]:
        """Each line that no run writes; of a file of several such lines and no other, the file."""
        lines = self._lines
        if lines.lines > 1 and not lines.has_good:
            _, what = lines.problems[0]
            message = f"is no metrics.jsonl of a run: {lines.lines:,} lines cannot be read, the first: {what}"
            return [Problem(str(self._path), message, "restore it from a copy, or remove it")]
        return [
            Problem(f"{self._path}:{line}", f"is no line of a run: {what}", "remove the line")
            for line, what in lines.problems
        ]

    def _read_on(self) -> bool:
        """Read what was added; whether the last line is torn."""
        stat = self._path.stat()
        file = (stat.st_dev, stat.st_ino)
        if file != self._file or stat.st_size < self._end or self._lines.problems:
            self._file, self._end, self._lines = file, 0, Lines()
        end = _last_line_end(self._path, self._end, stat.st_size)
        if end > self._end:
            self._lines.add(_read(self._path, self._end, end, self._points))
            self._end = end
        return end < stat.st_size

    def _curves(self, torn: bool) -> Curves:
        lines = self._lines
        for name, arrays in lines.points.items():
            points = np.concatenate(arrays)
            if self._points is not None and len(points) > self._points:
                points = thinned(points, self._points // 4)
            lines.points[name] = [points]
        named = {name: points for name, (points,) in lines.points.items() if len(points)}
        training = {name: points for name, points in named.items() if not name.startswith("validation/")}
        places = training.get("loss")
        return Curves(
            training={name: _curve(points, lines.nulls.get(name, 0)) for name, points in training.items()},
            validation={
                name.removeprefix("validation/"): _curve(_placed(points, places), lines.nulls.get(name, 0))
                for name, points in named.items()
                if name not in training
            },
            newest=lines.training,
            validation_line=_as_written(lines.validation),
            tasks_line=_as_written(lines.tasks),
            lines=lines.lines,
            torn=torn,
        )


def _as_written(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("validation/")}


def _curve(points: Points, nulls: int) -> Curve:
    step, tokens, seconds, value = points.T
    return Curve(step, tokens, seconds, value, nulls)


def _placed(points: Points, training: Points | None) -> Points:
    """A validation's line has no tokens and no seconds: they are those of the steps around it."""
    if training is None:
        return points
    placed = points.copy()
    for column in (1, 2):
        placed[:, column] = np.interp(points[:, 0], training[:, 0], training[:, column])
    return placed


def _last_line_end(path: Path, begin: int, end: int) -> int:
    """Where the last whole line between two bytes ends; `begin` where there is none."""
    with path.open("rb") as file:
        while end > begin:
            block = max(begin, end - _BLOCK)
            file.seek(block)
            at = file.read(end - block).rfind(b"\n")
            if at >= 0:
                return block + at + 1
            end = block
    return begin


def _read(path: Path, begin: int, end: int, points: int | None) -> Lines:
    """The lines between two bytes; of a long file by several processes."""
    if end - begin < _LONG or points is None:
        return read_lines(path, begin, end, points)
    count = min(usable_cores(), _MOST_PROCESSES)
    bounds = [begin + (end - begin) * number // count for number in range(count)]
    bounds = [begin, *(_last_line_end(path, begin, bound) for bound in bounds[1:]), end]
    result = Lines()
    processes = [_reading(path, *pair, points) for pair in pairwise(bounds[1:])]
    try:
        result.add(read_lines(path, bounds[0], bounds[1], points))
        for process in processes:
            content, _ = process.communicate()
            if process.returncode:
                raise WorkError.at(str(path), "a process that read a part of it failed", "try again")
            result.add(unpacked(content))
    finally:
        for process in processes:
            process.kill()
    return result


def _reading(path: Path, begin: int, end: int, points: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "artel.reports.metric_lines", str(path.resolve()), *map(str, (begin, end, points))]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
