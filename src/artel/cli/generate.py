"""`artel generate`: write with a model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from artel.cli.common import AsJson, Overrides, print_json, quiet_libraries, tell


def generate(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run's folder, a model folder, a hub id; or a run file.")
    ],
    overrides: Overrides = None,
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads standard input.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the k likeliest; 0 for all.")] = 50,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest that sum to p.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds write equal texts.")] = 0,
    untrained: Annotated[bool, typer.Option("--untrained", help="A run's model before any training.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text, streamed as it is written.

    Example: artel generate runs/tolstoy --prompt "Пьер закашлялся и" --max-new-tokens 150
    """
    quiet_libraries()
    from artel.config import load_run
    from artel.errors import InputError, Problem
    from artel.models import Sampling
    from artel.using import open_model, open_untrained

    if overrides and not untrained:
        raise InputError([Problem("override", f"{overrides[0]} has no meaning here", "it goes with --untrained")])
    text = sys.stdin.read() if prompt == "-" else prompt
    opened = open_untrained(load_run(name, overrides or []), tell) if untrained else open_model(name)
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    written = []
    goes_on = not opened.objective.encoder  # a decoder's text is the prompt and what follows it
    if not as_json and goes_on:
        print(text, end="", flush=True)
    for piece in opened.objective.show(opened.model, text, sampling):
        written.append(piece)
        if not as_json:
            print(piece, end="", flush=True)
    if as_json:
        print_json({"prompt": text, "text": "".join(written)})
    else:
        print()
