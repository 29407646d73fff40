"""`artel doctor`: what this machine has, what artel would choose on it, and why."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from artel.cli.common import AsJson, Overrides, print_json, quiet_libraries


def doctor(
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run file, a recipe's name, or the folder of an earlier run.")
    ] = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine: what it has, what artel would choose on it and why, and what stands in its way.

    Paste what it prints into an issue. Nothing is written and no network is used; of variables that may be secret only
    that they are set is told.

    Example: artel doctor run.yaml
    """
    from artel.config import load_run

    run = load_run(name, overrides or []) if name else None
    variables = dict(os.environ)  # as they are before ours are added
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    quiet_libraries()
    from artel.using.doctor import examine

    found = examine(run, variables)
    if as_json:
        print_json(found.to_json())
    else:
        print(found)
