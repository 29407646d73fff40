"""YAML of other tools: flatten keys, format values for messages, and write run files with comments."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml

from artel.config.yaml_lines import Key, read_yaml

_SECRET = re.compile(r"(hub|hf|ms|om|auth)_(hub_)?token$|(api_key|secret|password)$")
_YAML_WIDTH = 1_000_000  # no value is folded, so that each key has one line
# Sections that are passed on as one value.
_OPAQUE_SECTIONS = (
    "lr_scheduler_kwargs",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
    "optim_args",
)


def is_opaque(key: Key) -> bool:
    """True if a section is one value."""
    return key[-1] in _OPAQUE_SECTIONS


def flatten(value: Any, is_value: Callable[[Key], bool] = is_opaque, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield (key, value) of each value without a section below it. A list without mappings is one value."""
    items: Any = None
    if key and is_value(key):
        yield key, value
    elif isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) and item for item in value):
        items = enumerate(value)
    elif key:
        yield key, value
    for name, item in items or ():
        yield from flatten(item, is_value, (*key, name))


def top_level_keys(text: str) -> set[str]:
    """Return the keys at the start of lines, also for a file that is not valid YAML."""
    return {line.partition(":")[0].strip("\"' ") for line in text.splitlines() if ":" in line and line[:1].strip()}


def format_value(value: Any, key: str = "") -> str:
    """Return a value in one line of at most 80 characters, since chat templates are long. Secrets are hidden."""
    if _SECRET.search(key) and isinstance(value, str):
        return "***"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def suggest_similar(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?`, or "" if the name itself is known or none is similar."""
    near = [] if name in (candidates := sorted(known)) else difflib.get_close_matches(name, candidates, 1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


def add_comments(run: dict[str, Any], comments: dict[str, str]) -> str:
    """Return the YAML of a run file, with each of `comments` above its key."""
    text = yaml.safe_dump(run, sort_keys=False, allow_unicode=True, width=_YAML_WIDTH)
    _, locations, _ = read_yaml(text, "")
    comment_at: dict[int, str] = {}
    for target_key, comment in comments.items():
        key = tuple(int(part) if part.isdecimal() else part for part in target_key.split("."))
        if key in locations:
            comment_at[int(locations[key].rpartition(":")[2])] = comment
    lines = []
    for line_number, line in enumerate(text.splitlines(), 1):
        if line_number in comment_at:
            lines.append(f"{line[: len(line) - len(line.lstrip())]}# {comment_at[line_number]}")
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)
