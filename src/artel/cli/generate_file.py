"""`artel generate --prompts FILE --out FILE`: what a model makes of each prompt of a file."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from artel.cli.common import print_json, tell
from artel.elapsed import pause, resume

if TYPE_CHECKING:
    from artel.inference.batch import Prompt

    Answering = Callable[[Sequence[Prompt], int], Generator[dict[str, Any], None, None]]
    """Opens the model: the results of prompts from a number on."""

_LINE_SECONDS = 10.0


def generate_file(
    name: str,
    answer: Answering,
    prompts_file: str,
    out: str,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Answer what is not answered yet, with progress. Raises InputError before the model is opened where it can."""
    from artel.inference.batch import Results, read_prompts, weights_of

    prompts = read_prompts(prompts_file)
    with Results.open(out, prompts, {"model": name, "weights": weights_of(name)} | settings) as results:
        before = results.done
        if before:
            tell(f"{before:,} of {len(prompts):,} prompts are answered in {out}")
        tokens, began = 0, time.monotonic()
        if before < len(prompts):
            made = answer(prompts, before)
            began = time.monotonic()
            with _Progress(before, len(prompts)) as progress, closing(made):
                for result in made:
                    results.add(result)
                    tokens += result.get("tokens", 0)
                    progress.show(results.done, tokens)
        seconds = time.monotonic() - began
    if as_json:
        counts = {"prompts": len(prompts), "answered": len(prompts) - before, "answered_before": before}
        print_json({"out": out, **counts, "tokens": tokens, "seconds": round(seconds, 3)})
        return
    rate = f", {tokens / seconds:,.0f} tokens/s" if tokens else ""
    tell(f"{len(prompts) - before:,} prompts answered in {seconds:.1f} s{rate}: {shlex.quote(out)}")


class _Progress:
    """A bar on a terminal, else a line every ten seconds; on standard error."""

    def __init__(self, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, completed=done, rate="")
        self._total = total
        self._began = self._told = time.monotonic()

    def __enter__(self) -> _Progress:
        pause()
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
        resume()

    def show(self, done: int, tokens: int) -> None:
        now = time.monotonic()
        rate = f"{tokens / max(now - self._began, 1e-9):,.0f} tokens/s" if tokens else ""
        self._bar.update(self._task, completed=done, rate=rate)
        if self._bar.disable and now - self._told >= _LINE_SECONDS:
            self._told = now
            tell(f"{done:,} of {self._total:,} prompts{f', {rate}' if rate else ''}")
