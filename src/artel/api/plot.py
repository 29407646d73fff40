"""The curves of a run as a plotly figure."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from artel.errors import InputError, missing_extra

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from artel.reports.run_data import RunData

_PLOT_PIXELS = 240  # height of one plot
_TRAINING_COLOR, _VALIDATION_COLOR = "#1f77b4", "#d62728"


def figure(run: RunData) -> Figure:
    """Return a figure with the plots of the report: one per metric, training and validation together, over steps.

    Raise InputError if plotly is not installed or nothing is logged yet.
    """
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
    plotly_figure = make_subplots(
        len(plots), 1, subplot_titles=titles, shared_xaxes=True, vertical_spacing=0.2 / len(plots)
    )
    for row, plot in enumerate(plots, 1):
        for _, curve, is_validation, label in plot.curves:
            style = "lines+markers" if is_validation else "lines"
            colour = _VALIDATION_COLOR if is_validation else _TRAINING_COLOR
            is_first = label not in {trace.name for trace in plotly_figure.data}
            line = Scatter(
                x=curve.step.astype(int), y=curve.value, name=label, mode=style, line={"color": colour},
                legendgroup=label, showlegend=is_first,
            )  # fmt: skip
            plotly_figure.add_trace(line, row, 1)
        name = plot.metric.replace("_", " ")  # tokens per second, which the title calls speed
        if name != plot.title.lower():
            plotly_figure.update_yaxes(title_text=name, row=row)
    plotly_figure.update_xaxes(title_text="step", row=len(plots))
    return plotly_figure.update_layout(height=_PLOT_PIXELS * len(plots), title_text=str(run.folder))
