"""`artel push`: upload a run's model with a model card to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from artel.cli.common import AsJson, print_json
from artel.launching.quiet_libraries import quiet_libraries


def push(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Hub repository OWNER/NAME, or NAME for your own.")],
    public: Annotated[bool, typer.Option("--public", help="Create a public repository (default: private).")] = False,
    step: Annotated[
        str, typer.Option(metavar="N", help="Upload a checkpoint instead of the final model: its step, latest or best.")
    ] = "",
    revision: Annotated[
        str, typer.Option(metavar="BRANCH", help="Branch, created if needed (default: main; step-N for a checkpoint).")
    ] = "",
    license: Annotated[str, typer.Option(metavar="NAME", help="License by its name on the hub, e.g. apache-2.0.")] = "",
    language: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE", help="Language of the model, e.g. en. Repeatable (default: data.clean.languages)."
        ),
    ] = None,
    base_model: Annotated[
        str, typer.Option(metavar="OWNER/NAME", help="Base model on the hub, if the run started from a folder.")
    ] = "",
    dry_run: Annotated[
        Path | None,
        typer.Option("--dry-run", metavar="DIR", help="Write the upload to a new folder instead of sending it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a run's model to the Hugging Face hub, with a model card made from the run.

    The token is read from HF_TOKEN, or from `hf auth login`.

    Example: artel push runs/tolstoy me/tolstoy --license apache-2.0 --language ru
    """
    quiet_libraries()
    from artel.inference.push import PushOptions
    from artel.inference.push import push as upload

    options = PushOptions(public, step, revision, license, tuple(language or ()), base_model, dry_run)
    result = upload(name, repo, options)
    if as_json:
        print_json(result.to_json())
