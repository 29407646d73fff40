"""A run to inspect: its metrics, ledger and samples."""

from __future__ import annotations

import math
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from artel.config import RunConfig, load_run
from artel.errors import InputError, missing_extra
from artel.notebooks import html_table
from artel.storage import check_regular

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from artel.inference.push import PushResult
    from artel.reports.curves import Curves
    from artel.reports.run_data import RunData
    from artel.training import RunFolder

_PLOT_PIXELS = 240  # height of one plot
_TRAINING_COLOR, _VALIDATION_COLOR = "#1f77b4", "#d62728"


class Run:
    """The folder of a run that is training, complete or stopped.

    Every access reads the files again, so a run can be watched while it trains.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raise InputError if the folder does not exist or is not a run's."""
        from artel.reports.run_data import check_is_run  # which imports NumPy
        from artel.training import RunFolder

        self.folder = Path(folder)
        """The run's folder."""
        self._files: RunFolder = RunFolder(self.folder)
        check_is_run(self._files)

    @property
    def config(self) -> RunConfig:
        """The run file with a value for every key. Raise InputError before the first start."""
        return load_run(str(self.folder))

    @property
    def metrics(self) -> Any:
        """A row per logged or validated step: a pandas or polars DataFrame, otherwise a list of dicts.

        The columns are those of metrics.jsonl: `step`, `tokens` (so far), `seconds` (wall time so far), `loss` (nats
        per target token, mean since the previous row), `gradient_norm`, `learning_rate`, `tokens_per_second`,
        `memory_gib`, `mfu` (0 to 1, if the device's peak is known), and `validation_…` for each metric of the
        objective. A value that is missing, NaN or infinite is NaN, null or absent. If both libraries are installed,
        pandas is used, unless only polars has been imported.

        Raise InputError if the file is damaged.
        """
        return table(_make_columns(self._read_curves()), _dataframe_library())

    @property
    def ledger(self) -> dict[str, Any]:
        """Counts of documents (`documents` read, kept, and dropped by reason; the same by `sets`), and `tokens` and
        `bytes` of the `parts`, train and validation. Raise InputError before the text is prepared."""
        return _parse_object(self._read_file(self._files.ledger, "artel.prepare(run)"), self._files.ledger)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Text generated for `validate.prompts` at each validation: `step`, `prompt`, `text`, oldest first."""
        if not self._files.samples.exists():
            return []
        # The last line may be being written.
        complete_lines = self._read_file(self._files.samples, "").rpartition(b"\n")[0].splitlines()
        return [_parse_object(line, self._files.samples) for line in complete_lines]

    @property
    def result(self) -> dict[str, Any]:
        """The summary of a complete run: `steps`, `tokens`, `train_loss`, `validation`, `tokens_per_second`,
        `wall_seconds`, `peak_memory_gib`. Raise InputError before that."""
        if not self._files.result.exists():
            raise InputError.at(str(self.folder), "is not complete", "artel.train(run) trains it to its end")
        return self._files.read_result()

    def plot(self) -> Figure:
        """Return a plotly figure with a plot over steps for each metric, as in the report.

        Notebooks display it. Save or change it with plotly's `write_html`, `write_image` and `update_layout`. Needs the
        extra `report`. `artel report` shows more, in a browser.

        Raise InputError if plotly is not installed, nothing is logged yet, or a file of the run is damaged.
        """
        from artel.reports.run_data import read_run

        return _plot_metrics(read_run(self.folder))

    def push(self, repo: str, **options: Any) -> PushResult:
        """Upload the model of the run to the Hugging Face hub, with a model card: `artel.push(folder, repo, ...)`."""
        from artel.api.push import push

        return push(self.folder, repo, **options)

    def __repr__(self) -> str:
        return f"artel.Run({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return html_table(self._summary_rows(), caption=str(self.folder))

    def _summary_rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table that a notebook shows."""
        curves = self._read_curves()
        state = "complete" if self._files.is_complete else "not complete"
        metrics = {name: value for name, value in curves.newest.items() if name != "step"}
        metrics |= {f"validation {name}": value for name, value in curves.newest_validation.items()}
        metric_rows = [(name.replace("_", " "), _format_value(value)) for name, value in metrics.items()]
        return [("steps", f"{curves.step:,} ({state})"), *metric_rows]

    def _read_curves(self) -> Curves:
        """Return all points of metrics.jsonl, by metric."""
        from artel.reports.curves import CurveReader

        return CurveReader(self._files.metrics, max_points=None).read()

    def _read_file(self, file: Path, fix: str) -> bytes:
        check_regular(file)
        try:
            return file.read_bytes()
        except FileNotFoundError:
            raise InputError.at(str(file), "does not exist yet", fix) from None
        except OSError as error:
            raise InputError.at(str(file), f"cannot be read: {error.strerror}", "it must be a file") from None


