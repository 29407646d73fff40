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

# Order of plots: rounds, loss, validation metrics, then these.
_TRAINING_METRICS = ("learning_rate", "gradient_norm", "tokens_per_second", "mfu", "memory_gib")
_FRACTION_METRICS = ("mfu", "budget_used", "filler", "round_signal", "round_clipped", "engine_limited")
_METRICS_WITH_EVENTS = ("loss", "gradient_norm")
_ROUND_CHARTS = {
    "round_reward": ("reward",),
    "round_rewards": ("reward/",),
    "round_signal": ("signal", "cut_off"),
    "round_length": ("length_max", "length_mean", "length_min"),
    "round_seconds": ("seconds_writing", "seconds_running", "seconds_recomputing", "seconds_scoring"),
    "round_clipped": ("clipped_high", "clipped_low"),
    "mismatch": ("mismatch", "engine_mismatch"),
    "engine_limited": ("engine_limited",),
    "kl": ("kl",),
    "failed_rewards": ("failed_rewards",),
}
"""Plots of a run that learns in rounds, before its loss: name -> metrics in it. A name with `/` stands for all metrics
that begin with it."""
_ROUND_METRIC = "signal"
"""Every run that learns in rounds logs it."""
_BANDS = {"reward": "reward_deviation"}
"""Metrics drawn with a band of ± another metric."""
_TABLE_ROWS = 14
"""Approximate number of rows per curve in the table below a plot."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One curve of a plot."""

    run_index: int
    curve: Curve
    is_validation: bool
    label: str
    style: int = 0
    """Position of its metric in the plot: curves of a run differ in color or dashes."""
    band: Column | None = None
    """Half of the width of the band around the curve, at its points."""


@dataclass(slots=True)
class Chart:
    """One plot: the curves of one metric, or of a few that belong together, for all runs."""

    id: str
    title: str
    description: str
    metric: str
    """The metric, or the name of the plot."""
    curves: list[Trace] = field(default_factory=list)


def build_charts(runs: Sequence[RunData], names: Sequence[str], language: Language) -> list[Chart]:
    """Return the plots in order. Runs with different objectives get separate plots of loss and metrics."""
    learns_in_rounds = [_ROUND_METRIC in run.curves.training for run in runs]
    in_rounds = [index for index, is_in_rounds in enumerate(learns_in_rounds) if is_in_rounds]
    plots = [
        _build_round_chart(name, metrics, in_rounds, runs, names, language)
        for name, metrics in _ROUND_CHARTS.items()
        if in_rounds
    ]

    def is_drawn(metric: str, run_index: int) -> bool:
        return learns_in_rounds[run_index] and _is_round_metric(metric)

    objectives = list(dict.fromkeys(run.objective for run in runs))
    for objective in objectives:
        run_indices = [index for index, run in enumerate(runs) if run.objective == objective]
        suffix = f" · {objective}" if len(objectives) > 1 else ""
        metrics = dict.fromkeys(
            name for index in run_indices for name in runs[index].curves.validation if not is_drawn(name, index)
        )
        for metric in dict.fromkeys(["loss", *metrics]):
            plots.append(_build_chart(metric, suffix, run_indices, runs, names, language, is_quality=True))
    # run_tokens_per_second is a mean over the run so far. A tile shows its last value.
    listed = {"loss", "run_tokens_per_second", *_TRAINING_METRICS}
    other_metrics = {
        name for index, run in enumerate(runs) for name in run.curves.training if not is_drawn(name, index)
    }
    for metric in (*_TRAINING_METRICS, *sorted(other_metrics - listed)):
        run_indices = [index for index in range(len(runs)) if not is_drawn(metric, index)]
        plots.append(_build_chart(metric, "", run_indices, runs, names, language, is_quality=False))
    return [chart for chart in plots if chart.curves]


def _matches(metric: str, pattern: str) -> bool:
    return metric.startswith(pattern) if pattern.endswith("/") else metric == pattern


