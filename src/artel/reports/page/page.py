"""The report as one HTML file: rendered templates, data of the plots, style, script and plotly.js.

Jinja escapes text by users and models, or it is embedded as JSON. A Content Security Policy allows only the page's
three scripts, by hash, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator, Sequence
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
from artel.reports.page.views import build_view, details_view, make_table
from artel.reports.run_data import RunData

COLORS = {
    "light": ["#0b6e99", "#c2693d", "#5b8c3a", "#8b5fa8", "#b8860b", "#b5446e", "#3d8b7d", "#6b5d4d"],
    "dark": ["#58b4dc", "#e0935f", "#9cc46c", "#b78fd6", "#dcb04a", "#e07fa5", "#6cc0b0", "#b8a690"],
}
_SECTIONS = {
    "details": "details",
    "rounds": "rounds",
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
"""Sections after the curves, in order: template name -> word for the title."""
_SECTION_ENTRIES = {"text": ("ledger",), "time": ("profile",), "plan": ("plan", "choice")}
"""Entries of a view that fill a section, if their names differ from the section's. One entry is enough."""


def check_plotly() -> None:
    """Raise InputError if plotly is not installed."""
    if find_spec("plotly") is None:
        raise missing_extra("plotly", "report", "--html")


class Page:
    """The report in one language: a single file, or served `live` and updated section by section."""

    def __init__(self, language: str = "en", *, live: bool = False) -> None:
        self._language = Language(language)
        self._live = live

    def html(self, runs: Sequence[RunData]) -> str:
        """Return the full page. Raise InputError if plotly is not installed."""
        check_plotly()
        report = _Report(runs, self._language)
        sections = report.sections
        data = {
            "live": self._live,
            "colors": COLORS,
            "separators": self._language.separators(),
            "words": self._language.words,
            "plots": report.plots,
        }
        plotly, script = _read_plotly(), _read_template("report.js")
        return _template_environment().get_template("report.html").render(
            language=self._language.name,
            w=SimpleNamespace(**self._language.words),
            title=f"{', '.join(report.names)} · artel",
            policy=self._content_security_policy(plotly, script),
            css=Markup(_read_template("report.css")),
            axes=charts.list_axes(runs),
            parts={name: Markup(html) for name, html in sections.items()},
            sections=[
                {"id": name, "title": self._language[title]}
                for name, title in _SECTIONS.items()
                if sections[name] or self._live
            ],
            version=artel.__version__,
            made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            data=Markup(_to_script_json(data)),
            plotly=Markup(plotly),
            script=Markup(script),
        )  # fmt: skip

    def event(self, runs: Sequence[RunData]) -> bytes:
        """Return the current sections and plot data as one line of JSON, for an open page."""
        report = _Report(runs, self._language)
        return orjson.dumps({"parts": report.sections, "plots": report.plots, "axes": charts.list_axes(runs)})

    def _content_security_policy(self, *scripts: str) -> str:
        digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
        hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
        connect = "'self'" if self._live else "'none'"
        return (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src {connect}; base-uri 'none'; form-action 'none'"
        )


class _Report:
    """Content of the page for some runs."""

    def __init__(self, runs: Sequence[RunData], language: Language) -> None:
        self._runs, self._language = runs, language
        self.names = _name_runs(runs)
        colors = COLORS["light"]
        self._views = [
            build_view(run, index, name, colors[index % len(colors)], language)
            | {"details": details_view(run, language)}
            for index, (run, name) in enumerate(zip(runs, self.names, strict=True))
        ]
        self._charts = charts.build_charts(runs, self.names, language)

    @cached_property
    def plots(self) -> dict[str, Any]:
        """Data of all plots."""
        bars = [view[name]["bars"] for view in self._views for name in ("ledger", "profile") if view[name]]
        return {
            "charts": [charts.plot_data(chart, self._runs, self._language) for chart in self._charts],
            "bars": bars,
        }

    @cached_property
    def sections(self) -> dict[str, str]:
        """HTML by section. Empty for sections without content."""
        context = {
            "w": SimpleNamespace(**self._language.words),
            "runs": self._views,
            "notices": list(self._iterate_notices()),
            "differences": self._differences_table(),
            "charts": [
                {
                    "id": chart.id,
                    "title": chart.title,
                    "about": chart.description,
                    "wide": index == 0,
                    "table": charts.build_table(chart, self._language),
                }
                for index, chart in enumerate(self._charts)
            ],
        }
        names = ["head", "curves", *(name for name in _SECTIONS if self._has_content(name))]
        rendered = {name: _template_environment().get_template(f"{name}.html").render(context) for name in names}
        return dict.fromkeys(("head", "curves", *_SECTIONS), "") | rendered

    def _has_content(self, section: str) -> bool:
        if section == "differences":
            return len(self._runs) > 1
        entries = _SECTION_ENTRIES.get(section, (section,))
        return section in ("file", "repeat") or any(view[entry] for view in self._views for entry in entries)

    def _iterate_notices(self) -> Iterator[str]:
        """Yield warnings about incomplete files, and about runs that cannot be compared."""
        for run in self._runs:
            for file in run.torn_files:
                if run.status.state != "running":
                    yield self._language["torn"].format(file=file)
        objectives = list(dict.fromkeys(run.objective for run in self._runs))
        if len(objectives) > 1:
            yield self._language["other_objectives"].format(objectives=", ".join(objectives))
        elif any(run.config.get("tokenizer") != self._runs[0].config.get("tokenizer") for run in self._runs):
            yield self._language["other_tokenizers"]

    def _differences_table(self) -> dict[str, Any]:
        rows = run_file.find_differences([run.config for run in self._runs])
        columns = [self._language["key"], *self.names]
        cells = [[key, *(run_file.format_yaml(value) for value in values)] for key, values in rows.items()]
        return make_table(columns, cells, code=True)


def _name_runs(runs: Sequence[RunData]) -> list[str]:
    """Name each run after its folder, or by its path if two folders share a name."""
    folder_names = [run.folder.absolute().name for run in runs]
    return folder_names if len(set(folder_names)) == len(folder_names) else [str(run.folder) for run in runs]


def _to_script_json(data: dict[str, Any]) -> str:
    """Return JSON that cannot close its script element."""
    text = orjson.dumps(data).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _template_environment() -> Environment:
    return Environment(loader=PackageLoader("artel.reports.page"), autoescape=True, undefined=StrictUndefined)


@cache
def _read_template(name: str) -> str:
    return files("artel.reports.page").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _read_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
