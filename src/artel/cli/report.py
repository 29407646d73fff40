"""`artel report`: show runs in the terminal, as an HTML file or live in the browser. `artel watch`: follow a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from artel.cli.common import AsJson, print_json, print_status
from artel.launching.quiet_libraries import quiet_libraries

_ANSWER_WIDTH = 100
"""Characters of an answer in the terminal."""


def report(
    folders: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of one or more runs.")],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write an HTML report to this file."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve a live HTML report on this machine.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --live; 0 picks a free one.")] = 8420,
    language: Annotated[Literal["en", "ru"], typer.Option(help="Language of the HTML report.")] = "en",
    compressor: Annotated[
        bool, typer.Option("--compressor", help="Compare bits per byte with xz -9 on the same validation text.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the loss curve and the latest validation of a run, compare several runs, or write an HTML report.

    Example: artel report runs/demo --html report.html
    """
    if html is not None or live:
        result = _show_in_browser(folders, html, port if live else None, language)
    elif len(folders) > 1:
        result = _show_comparison(folders)
    else:
        result = _show_in_terminal(folders[0])
    if compressor:
        result["compressor"] = _measure_compressor(folders[0])
        print_status(
            f"bits per byte of the same validation text: xz -9 {result['compressor']['xz']:.3f}; "
            f"xz -9 after the training text {result['compressor']['xz_after_training_text']:.3f}"
        )
    if as_json:
        print_json(result)


def watch(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: AsJson = False,
) -> None:
    """Follow a run until it ends: loss curve, speed, time left and ranks. The run may train on another host.

    Example: artel watch runs/demo
    """
    from rich.console import Console

    from artel.reports.terminal import compare_runs
    from artel.reports.watch import watch as follow_run

    run = follow_run(folder, Console(stderr=True, highlight=False))
    if as_json:
        rows, _ = compare_runs([run])
        print_json(rows[0])


def _show_in_terminal(folder: str) -> dict[str, Any]:
    from artel.reports.curves import Curves, read_curves
    from artel.reports.details import detail_lines, read_details
    from artel.reports.rounds import RoundsReader, answer_lines, describe_round, learns_from_rewards
    from artel.reports.run_data import read_status
    from artel.reports.terminal import draw_curve
    from artel.training.comparison import choice_comparison, read_choice
    from artel.training.run_folder import RunFolder

    run_folder = RunFolder(Path(folder))
    _, rounds = RoundsReader(run_folder.rollouts).read()
    status = read_status(run_folder, Curves())
    has_begun = status.state not in ("not begun", "unknown")
    curves = Curves() if has_begun and not run_folder.metrics.exists() else read_curves(run_folder.metrics)
    has_rewards = learns_from_rewards(curves, rounds)
    print_status(*draw_curve(curves, "reward" if has_rewards else "loss"))
    status = read_status(run_folder, curves)
    if status.state != "complete":
        state = {"unknown": "not complete"}.get(status.state, status.state)
        doing = f", {status.doing}" if status.doing else ""
        hint = "" if state == "running" else f"; artel train {shlex.quote(folder)} resumes"
        print_status(f"{folder}: {state} at step {status.step:,}{doing}{hint}")
    if rounds and has_rewards:
        print_status(describe_round(rounds[0]), *answer_lines(rounds[0], _ANSWER_WIDTH))
    if curves.newest_validation:
        metrics = curves.newest_validation.items()
        scores = " · ".join(f"{name} {'NaN' if value is None else f'{value:.4f}'}" for name, value in metrics)
        print_status(f"validation: {scores}")
    choice = read_choice(run_folder)
    if choice is not None and (comparison := choice_comparison(choice)) is not None:
        print_status(comparison)
    details = _read_details_file(run_folder.validation)
    print_status(*detail_lines(read_details(details)))
    newest = {**curves.tasks_line, **curves.validation_line}
    optional = {name: value for name, value in (("details", details), ("choice", choice)) if value}
    return {"steps": curves.step, "state": status.state, **newest, **optional}


def _read_details_file(file: Path) -> dict[str, Any]:
    """Return the content of RUN/validation.json. Empty if it is missing or unreadable."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _show_comparison(folders: list[str]) -> dict[str, Any]:
    from artel.reports.run_data import read_runs
    from artel.reports.terminal import compare_runs

    rows, lines = compare_runs(read_runs(folders))
    print_status(*lines)
    return {"runs": rows}


def _show_in_browser(folders: list[str], html: Path | None, port: int | None, language: str) -> dict[str, Any]:
    from artel.reports.page import Page, check_plotly
    from artel.reports.run_data import read_runs
    from artel.storage import write_output

    check_plotly()
    result: dict[str, Any] = {}
    if html is not None:
        runs = read_runs(folders)
        write_output(html, Page(language).html(runs).encode())
        print_status(f"{html}: the report of {', '.join(folders)}; open it in a browser")
        result = {"html": str(html), "runs": [{"run": str(run.folder), "state": run.status.state} for run in runs]}
    if port is not None:
        from artel.reports.live import serve as serve_report

        serve_report(folders, port, language)
    return result


def _measure_compressor(folder: str) -> dict[str, float]:
    quiet_libraries()
    from artel.config import load_run
    from artel.preparing import prepare
    from artel.reports.terminal import measure_compression

    prepared = prepare(load_run(folder))
    store = prepared.open()
    return measure_compression(store.train, store.validation, prepared.tokenizer())
