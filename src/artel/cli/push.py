"""`artel push`: a run's model and its card on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from artel.cli.common import AsJson, print_json
from artel.launching.quiet_libraries import quiet_libraries


def push(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the hub; NAME alone is one of your own.")],
    public: Annotated[
        bool, typer.Option("--public", help="Make the new repository public; it is private without this.")
    ] = False,
    step: Annotated[
        str, typer.Option(metavar="N", help="A checkpoint in place of the final model: its step, latest or best.")
    ] = "",
    revision: Annotated[
        str, typer.Option(metavar="BRANCH", help="By default main; of a checkpoint step-N. It is made if need be.")
    ] = "",
    license: Annotated[str, typer.Option(metavar="NAME", help="Of the model, as the hub names it: apache-2.0.")] = "",
    language: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="What it writes: en, ru; repeatable. By default data.clean.languages."),
    ] = None,
    base_model: Annotated[
        str, typer.Option(metavar="OWNER/NAME", help="The model that training began with, where the run has a folder.")
    ] = "",
    dry_run: Annotated[
        Path | None,
        typer.Option("--dry-run", metavar="DIR", help="Write what would be uploaded to a new folder; send nothing."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a run's model to the Hugging Face hub, with a model card made from the run.

    The token is HF_TOKEN, or what hf auth login stored.

    Example: artel push runs/tolstoy me/tolstoy --license apache-2.0 --language ru
    """
    quiet_libraries()
    from artel.inference.push import PushOptions
    from artel.inference.push import push as upload

    options = PushOptions(public, step, revision, license, tuple(language or ()), base_model, dry_run)
    done = upload(name, repo, options)
    if as_json:
        print_json(done.to_json())
