"""Parses and thins out metrics.jsonl, which may have ten million lines.

Reads the file in chunks of 256 KiB (about 1,200 lines). For each chunk and metric, keeps only the first, lowest,
highest and last value, so a spike of a single step stays visible. In a short file, chunks are divided further. One core
parses a million lines a second. Several processes, each running this module, read a long file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

Points = NDArray[np.float64]
"""(points, 4): step, tokens, seconds, value. NaN if a line lacks one."""

MAX_METRIC = 1e100  # larger values would overflow when a plot computes differences
_CHUNK_BYTES = 1 << 18
_MAX_PROBLEMS = 20
_EVALUATIONS = ("validation", "tasks")
"""Kinds of lines with metrics in an object of the same name."""
_POSITION_KEYS = ("step", "epoch", "tokens", "seconds")


@dataclass(slots=True)
class LineBlock:
    """The contents of consecutive lines."""

    line_count: int = 0
    points: dict[str, list[Points]] = field(default_factory=dict)
    """Points by metric. Metrics of validations and tasks are named `validation/NAME`."""
    null_counts: dict[str, int] = field(default_factory=dict)
    """Number of lines in which a metric was NaN or infinite (null in JSON), by metric."""
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line number within the block, from 1; reason) of the first damaged lines."""
    training: dict[str, Any] = field(default_factory=dict)
    """The newest line of a training step."""
    validation: dict[str, Any] = field(default_factory=dict)
    """The newest line of a validation."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """The newest line with metrics of tasks."""

    @property
    def has_valid_line(self) -> bool:
        return bool(self.training or self.validation or self.tasks)

    def add(self, later: LineBlock) -> None:
        """Append the block that follows in the file."""
        self.problems += [(self.line_count + line_number, reason) for line_number, reason in later.problems]
        del self.problems[_MAX_PROBLEMS:]
        self.line_count += later.line_count
        for name, points in later.points.items():
            self.points.setdefault(name, []).extend(points)
        for name, count in later.null_counts.items():
            self.null_counts[name] = self.null_counts.get(name, 0) + count
        self.training = later.training or self.training
        self.validation = later.validation or self.validation
        self.tasks = later.tasks or self.tasks


def check_line(line: object) -> dict[str, Any]:
    """Return a line of metrics.jsonl after checking it. Raise ValueError if it is invalid."""
    if not isinstance(line, dict) or not isinstance(line.get("step"), int) or line["step"] < 0:
        raise ValueError("it has no valid step")
    metrics = {"loss": line.get("loss", 0.0)}
    for kind in _EVALUATIONS:
        if not isinstance(line.get(kind, {}), dict):
            raise ValueError(f"{kind} has no metrics")
        metrics |= line.get(kind, {})
    for name, value in metrics.items():
        if not (value is None or (isinstance(value, int | float) and abs(value) < MAX_METRIC)):
            raise ValueError(f"{name} is not a number of a run")
    return line


def read_lines(path: Path, start: int, end: int, max_points: int | None) -> LineBlock:
    """Read the lines between offsets `start` and `end`, both at line boundaries.

    Keep about `max_points` points per metric, or all if None. Raise OSError if the file cannot be read.
    """
    result = LineBlock()
    intervals = None
    if max_points is not None:
        intervals = max(1, max_points * _CHUNK_BYTES // (4 * max(_CHUNK_BYTES, end - start)))
    for chunk in _iterate_chunks(path, start, end):
        result.add(_read_chunk(chunk, intervals))
    return result


def thin_out(points: Points, intervals: int) -> Points:
    """Divide points into intervals and keep the first, lowest, highest and last point of each."""
    return points[_choose_rows(points[:, 3], intervals)]


def _choose_rows(values: NDArray[np.float64], intervals: int) -> NDArray[np.intp]:
    if len(values) <= 4 * intervals:
        return np.arange(len(values))
    rows: set[int] = set()
    for start, end in pairwise(len(values) * index // intervals for index in range(intervals + 1)):
        interval = values[start:end]
        rows |= {start, start + int(interval.argmin()), start + int(interval.argmax()), end - 1}
    return np.array(sorted(rows))


def _iterate_chunks(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield complete lines, about 256 KiB at a time."""
    with path.open("rb") as file:
        file.seek(start)
        remaining = end - start
        incomplete_line = b""
        while remaining > 0 and (block := file.read(min(_CHUNK_BYTES, remaining))):
            remaining -= len(block)
            cut = block.rfind(b"\n") + 1
            if cut:
                yield incomplete_line + block[:cut]
            incomplete_line = block[cut:] if cut else incomplete_line + block


def _read_chunk(chunk: bytes, intervals: int | None) -> LineBlock:
    line_count = chunk.count(b"\n")
    try:
        tables = list(_parse_tables(chunk, line_count))
    # A line is damaged or differs from the others.
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError):
        return _read_line_by_line(chunk, line_count, intervals)
    return _make_block(line_count, tables, intervals)


