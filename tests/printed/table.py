"""All walks, what each printed command is, and the page of figures that benchmarks/printed.py writes."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

from typer.main import get_command

from artel.cli.main import app
from printed.commands import Printed, documents, printed_in
from printed.walks import Step
from printed.walks_docs import DOCS
from printed.walks_readme import README
from printed.walks_recipes import RECIPES
from printed.walks_tutorials import TUTORIALS

WALKS = (*README, *DOCS, *TUTORIALS, *RECIPES)
STEPS = {step.text: step for walk in WALKS for step in walk.steps}
KINDS = ("run whole", "run in another way", "dry run or check", "pip install", "named in a sentence")
_MAKE = Step("make", instead="make -n", why="sets up an environment from a package index")
_CHECKS = ("config check", "--dry-run", "--help", " -n ")


def printed() -> list[Printed]:
    return [command for path in documents() for command in printed_in(path)]


def kind_of(text: str) -> str | None:
    """One of KINDS; None where nothing is known of a command."""
    step = STEPS.get(text)
    if step is not None:
        if any(sign in f"{step.instead} {step.more}" for sign in _CHECKS):
            return KINDS[2]
        return KINDS[1] if step.instead else KINDS[0]
    if extra_of(text) is not None:
        return KINDS[3]
    if text.startswith("make "):
        return KINDS[2]
    return KINDS[4] if _is_mention(text) else None


def extra_of(text: str) -> str | None:
    """EXTRA of `pip install '.[EXTRA]'`; empty for `pip install .`."""
    match = re.fullmatch(r"pip install (?:\.|'\.\[(\w+)\]')", text)
    return (match[1] or "") if match else None


@cache
def _command() -> Any:
    """`artel` with all its verbs, whose making takes a sixth of a second."""
    return get_command(app)


def _is_mention(text: str) -> bool:
    """A verb named in a sentence, perhaps with an option: both exist, and it needs more to be a command."""
    program, *rest = text.split()
    command = _command()
    while rest and hasattr(command, "commands") and rest[0] in command.list_commands(None):
        command, rest = command.get_command(None, rest[0]), rest[1:]
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    needs_more = hasattr(command, "commands") or any(argument.required for argument in arguments)
    options = {name for parameter in command.params for name in parameter.opts}
    return program == "artel" and needs_more and set(rest) <= options


def page() -> str:
    """benchmarks/printed.md."""
    commands = printed()
    by_document: dict[str, Counter[str]] = {}
    for command in commands:
        document = command.document if command.document.endswith((".md", ".sh")) else "headers of recipes"
        by_document.setdefault(document, Counter())[kind_of(command.text) or "not run"] += 1
    different = {command.text: kind_of(command.text) for command in commands}
    lines = [
        "# Printed commands",
        "",
        "Made by `python benchmarks/printed.py`. Each runs in a folder that is not the clone, with an empty home, as a",
        "shell reads it; overrides behind it make it small (`tests/test_printed_*.py`). One that stands in several",
        "places is run once.",
        "",
        f"| document | printed | {' | '.join(KINDS)} |",
        "|---" * (len(KINDS) + 2) + "|",
    ]
    for name, counts in by_document.items():
        lines.append(f"| {name} | {counts.total()} | {' | '.join(str(counts[kind] or '') for kind in KINDS)} |")
    total = Counter(different.values())
    numbers = " | ".join(f"**{total[kind]}**" for kind in KINDS)
    lines += [f"| all, each once | **{len(different)}** | {numbers} |", "", "What does not run as printed:", "",
              "| command | in its place | why |", "|---|---|---|"]  # fmt: skip
    for text in different:
        step = STEPS.get(text, _MAKE if text.startswith("make ") else None)
        if step is not None and kind_of(text) != KINDS[0]:
            place = step.instead or f"the same with `{step.more}`"
            place = place if place.startswith("the same") else f"`{place}`"
            lines.append(f"| `{text}` | {place} | {step.why or 'starts nothing'} |".replace("{clone}", "CLONE"))
    return "\n".join(lines) + "\n"
