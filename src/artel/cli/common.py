"""What several verbs share: telling people on standard error, results as JSON on standard output."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Annotated, Any

import typer

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run file, a recipe's name, or the folder of an earlier run.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as train.learning_rate=3e-4.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def tell(text: str) -> None:
    """For people: on standard error, from the first process only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def print_json(result: dict[str, Any]) -> None:
    """For programs: one JSON document on standard output, from the first process only."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result, ensure_ascii=False), flush=True)


def quiet_libraries() -> None:
    """transformers' progress bars and advice are about its own command lines, not about this one."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Views of outputs are safe with who does not write into them; and reading pieces alone is what is meant.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    from transformers.utils import logging

    logging.disable_progress_bar()
