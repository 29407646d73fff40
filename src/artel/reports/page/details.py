"""Tables of a validation, and its confusion matrix as a table whose cells are as dark as their share of the row."""

from __future__ import annotations

from typing import Any

from artel.reports.details import Details, Matrix, columns_of, is_number, read_details
from artel.reports.page.language import Language
from artel.reports.page.views import table
from artel.reports.run_data import RunData

_OWN_ROWS = ("averages", "Rank of the first document that matches")
"""Tables whose rows artel names itself; in others the texts are those of the data."""


def details_view(run: RunData, words: Language) -> dict[str, Any] | None:
    """What the template of the section shows of a run; None where there is nothing."""
    details = read_details(run.validation)
    if not details:
        return None
    return {
        "step": _cell((run.validation or {}).get("step", ""), words),
        "tables": list(_tables(details, words)),
        "matrices": [_matrix(title, matrix, words) for title, matrix in details.matrices.items()],
    }


def _tables(details: Details, words: Language) -> Any:
    for title, rows in details.tables.items():
        columns = columns_of(rows)
        numbers = {at for at, name in enumerate(columns) if any(is_number(row.get(name)) for row in rows)}
        cells = [[_cell(row.get(name, ""), words) for name in columns] for row in rows]
        if title in _OWN_ROWS:
            cells = [[words.phrase(first), *others] for first, *others in cells]
        yield {"title": words.phrase(title), "table": table([words.label(name) for name in columns], cells, numbers)}


def _cell(value: Any, words: Language) -> str:
    if isinstance(value, float):
        return words.number(value)
    return words.integer(value) if is_number(value) else str(value)


def _matrix(title: str, matrix: Matrix, words: Language) -> dict[str, Any]:
    shown: dict[str, Any] = {"title": words.phrase(title), "labels": matrix.labels, "rows": [], "confusions": None}
    if not matrix.is_small:
        columns = [words["true_label"], words["predicted_label"], words["count"]]
        rows = [[true, predicted, words.integer(count)] for true, predicted, count in matrix.confusions()]
        return shown | {"confusions": table(columns, rows, {2})}
    for label, counts in zip(matrix.labels, matrix.counts, strict=True):
        total = max(1, sum(counts))
        cells = [{"count": words.integer(count), "share": f"{count / total:.3f}"} for count in counts]
        shown["rows"].append({"label": label, "cells": cells})
    return shown
