"""Curves of runs as data for Plotly, over steps, tokens and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from artel.reports.curves import Column, Curve
from artel.reports.page.language import Language
from artel.reports.run_data import RunData

# Order of plots: loss, validation metrics, then these.
_TRAINING_METRICS = ("learning_rate", "gradient_norm", "tokens_per_second", "mfu", "memory_gib")
_FRACTION_METRICS = ("mfu", "budget_used", "filler")
_METRICS_WITH_EVENTS = ("loss", "gradient_norm")
_TABLE_ROWS = 14
"""Approximate number of rows per curve in the table below a plot."""


@dataclass(slots=True)
class Chart:
    """One plot: the curves of one metric for all runs."""

    id: str
    title: str
    description: str
    metric: str
    curves: list[tuple[int, Curve, bool, str]] = field(default_factory=list)
    """(index of the run, curve, True for a validation curve, label)."""


def build_charts(runs: Sequence[RunData], names: Sequence[str], language: Language) -> list[Chart]:
    """Return the plots in order. Runs with different objectives get separate plots of loss and metrics."""
    objectives = list(dict.fromkeys(run.objective for run in runs))
    plots: list[Chart] = []
    for objective in objectives:
        run_indices = [index for index, run in enumerate(runs) if run.objective == objective]
        suffix = f" · {objective}" if len(objectives) > 1 else ""
        metrics = dict.fromkeys(name for index in run_indices for name in runs[index].curves.validation)
        for metric in dict.fromkeys(["loss", *metrics]):
            plots.append(_build_chart(metric, suffix, run_indices, runs, names, language, is_quality=True))
    # run_tokens_per_second is a mean over the run so far. A tile shows its last value.
    listed = {"loss", "run_tokens_per_second", *_TRAINING_METRICS}
    other_metrics = {name for run in runs for name in run.curves.training} - listed
    for metric in (*_TRAINING_METRICS, *sorted(other_metrics)):
        plots.append(_build_chart(metric, "", range(len(runs)), runs, names, language, is_quality=False))
    return [chart for chart in plots if chart.curves]


def _build_chart(
    metric: str,
    suffix: str,
    run_indices: Sequence[int],
    runs: Sequence[RunData],
    names: Sequence[str],
    language: Language,
    *,
    is_quality: bool,
) -> Chart:
    """Build the plot of a metric. `is_quality`: True for training loss and validation metrics."""
    title = language.words.get(metric, language.label(metric))
    description = language.words.get(f"{metric}_about", "")
    chart = Chart(_html_id(metric + suffix), title[:1].upper() + title[1:] + suffix, description, metric)
    for run_index in run_indices:
        curves = runs[run_index].curves
        curve_groups = (
            [(curves.training, False), (curves.validation, True)] if is_quality else [(curves.training, False)]
        )
        for curves_by_metric, is_validation in curve_groups:
            if is_validation or not is_quality or metric == "loss":
                label = language["validation" if is_validation else "training"]
                label = label if len(runs) == 1 else f"{names[run_index]} · {label}" if is_quality else names[run_index]
                if metric in curves_by_metric:
                    chart.curves.append((run_index, curves_by_metric[metric], is_validation, label))
    return chart


def plot_data(chart: Chart, runs: Sequence[RunData], language: Language) -> dict[str, Any]:
    """Return the data of a plot for the page's script."""
    traces = [
        {"run": run_index, "validation": is_validation, "label": escape(label, quote=False), **_plot_points(curve)}
        for run_index, curve, is_validation, label in chart.curves
    ]
    run_indices = dict.fromkeys(run_index for run_index, *_ in chart.curves)
    marks = [mark for index in run_indices for mark in _event_marks(chart, index, runs, language)]
    return {"id": chart.id, "percent": chart.metric in _FRACTION_METRICS, "traces": traces, "marks": marks}


def list_axes(runs: Sequence[RunData]) -> list[str]:
    """Return the x axes that every run has logged."""
    names = ["step"]
    for name in ("tokens", "seconds"):
        curves = [run.curves.training["loss"] for run in runs if "loss" in run.curves.training]
        if curves and all(np.isfinite(getattr(curve, name)).all() for curve in curves):
            names.append(name)
    return names