def _is_round_metric(metric: str) -> bool:
    patterns = (pattern for patterns in _ROUND_CHARTS.values() for pattern in patterns)
    return metric in _BANDS.values() or any(_matches(metric, pattern) for pattern in patterns)


def _build_round_chart(
    name: str,
    patterns: Sequence[str],
    run_indices: Sequence[int],
    runs: Sequence[RunData],
    names: Sequence[str],
    language: Language,
) -> Chart:
    """Build a plot of metrics of rounds that belong together."""
    chart = _empty_chart(name, "", language)
    all_metrics = {
        metric
        for index in run_indices
        for curves in (runs[index].curves.training, runs[index].curves.validation)
        for metric in curves
    }
    metrics = [metric for pattern in patterns for metric in sorted(all_metrics) if _matches(metric, pattern)]
    for run_index in run_indices:
        curves = runs[run_index].curves
        for style, metric in enumerate(metrics):
            for curves_by_metric, is_validation in ((curves.training, False), (curves.validation, True)):
                if metric not in curves_by_metric:
                    continue
                words = [names[run_index]] if len(runs) > 1 else []
                words += [_curve_name(metric, patterns, language)] if len(metrics) > 1 else []
                words += [language["validation"]] if is_validation else [] if words else [language["training"]]
                curve, half_width = curves_by_metric[metric], curves.training.get(_BANDS.get(metric, ""))
                band = None if is_validation or half_width is None else _interpolate(half_width, curve)
                chart.curves.append(Trace(run_index, curve, is_validation, " · ".join(words), style, band))
    return chart


def _curve_name(metric: str, patterns: Sequence[str], language: Language) -> str:
    """Return the name of a curve. For `reward/NAME`, the name that the user gave."""
    prefix = next((pattern for pattern in patterns if pattern.endswith("/") and metric.startswith(pattern)), None)
    return language.label(metric) if prefix is None else metric.removeprefix(prefix)


def _interpolate(curve: Curve, at: Curve) -> Column:
    """Return the values of a curve at the steps of another one. They differ if both were thinned out."""
    return np.interp(at.step, curve.step, curve.value)


def _empty_chart(metric: str, suffix: str, language: Language) -> Chart:
    title = language.words.get(metric, language.label(metric))
    description = language.words.get(f"{metric}_about", "")
    return Chart(_html_id(metric + suffix), title[:1].upper() + title[1:] + suffix, description, metric)


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
    chart = _empty_chart(metric, suffix, language)
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
                    chart.curves.append(Trace(run_index, curves_by_metric[metric], is_validation, label))
    return chart


def plot_data(chart: Chart, runs: Sequence[RunData], language: Language) -> dict[str, Any]:
    """Return the data of a plot for the page's script."""
    traces = [
        {
            "run": trace.run_index,
            "validation": trace.is_validation,
            "label": escape(trace.label, quote=False),
            "style": trace.style,
            "band": None if trace.band is None else _round_column(trace.band),
            **_plot_points(trace.curve),
        }
        for trace in chart.curves
    ]
    run_indices = dict.fromkeys(trace.run_index for trace in chart.curves)
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
    curves = [trace.curve for trace in chart.curves]
    values = [dict(zip(curve.step.tolist(), curve.value.tolist(), strict=True)) for curve in curves]
    steps: set[float] = set()
    for curve in curves:
        steps |= {*curve.step[np.unique(np.linspace(0, len(curve.step) - 1, _TABLE_ROWS).astype(int))].tolist()}
    format_value = language.percent if chart.metric in _FRACTION_METRICS else language.number
    rows = [
        [language.integer(step), *(format_value(curve[step]) if step in curve else "" for curve in values)]
        for step in sorted(steps)
    ]
    return {"columns": [trace.label for trace in chart.curves], "rows": rows}


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
        (trace.curve for trace in chart.curves if trace.run_index == run_index and not trace.is_validation), None
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
