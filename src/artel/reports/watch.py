"""`artel watch`: follows a run in the terminal until it ends, and shows its curve, speed, time left and ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from artel.elapsed import hide_elapsed
from artel.errors import InputError, WorkError
from artel.printable import escape_line
from artel.reports.rounds import answer_lines
from artel.reports.run_data import RunData, RunReader
from artel.reports.status import State
from artel.reports.terminal import draw_curve

_POLL_SECONDS = 1.0
_LINE_SECONDS = 10.0
_MAX_RANKS = 16
_ANSWER_WIDTH = 60
"""Characters of an answer in a line of output that is not a terminal."""
_END_STATES: tuple[State, ...] = ("complete", "stopped", "failed", "dead", "unknown")
_STYLES = {"complete": "green", "running": "cyan", "stopped": "yellow", "failed": "red", "dead": "red"}


def watch(folder: str, console: Console) -> RunData:
    """Follow a run until it ends, and return its final contents.

    Raise InputError if the folder is not a run's, WorkError if the run failed or died.
    """
    reader = RunReader(folder, max_points=1000)
    run = reader.read()
    if console.is_terminal:
        with hide_elapsed(), Live(render_screen(run, console.width), console=console, refresh_per_second=4) as live:
            run = _follow(reader, run, lambda run: live.update(render_screen(run, console.width)))
    else:
        show = _LinePrinter(console)
        show(run)
        run = _follow(reader, run, show)
        show.end(run)
    _raise_if_failed(run)
    return run


def _follow(reader: RunReader, run: RunData, show: Callable[[RunData], None]) -> RunData:
    while run.status.state not in _END_STATES:
        time.sleep(_POLL_SECONDS)
        run = reader.read()
        show(run)
    return run


def _raise_if_failed(run: RunData) -> None:
    status, folder = run.status, str(run.folder)
    if status.state == "dead":
        message = f"no sign of life for {status.silent_seconds:.0f} s after step {status.step}: its processes are gone"
        raise WorkError.at(folder, message, "the same command resumes from its last checkpoint")
    if status.state == "failed":
        raise WorkError.at(folder, f"failed after step {status.step}: {status.message}", "the same command resumes")
    if status.state == "unknown":
        message = "has no status files, so it is unknown whether it is running; its logged metrics are shown"
        raise InputError.at(folder, message, "artel report shows it too")


# On a terminal ---------------------------------------------------------------------------


def render_screen(run: RunData, width: int) -> RenderableType:
    """Return the full screen for a terminal of `width` columns."""
    rows: list[RenderableType] = [
        _title_line(run),
        *_curve_lines(run, width),
        _progress_row(run, width),
        Text(" · ".join(format_metrics(run))),
        *(Text(line) for line in _answer_lines(run, width)),
    ]
    if len(run.ranks) > 1 or run.status.silent_ranks:
        rows.append(_ranks_table(run))
    return Group(*rows)


def _title_line(run: RunData) -> Text:
    state = run.status.state
    model = str(run.starts[-1].chosen.get("model", "")) if run.starts else ""
    title = Text()
    title.append(escape_line(str(run.folder)), style="bold")
    title.append(f"  {state}", style=_STYLES.get(state, "dim"))
    title.append(f"  {escape_line(' · '.join(text for text in (run.objective, model) if text))}", style="dim")
    return title


def _curve_lines(run: RunData, width: int) -> list[Text]:
    """Return the curve of `artel report`, as wide as the terminal allows."""
    return [Text(line) for line in draw_curve(run.curves, run.main_metric, max(20, min(100, width - 12)))]


def _answer_lines(run: RunData, width: int) -> list[str]:
    """Return the best and the worst answer of the newest round; none if the run has no rewards."""
    return answer_lines(run.rounds[0], width) if run.rounds and run.learns_from_rewards else []


def _progress_row(run: RunData, width: int) -> RenderableType:
    fraction = run.fraction_done
    if fraction is None:
        return Text(f"step {run.status.step:,}")
    row = Table.grid(padding=(0, 1))
    row.add_row(
        format_position(run),
        ProgressBar(total=1.0, completed=fraction, width=max(10, min(60, width - 40))),
        format_time_left(run),
    )
    return row


def _ranks_table(run: RunData) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "host", "device", "step", "memory", "state"):
        table.add_column(name, justify="right" if name in ("rank", "step", "memory") else "left")
    silent = set(run.status.silent_ranks)
    # Silent ranks first, then slow ones.
    ranks = sorted(run.ranks, key=lambda rank: (rank.rank not in silent, rank.step, rank.rank))
    for rank in ranks[:_MAX_RANKS]:
        state = "silent" if rank.rank in silent else rank.state
        memory = f"{rank.memory_gib:.2f} GiB"
        cells = (str(rank.rank), escape_line(rank.host), rank.device, f"{rank.step:,}", memory, state)
        table.add_row(*cells, style="red" if state == "silent" else None)
    if len(ranks) > _MAX_RANKS:
        table.add_row("", f"and {len(ranks) - _MAX_RANKS} more")
    return table


# On a terminal and in lines ---------------------------------------------------------------------------


def format_position(run: RunData) -> str:
    """Return `step 5 of 100`, or for a run on a budget `step 5, 20% of the time`."""
    fraction = run.fraction_done
    if run.steps:
        return f"step {run.status.step:,} of {run.steps:,}"
    return f"step {run.status.step:,}" + (f", {fraction:.0%} of the time" if fraction is not None else "")


def format_time_left(run: RunData) -> str:
    seconds = run.seconds_left if run.status.state == "running" else None
    return "" if seconds is None else f"{timedelta(seconds=round(seconds))} left"


def format_metrics(run: RunData) -> list[str]:
    """Return the newest metrics, each with its name."""
    newest, validation = run.curves.newest, run.curves.newest_validation
    metrics = [run.status.doing] if run.status.state == "running" and run.status.doing else []
    if run.rounds and run.learns_from_rewards:
        round_ = run.rounds[0]
        metrics.append(f"round {round_.number:,}")
        metrics.append(f"reward {round_.reward:.4f} ± {round_.deviation:.4f}")
        metrics.append(f"signal {round_.signal:.0%}")
    if isinstance(newest.get("loss"), int | float):
        metrics.append(f"loss {newest['loss']:.4f}")
    if isinstance(validation.get(run.main_metric), int | float):
        step = run.curves.newest_validation_step
        metrics.append(f"validation {validation[run.main_metric]:.4f} (step {step:,})")
    if run.tokens_per_second is not None:
        metrics.append(f"{run.tokens_per_second:,.0f} tokens/s")
    if isinstance(newest.get("mfu"), int | float):
        metrics.append(f"MFU {newest['mfu']:.1%}")
    if isinstance(newest.get("memory_gib"), int | float):
        metrics.append(f"{newest['memory_gib']:.2f} GiB")
    if (elapsed := run.elapsed_seconds) is not None:
        metrics.append(f"{timedelta(seconds=round(elapsed))}{' so far' if run.status.state == 'running' else ''}")
    return metrics


class _LinePrinter:
    """Prints a line when something has changed, at most every ten seconds. For output that is not a terminal."""

    def __init__(self, console: Console, seconds: float = _LINE_SECONDS) -> None:
        self._console, self._seconds = console, seconds
        self._last_print, self._last_text = -math.inf, ""

    def __call__(self, run: RunData) -> None:
        now = time.monotonic()
        if now - self._last_print >= self._seconds:
            self._last_print = now
            self._print(run)

    def end(self, run: RunData) -> None:
        """Print the final state."""
        self._print(run)

    def _print(self, run: RunData) -> None:
        fields = [run.status.state, format_position(run), *format_metrics(run), format_time_left(run)]
        fields += (" ".join(line.split()) for line in _answer_lines(run, _ANSWER_WIDTH))
        text = " · ".join(field for field in fields if field)
        if text == self._last_text:
            return
        self._last_text = text
        self._console.print(escape_line(f"{run.folder}: {text}"), soft_wrap=True, highlight=False, markup=False)
