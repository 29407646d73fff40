"""The report as one HTML file: rendered templates, data of the plots, style, script and plotly.js.

Text by users and models is escaped by Jinja or embedded as JSON. A Content Security Policy allows only the page's own
three scripts, by hash, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.resources import files
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import artel
from artel.errors import missing_extra
from artel.reports.page import charts, run_file
from artel.reports.page.language import Language
from artel.reports.page.views import details_view, table, view
from artel.reports.run_data import RunData

COLORS = {
    "light": ["#0b6e99", "#c2693d", "#5b8c3a", "#8b5fa8", "#b8860b", "#b5446e", "#3d8b7d", "#6b5d4d"],
    "dark": ["#58b4dc", "#e0935f", "#9cc46c", "#b78fd6", "#dcb04a", "#e07fa5", "#6cc0b0", "#b8a690"],
}
_SECTIONS = {
    "details": "details",
    "samples": "samples",
    "text": "text",
    "time": "profile",
    "plan": "plan",
    "differences": "differences",
    "ranks": "ranks",
    "faults": "faults",
    "file": "run_file",
    "repeat": "repeat",
}
"""Sections after the curves, in order: name of the template -> word for the title."""
_SECTION_ENTRIES = {"text": ("ledger",), "time": ("profile",), "plan": ("plan", "choice")}
"""Entries of a view that fill a section, where they are not named like the section. One is enough."""


def check_plotly() -> None:
    """Raise InputError if plotly is not installed."""
    if find_spec("plotly") is None:
        raise missing_extra("plotly", "report", "--html")


class Page:
    """The report in one language: a single file, or served `live` and updated part by part."""

    def __init__(self, language: str = "en", *, live: bool = False) -> None:
        self._words = Language(language)
        self._live = live

    def html(self, runs: Sequence[RunData]) -> str:
        """Return the full page. Raise InputError if plotly is not installed."""
        check_plotly()
        report = _Report(runs, self._words)
        parts = report.parts
        data = {
            "live": self._live,
            "colors": COLORS,
            "separators": self._words.separators(),
            "words": self._words.words,
            "plots": report.plots,
        }
        plotly, script = _plotly(), _read_template("report.js")
        return _templates().get_template("report.html").render(
            language=self._words.name,
            w=SimpleNamespace(**self._words.words),
            title=f"{', '.join(report.names)} · artel",
            policy=self._policy(plotly, script),
            css=Markup(_read_template("report.css")),
            axes=charts.axes(runs),
            parts={name: Markup(part) for name, part in parts.items()},
            sections=[
                {"id": name, "title": self._words[title]}
                for name, title in _SECTIONS.items()
                if parts[name] or self._live
            ],
            version=artel.__version__,
            made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            data=Markup(_for_script(data)),
            plotly=Markup(plotly),
            script=Markup(script),
        )  # fmt: skip

    def event(self, runs: Sequence[RunData]) -> bytes:
        """Return the current parts and plot data as one line of JSON, for an open page."""
        report = _Report(runs, self._words)
        return orjson.dumps({"parts": report.parts, "plots": report.plots, "axes": charts.axes(runs)})

    def _policy(self, *scripts: str) -> str:
        digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
        hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
        connect = "'self'" if self._live else "'none'"
        return (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src {connect}; base-uri 'none'; form-action 'none'"
        )


class _Report:
    """Content of the page for some runs."""

    def __init__(self, runs: Sequence[RunData], words: Language) -> None:
        self._runs, self._words = runs, words
        self.names = _names(runs)
        colors = COLORS["light"]
        self._views = [
            view(run, number, name, colors[number % len(colors)], words) | {"details": details_view(run, words)}
            for number, (run, name) in enumerate(zip(runs, self.names, strict=True))
        ]
        self._charts = charts.charts(runs, self.names, words)

    @cached_property
    def plots(self) -> dict[str, Any]:
        """Data of all plots."""
        bars = [view[name]["bars"] for view in self._views for name in ("ledger", "profile") if view[name]]
        return {
            "charts": [charts.plot_data(chart, self._runs, self._words) for chart in self._charts],
            "bars": bars,
        }

    @cached_property
    def parts(self) -> dict[str, str]:
        """HTML by part. Empty for parts without content."""
        context = {
            "w": SimpleNamespace(**self._words.words),
            "runs": self._views,
            "notices": list(self._notices()),
            "differences": self._differences(),
            "charts": [
                {
                    "id": chart.id,
                    "title": chart.title,
                    "about": chart.description,
                    "wide": number == 0,
                    "table": charts.table(chart, self._words),
                }
                for number, chart in enumerate(self._charts)
            ],
        }
        names = ["head", "curves", *(name for name in _SECTIONS if self._has(name))]
        rendered = {name: _templates().get_template(f"{name}.html").render(context) for name in names}
        return dict.fromkeys(("head", "curves", *_SECTIONS), "") | rendered

    def _has(self, section: str) -> bool:
        if section == "differences":
            return len(self._runs) > 1
        needs = _SECTION_ENTRIES.get(section, (section,))
        return section in ("file", "repeat") or any(view[part] for view in self._views for part in needs)

    def _notices(self) -> Any:
        """Yield warnings that apply to all runs together."""
        for run in self._runs:
            for file in run.torn:
                if run.status.state != "running":
                    yield self._words["torn"].format(file=file)
        objectives = list(dict.fromkeys(run.objective for run in self._runs))
        if len(objectives) > 1:
            yield self._words["other_objectives"].format(objectives=", ".join(objectives))
        elif any(run.config.get("tokenizer") != self._runs[0].config.get("tokenizer") for run in self._runs):
            yield self._words["other_tokenizers"]

    def _differences(self) -> dict[str, Any]:
        rows = run_file.differences([run.config for run in self._runs])
        columns = [self._words["key"], *self.names]
        cells = [[key, *(run_file.in_yaml(value) for value in values)] for key, values in rows.items()]
        return table(columns, cells, code=True)


def _names(runs: Sequence[RunData]) -> list[str]:
    """Name each run after its folder, or by its path if two folders share a name."""
    folder_names = [run.folder.absolute().name for run in runs]
    return folder_names if len(set(folder_names)) == len(folder_names) else [str(run.folder) for run in runs]


def _for_script(data: dict[str, Any]) -> str:
    """Return JSON that cannot close its script element."""
    text = orjson.dumps(data).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _templates() -> Environment:
    return Environment(loader=PackageLoader("artel.reports.page"), autoescape=True, undefined=StrictUndefined)


@cache
def _read_template(name: str) -> str:
    return files("artel.reports.page").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