Table = tuple[dict[str, Any], list[str], NDArray[np.float64]]
"""(newest line, names of metrics, values): values of shape (lines, names)."""


def _parse_tables(chunk: bytes, line_count: int) -> Iterator[Table]:
    """Parse all lines of a chunk at once. Raise ValueError if a line is damaged or differs from the others."""
    lines = orjson.loads(b"[" + chunk[:-1].replace(b"\n", b",") + b"]")
    if len(lines) != line_count:
        raise ValueError("a line has several values")
    if b'"validation"' in chunk or b'"tasks"' in chunk:
        for line in [line for line in lines if _is_evaluation(line)]:
            yield _make_table([line | _evaluation_metrics(check_line(line))])
        lines = [line for line in lines if not _is_evaluation(line)]
    if lines:
        yield _make_table(lines)


def _make_table(lines: list[dict[str, Any]]) -> Table:
    """Make a table of lines with equal keys and numeric values. Other values are ignored in a single line."""
    names = [name for name, value in lines[0].items() if len(lines) > 1 or isinstance(value, int | float | None)]
    if len(lines) > 1 and {*map(len, lines)} != {len(names)}:
        raise ValueError("their keys differ")
    get = itemgetter(*names, names[0])  # the extra name makes it return a tuple even for a single metric
    width = len(names) + 1
    values = np.fromiter(chain.from_iterable(map(get, lines)), np.float64, len(lines) * width).reshape(-1, width)
    steps = values[:, names.index("step")]
    if steps.min() < 0 or (steps % 1).any() or np.nanmax(np.abs(values)) >= MAX_METRIC:
        raise ValueError("no step, or an invalid number")
    return lines[-1], names, values[:, :-1]


def _is_evaluation(line: dict[str, Any]) -> bool:
    return any(kind in line for kind in _EVALUATIONS)


def _evaluation_metrics(line: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a validation or of tasks in a line, by curve name."""
    metrics = (item for kind in _EVALUATIONS for item in line.get(kind, {}).items())
    return {f"validation/{name}": value for name, value in metrics}


def _read_line_by_line(chunk: bytes, line_count: int, intervals: int | None) -> LineBlock:
    problems: list[tuple[int, str]] = []
    tables: list[Table] = []
    for line_number, content in enumerate(chunk[:-1].split(b"\n"), 1):
        try:
            line = check_line(orjson.loads(content))
            tables.append(_make_table([line | _evaluation_metrics(line)]))
        except ValueError as error:
            problems.append((line_number, str(error)))
    result = _make_block(line_count, tables, intervals)
    result.problems = problems
    return result


def _make_block(line_count: int, tables: Iterable[Table], intervals: int | None) -> LineBlock:
    result = LineBlock(line_count)
    points: dict[str, list[Points]] = {}
    for newest, names, values in tables:
        kind = next((kind for kind in _EVALUATIONS if kind in newest), "training")
        setattr(result, kind, newest)
        indices = [names.index(name) if name in names else None for name in ("step", "tokens", "seconds")]
        for name, metric in zip(names, values.T, strict=True):
            if name not in _POSITION_KEYS:
                present = np.flatnonzero(~np.isnan(metric))
                if len(present) < len(metric):
                    result.null_counts[name] = result.null_counts.get(name, 0) + len(metric) - len(present)
                rows = present if intervals is None else present[_choose_rows(metric[present], intervals)]
                table = np.full((len(rows), 4), np.nan)
                table[:, 3] = metric[rows]
                for column, index in enumerate(indices):
                    if index is not None:
                        table[:, column] = values[rows, index]
                points.setdefault(name, []).append(table)
    for name, arrays in points.items():
        joined = np.concatenate(arrays)
        result.points[name] = [joined if intervals is None else thin_out(joined, intervals)]
    return result


# Blocks from other processes --------------------------------------------


def serialize(block: LineBlock) -> bytes:
    """Serialize for another process: one line of JSON, then the arrays in numpy's format."""
    stream = BytesIO()
    arrays = {name: np.concatenate(points) for name, points in block.points.items()}
    header = {
        "line_count": block.line_count,
        "null_counts": block.null_counts,
        "problems": block.problems,
        "training": block.training,
        "validation": block.validation,
        "tasks": block.tasks,
        "names": list(arrays),
    }
    stream.write(orjson.dumps(header) + b"\n")
    for array in arrays.values():
        np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def deserialize(content: bytes) -> LineBlock:
    """Inverse of `serialize`."""
    stream = BytesIO(content)
    header = orjson.loads(stream.readline())
    arrays = {name: [np.load(stream, allow_pickle=False)] for name in header["names"]}
    problems = [tuple(problem) for problem in header.pop("problems")]
    del header["names"]
    return LineBlock(points=arrays, problems=problems, **header)


if __name__ == "__main__":
    _, file, *arguments = sys.argv
    sys.stdout.buffer.write(serialize(read_lines(Path(file), *map(int, arguments))))