def build_table(chart: Chart, language: Language) -> dict[str, Any]:
    """Return some values of a plot as a table, for readers who cannot see the plot."""
    values = [dict(zip(curve.step.tolist(), curve.value.tolist(), strict=True)) for _, curve, *_ in chart.curves]
    steps: set[float] = set()
    for _, curve, *_ in chart.curves:
        steps |= {*curve.step[np.unique(np.linspace(0, len(curve.step) - 1, _TABLE_ROWS).astype(int))].tolist()}
    format_value = language.percent if chart.metric in _FRACTION_METRICS else language.number
    rows = [
        [language.integer(step), *(format_value(curve[step]) if step in curve else "" for curve in values)]
        for step in sorted(steps)
    ]
    return {"columns": [label for *_, label in chart.curves], "rows": rows}


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run. `kind`: checkpoint, best, restart or bad."""

    step: int
    kind: str
    text: str


def list_events(run: RunData, language: Language) -> list[Event]:
    """Return existing checkpoints, restarts and bad steps, by step."""
    run_events = []
    for checkpoint in run.checkpoints:
        values = {"step": language.integer(checkpoint.step), "size": language.bytes(checkpoint.byte_size)}
        text = language["checkpoint_text"].format(**values)
        run_events.append(Event(checkpoint.step, "best" if checkpoint.is_best else "checkpoint", text))
    for start in run.starts[1:]:
        values = {"step": language.integer(start.step), "time": start.time, "processes": str(start.processes)}
        run_events.append(Event(start.step, "restart", language["restart_text"].format(**values)))
    for bad in run.bad_steps:
        text = "; ".join(language.phrase(bad.get(key, "")) for key in ("what", "did"))
        documents = bad.get("documents", [])
        if isinstance(documents, list) and documents:
            text += f"; {', '.join(map(str, documents[:3]))}{' …' if len(documents) > 3 else ''}"
        run_events.append(Event(bad["step"], "bad", text))
    return sorted(run_events, key=lambda event: event.step)


EVENT_WORDS = {"checkpoint": "checkpoint", "best": "best", "restart": "restart", "bad": "bad_step"}


def _event_marks(chart: Chart, run_index: int, runs: Sequence[RunData], language: Language) -> Iterator[dict[str, Any]]:
    """Yield the events of a run as points on its curve, one trace per kind."""
    curve = next(
        (curve for index, curve, is_validation, _ in chart.curves if index == run_index and not is_validation), None
    )
    if curve is None or chart.metric not in _METRICS_WITH_EVENTS:
        return
    by_kind: dict[str, list[Event]] = {}
    for event in list_events(runs[run_index], language):
        by_kind.setdefault(event.kind, []).append(event)
    for kind, group in by_kind.items():
        steps = np.array([event.step for event in group], dtype=np.float64)
        tokens, seconds, value = (
            np.interp(steps, curve.step, column) for column in (curve.tokens, curve.seconds, curve.value)
        )
        label = language[EVENT_WORDS[kind]]
        yield {
            "kind": kind,
            "label": escape(label, quote=False),
            "text": [escape(f"{label}: {event.text}", quote=False) for event in group],
            **_plot_points(Curve(steps, tokens, seconds, value)),
        }


def _plot_points(curve: Curve) -> dict[str, list[float | None]]:
    columns = {"step": curve.step, "tokens": curve.tokens, "seconds": curve.seconds, "value": curve.value}
    return {name: _round_column(column) for name, column in columns.items()}


def _round_column(column: Column) -> list[float | None]:
    """Round to six significant digits, as many as a plot can show. Keep integers exact. NaN becomes null."""
    return [_round(value) for value in column.tolist()]


def _round(value: float) -> float | None:
    if value != value:
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


def _html_id(name: str) -> str:
    """Return an HTML id for any metric name."""
    safe_name = "".join(character if character.isascii() and character.isalnum() else "-" for character in name)
    return safe_name if safe_name == name else f"{safe_name}-{sum(map(ord, name)):x}"
