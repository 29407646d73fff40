"""Reads metrics.jsonl as curves: every metric over steps, tokens and seconds, even while the run is training."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artel.config import find_similar_name
from artel.errors import InputError, Problem, WorkError
from artel.host import usable_cores
from artel.messages import logger
from artel.reports.metric_lines import LineBlock, Points, deserialize, read_lines, thin_out
from artel.storage import check_regular

_PARALLEL_BYTES = 64 << 20
"""File size from which several processes read. One process reads this many bytes in half a second."""
_MAX_PROCESSES = 4
_BLOCK_BYTES = 1 << 16
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of a run, by step. Thinned out if the run logged more points than a plot can show."""

    step: Column
    tokens: Column
    """Input tokens trained on so far. NaN if not logged."""
    seconds: Column
    """Wall time of all starts of the run so far. NaN if not logged."""
    value: Column
    null_count: int = 0
    """Number of lines where the metric was NaN or infinite. These lines have no point."""

    @property
    def newest(self) -> float:
        return float(self.value[-1])


@dataclass(frozen=True, slots=True)
class Curves:
    """All metrics of a run."""

    training: dict[str, Curve] = field(default_factory=dict)
    """loss, gradient_norm, learning_rate, tokens_per_second, mfu, memory_gib, and the metrics of callbacks."""
    validation: dict[str, Curve] = field(default_factory=dict)
    """The objective's metrics on the validation split, and the metrics of `validate.tasks`."""
    newest: dict[str, Any] = field(default_factory=dict)
    """The newest line of a training step."""
    validation_line: dict[str, Any] = field(default_factory=dict)
    """The newest line of a validation."""
    tasks_line: dict[str, Any] = field(default_factory=dict)
    """The newest line with metrics of `validate.tasks`."""
    line_count: int = 0
    torn: bool = False
    """True if the last line is incomplete, because of a kill or because it is being written. It is ignored."""

    @property
    def newest_validation(self) -> dict[str, float | None]:
        """The newest validation and task metrics. None for a metric that was NaN."""
        return self.validation_line.get("validation", {}) | self.tasks_line.get("tasks", {})

    @property
    def newest_validation_step(self) -> int | None:
        return self.validation_line.get("step")

    @property
    def step(self) -> int:
        """The newest logged step, or 0 before the first."""
        return max(line.get("step", 0) for line in (self.newest, self.validation_line, self.tasks_line))


