"""Tables and confusion matrices of a validation (`Objective.details`).

The file may contain anything. Entries that are neither a table nor a matrix are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_MAX_LABELS = 25
"""Maximum labels of a matrix that is drawn in full. For a larger one, its most frequent confusions are listed."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A confusion matrix: counts by true label (rows) and predicted label (columns)."""

    labels: list[str]
    counts: list[list[int]]

    @property
    def is_small(self) -> bool:
        return len(self.labels) <= _MAX_LABELS

    def confusions(self) -> list[tuple[str, str, int]]:
        """Return (true label, predicted label, count) of the most frequent confusions."""
        pairs = [
            (true, predicted, count)
            for true, row in zip(self.labels, self.counts, strict=True)
            for predicted, count in zip(self.labels, row, strict=True)
            if true != predicted and count
        ]
        return sorted(pairs, key=lambda item: -item[2])[:_MAX_LABELS]


@dataclass(frozen=True, slots=True)
class Details:
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows (column -> value) by title."""
    matrices: dict[str, Matrix] = field(default_factory=dict)
    """Confusion matrices by title."""

    def __bool__(self) -> bool:
        return bool(self.tables or self.matrices)


def read_details(content: Any) -> Details:
    """Return the tables and matrices in the content of a file."""
    if not isinstance(content, dict):
        return Details()
    tables = {title: rows for title, rows in _dict_items(content.get("tables")) if _is_table(rows)}
    matrices = {
        title: Matrix(list(map(str, value["labels"])), value["counts"])
        for title, value in _dict_items(content.get("matrices"))
        if _is_matrix(value)
    }
    return Details(tables, matrices)


def list_columns(rows: list[dict[str, Any]]) -> list[str]:
    """Return the columns of a table, including columns that only some rows have."""
    return list(dict.fromkeys(name for row in rows for name in row))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def detail_lines(details: Details) -> Iterator[str]:
    """Yield the tables and matrices as lines of text."""
    for title, rows in details.tables.items():
        columns = list_columns(rows)
        yield f"{title}:"
        yield from _align([columns, *([_format_value(row.get(name, "")) for name in columns] for row in rows)])
    for title, matrix in details.matrices.items():
        if matrix.is_small:
            yield f"{title} (rows: true, columns: predicted):"
            labelled_rows = zip(matrix.labels, matrix.counts, strict=True)
            yield from _align([["", *matrix.labels], *([label, *map(str, row)] for label, row in labelled_rows)])
        else:
            yield f"{title}, most frequent confusions:"
            yield from _align([["true", "predicted", "count"], *(list(map(str, row)) for row in matrix.confusions())])


def _align(rows: list[list[str]]) -> Iterator[str]:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *values = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(["", first, *values]).rstrip()


def _format_value(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _dict_items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _is_table(rows: Any) -> bool:
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)


def _is_matrix(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    labels, counts = value.get("labels"), value.get("counts")
    if not isinstance(labels, list) or not labels or not isinstance(counts, list):
        return False
    rows = [row for row in counts if isinstance(row, list) and len(row) == len(labels)]
    return len(rows) == len(counts) == len(labels) and all(isinstance(count, int) for row in rows for count in row)
