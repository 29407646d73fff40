"""`artel watch`: follow a run in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from artel.cli.common import AsJson, print_json


def watch(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    as_json: AsJson = False,
) -> None:
    """Follow a run until it ends: its curve, rate, time left and ranks; also one that another host trains.

    Example: artel watch runs/demo
    """
    from rich.console import Console

    from artel.reports.terminal import compared
    from artel.reports.watch import watch

    run = watch(folder, Console(stderr=True, highlight=False))
    if as_json:
        rows, _ = compared([run])
        print_json(rows[0])