def _parse_object(content: bytes, file: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(content)
        if isinstance(value, dict):
            return value
        message = "is not an object"
    except ValueError as error:
        message = str(error)
    raise InputError.at(str(file), f"is damaged: {message}", "remove it, or restore it from a copy")


def _format_value(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else "NaN"


def _make_columns(curves: Curves) -> dict[str, Any]:
    """Return a column per metric over all logged or validated steps. NaN if a step has no value."""
    import numpy as np

    curves_by_name = {**curves.training, **{f"validation_{name}": curve for name, curve in curves.validation.items()}}
    steps = np.unique(np.concatenate([[], *(curve.step for curve in curves_by_name.values())]))

    def align(curve_steps: Any, values: Any) -> Any:
        column = np.full(len(steps), np.nan)
        column[np.searchsorted(steps, curve_steps)] = values
        return column

    columns: dict[str, Any] = {"step": steps.astype(np.int64)}
    first_curve = next(iter(curves_by_name.values()), None)
    if first_curve is not None:
        columns["tokens"] = align(first_curve.step, first_curve.tokens)
        columns["seconds"] = align(first_curve.step, first_curve.seconds)
    return columns | {name: align(curve.step, curve.value) for name, curve in curves_by_name.items()}


def table(columns: dict[str, Any], library: str | None) -> Any:
    """Return the columns as a DataFrame of `library`, or if None as a list of rows without their NaN cells."""
    if library is not None:
        return import_module(library).DataFrame(columns)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [{name: value for name, value in zip(columns, row, strict=True) if not math.isnan(value)} for row in rows]


def _dataframe_library() -> str | None:
    """Return an imported DataFrame library, or else an installed one. Prefer pandas."""
    installed = [name for name in ("pandas", "polars") if find_spec(name) is not None]
    return next(iter([*(name for name in installed if name in sys.modules), *installed]), None)


def _plot_metrics(run: RunData) -> Figure:
    """Return a figure with a plot over steps for each metric, training and validation together."""
    if find_spec("plotly") is None:
        raise missing_extra("plotly", "report", "plot")
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    from artel.reports.page.charts import build_charts
    from artel.reports.page.language import Language

    plots = build_charts([run], [run.folder.name], Language("en"))
    if not plots:
        raise InputError.at(str(run.folder), "nothing is logged yet", "plot it after a few steps of training")
    titles = [plot.title for plot in plots]
    figure = make_subplots(len(plots), 1, subplot_titles=titles, shared_xaxes=True, vertical_spacing=0.2 / len(plots))
    for row, plot in enumerate(plots, 1):
        for trace in plot.curves:
            style = "lines+markers" if trace.is_validation else "lines"
            color = _VALIDATION_COLOR if trace.is_validation else _TRAINING_COLOR
            line = {"color": color} if len(plot.curves) <= 2 else {}  # plotly's colors tell many curves apart
            is_first = trace.label not in {drawn.name for drawn in figure.data}
            curve_line = Scatter(
                x=trace.curve.step.astype(int), y=trace.curve.value, name=trace.label, mode=style, line=line,
                legendgroup=trace.label, showlegend=is_first,
            )  # fmt: skip
            figure.add_trace(curve_line, row, 1)
        name = plot.metric.replace("_", " ")  # tokens per second, which the title calls speed
        if name != plot.title.lower() and plot.metric in {**run.curves.training, **run.curves.validation}:
            figure.update_yaxes(title_text=name, row=row)
    figure.update_xaxes(title_text="step", row=len(plots))
    return figure.update_layout(height=_PLOT_PIXELS * len(plots), title_text=str(run.folder))