class CurveReader:
    """Reads metrics.jsonl, and on later calls only new lines. A replaced file is read from the start."""

    def __init__(self, path: Path, max_points: int | None = 2000) -> None:
        """Keep at most `max_points` points of each metric, or all if None."""
        self._path, self._max_points = path, max_points
        self._file: tuple[int, int] | None = None  # device and inode
        self._end = 0  # bytes read
        self._lines = LineBlock()

    def read(self) -> Curves:
        """Return the curves so far. Empty if there is no file.

        Raise InputError if the file cannot be read or has damaged lines, which are all listed.
        """
        check_regular(self._path)
        try:
            torn = self._read_new_lines()
        except (FileNotFoundError, NotADirectoryError):
            return Curves()
        except OSError as error:
            raise InputError.at(str(self._path), f"cannot be read: {error.strerror}", "it must be a file") from None
        if self._lines.problems:
            raise InputError(self._describe_problems())
        return self._build_curves(torn)

    def _describe_problems(self) -> list[Problem]:
        """Return one problem per damaged line, or one for the file if no line is valid."""
        lines = self._lines
        if lines.line_count > 1 and not lines.has_valid_line:
            _, reason = lines.problems[0]
            message = (
                f"is not the metrics.jsonl of a run: all {lines.line_count:,} lines are invalid, the first: {reason}"
            )
            return [Problem(str(self._path), message, "restore it from a copy, or remove it")]
        return [
            Problem(f"{self._path}:{line_number}", f"is not a line of a run: {reason}", "remove the line")
            for line_number, reason in lines.problems
        ]

    def _read_new_lines(self) -> bool:
        """Read the added lines. Return True if the last one is incomplete."""
        stat = self._path.stat()
        file = (stat.st_dev, stat.st_ino)
        if file != self._file or stat.st_size < self._end or self._lines.problems:
            self._file, self._end, self._lines = file, 0, LineBlock()
        end = _find_last_line_end(self._path, self._end, stat.st_size)
        if end > self._end:
            self._lines.add(_read_block(self._path, self._end, end, self._max_points))
            self._end = end
        return end < stat.st_size

    def _build_curves(self, torn: bool) -> Curves:
        lines = self._lines
        for name, arrays in lines.points.items():
            points = np.concatenate(arrays)
            if self._max_points is not None and len(points) > self._max_points:
                points = thin_out(points, self._max_points // 4)
            lines.points[name] = [points]
        points_by_name = {name: points for name, (points,) in lines.points.items() if len(points)}
        training = {name: points for name, points in points_by_name.items() if not name.startswith("validation/")}
        loss = training.get("loss")
        return Curves(
            training={name: _to_curve(points, lines.null_counts.get(name, 0)) for name, points in training.items()},
            validation={
                name.removeprefix("validation/"): _to_curve(
                    _interpolate_positions(points, loss), lines.null_counts.get(name, 0)
                )
                for name, points in points_by_name.items()
                if name not in training
            },
            newest=lines.training,
            validation_line=_drop_curve_keys(lines.validation),
            tasks_line=_drop_curve_keys(lines.tasks),
            line_count=lines.line_count,
            torn=torn,
        )


def _drop_curve_keys(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("validation/")}


def _to_curve(points: Points, null_count: int) -> Curve:
    step, tokens, seconds, value = points.T
    return Curve(step, tokens, seconds, value, null_count)


def _interpolate_positions(points: Points, training: Points | None) -> Points:
    """Fill in the tokens and seconds at validation points, by interpolating between training steps."""
    if training is None:
        return points
    result = points.copy()
    for column in (1, 2):
        result[:, column] = np.interp(points[:, 0], training[:, 0], training[:, column])
    return result


def _find_last_line_end(path: Path, start: int, end: int) -> int:
    """Return the offset after the last complete line between two offsets, or `start` if there is none."""
    with path.open("rb") as file:
        while end > start:
            block_start = max(start, end - _BLOCK_BYTES)
            file.seek(block_start)
            position = file.read(end - block_start).rfind(b"\n")
            if position >= 0:
                return block_start + position + 1
            end = block_start
    return start


def _read_block(path: Path, start: int, end: int, max_points: int | None) -> LineBlock:
    """Read the lines between two offsets, with several processes if there are many."""
    if end - start < _PARALLEL_BYTES or max_points is None:
        return read_lines(path, start, end, max_points)
    process_count = min(usable_cores(), _MAX_PROCESSES)
    bounds = [start + (end - start) * index // process_count for index in range(process_count)]
    bounds = [start, *(_find_last_line_end(path, start, bound) for bound in bounds[1:]), end]
    result = LineBlock()
    processes = [_start_reader(path, *span, max_points) for span in pairwise(bounds[1:])]
    try:
        result.add(read_lines(path, bounds[0], bounds[1], max_points))
        for process in processes:
            content, _ = process.communicate()
            if process.returncode:
                raise WorkError.at(str(path), "a process that reads part of it failed", "try again")
            result.add(deserialize(content))
    finally:
        for process in processes:
            process.kill()
    return result


def _start_reader(path: Path, start: int, end: int, max_points: int) -> subprocess.Popen[bytes]:
    arguments = [str(path.resolve()), *map(str, (start, end, max_points))]
    command = [sys.executable, "-m", "artel.reports.metric_lines", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


def read_curves(path: Path) -> Curves:
    """Return the curves of a run's metrics.jsonl. An incomplete last line is ignored and logged.

    Raise InputError if the file is missing, unreadable or has damaged lines.
    """
    if not path.exists():
        if (path.parent / "config.yaml").is_file():
            message = "has not been trained yet: no step is logged"
            raise InputError.at(str(path.parent), message, f"train it: artel train {path.parent}")
        if not path.parent.is_dir():
            similar = find_similar_name(str(path.parent))
            fix = f"did you mean {similar}?" if similar else "use the folder of a trained run"
            raise InputError.at(str(path.parent), "no such folder", fix)
        raise InputError.at(str(path), "no such file", "use the folder of a trained run")
    curves = CurveReader(path).read()
    if curves.torn:
        logger.info("%s:%s: the last line is incomplete and is ignored", path, curves.line_count + 1)
    return curves
