"""Runs as text for a terminal: the curve of a metric, a table of several runs, and a compressor's bits per byte."""

from __future__ import annotations

import lzma
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from artel.reports.curves import Curve, Curves
from artel.reports.run_data import RunData

if TYPE_CHECKING:
    from artel.tokens import StoreSplit, Tokenizer


def draw_curve(curves: Curves, metric: str = "loss", width: int = 64, height: int = 12) -> list[str]:
    """Draw a metric of training (·) and of validation (o) over steps in `height` lines of `width` characters."""
    training, validation = (
        _to_pairs(curves_by_name.get(metric)) for curves_by_name in (curves.training, curves.validation)
    )
    points = training + validation
    if not points:
        return ["(nothing logged yet)"]
    last_step = max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    grid = [[" "] * width for _ in range(height)]
    for mark, series in (("·", training), ("o", validation)):
        for step, value in series:
            column = min(width - 1, int(step / max(1, last_step) * (width - 1)))
            row = 0 if high == low else round((high - value) / (high - low) * (height - 1))
            grid[row][column] = mark
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(row, ''):>7} │{''.join(cells)}" for row, cells in enumerate(grid)]
    title = "" if metric == "loss" else f"{metric}: "
    axis = f"{'':>7} └{'─' * width}"
    return [
        *lines,
        axis,
        f"{'':>9}0{'step ' + str(last_step):>{width - 1}}",
        f"{'':>9}{title}· training   o validation",
    ]


def _to_pairs(curve: Curve | None) -> list[tuple[int, float]]:
    if curve is None:
        return []
    return [(int(step), value) for step, value in zip(curve.step, curve.value.tolist(), strict=True)]


def compare_runs(runs: Sequence[RunData]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return state, step, training loss and newest validation of each run, as data and as lines of a table."""
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
    titles = ["run", "objective", "state", "step", "training loss", "tokens/s", *map(_column_title, metrics)]
    table = [titles]
    for row in rows:
        values = [_format_metric(row["validation"].get(name)) if name in row["validation"] else "" for name in metrics]
        speed = row["tokens_per_second"]
        cells = [row["run"], row["objective"], row["state"], f"{row['steps']:,}", _format_metric(row["loss"])]
        table.append([*cells, "" if speed is None else f"{speed:,.0f}", *values])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) if index < 3 else cell.rjust(width)
                       for index, (cell, width) in enumerate(zip(cells, widths, strict=True))).rstrip()
             for cells in table]  # fmt: skip
    return rows, lines


def _column_title(name: str) -> str:
    return "validation loss" if name == "loss" else name.replace("_", " ")


def _format_metric(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def measure_compression(train: StoreSplit, validation: StoreSplit, tokenizer: Tokenizer) -> dict[str, float]:
    """Return bits per byte of `xz -9` on the validation text: by itself, and appended to the training text.

    The second is the fair comparison with a model: size(training + validation) - size(training).
    """
    training_text, validation_text = _decode_split(train, tokenizer), _decode_split(validation, tokenizer)
    validation_bytes = _compressed_bytes(validation_text)
    added_bytes = _compressed_bytes(training_text + validation_text) - _compressed_bytes(training_text)
    scale = 8 / max(1, len(validation_text))
    return {"xz": validation_bytes * scale, "xz_after_training_text": added_bytes * scale}


def _decode_split(split: StoreSplit, tokenizer: Tokenizer) -> bytes:
    return "\n".join(tokenizer.decode(ids[:-1]) for _, ids in split.iter_samples()).encode()


def _compressed_bytes(data: bytes) -> int:
    # The window must hold the full training text, but the preset's window has only 64 MiB.
    window = 1 << max(20, math.ceil(math.log2(len(data) + 1)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(window, 1 << 30)}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters))
