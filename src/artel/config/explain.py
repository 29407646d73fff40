"""Turn pydantic's errors about a run file into problems with key, line and fix."""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import ValidationError

from artel.config.schema.quantities import OverLimitError
from artel.config.suggest import suggest_key, translate_objective
from artel.config.yaml_lines import Key, format_location
from artel.errors import Problem

_MAX_VALUE_CHARS = 200  # of an invalid value in a message

_BOUNDS = {
    "greater_than_equal": ("ge", "below", "write {:g} or more"),
    "greater_than": ("gt", "not above", "write more than {:g}"),
    "less_than_equal": ("le", "above", "write {:g} or less"),
    "less_than": ("lt", "not below", "write less than {:g}"),
}
"""pydantic's numeric errors -> (key of the bound in the context, what is wrong, fix)."""

UNKNOWN_KEY = "there is no such key"
_MAX_SUGGESTIONS = 100
"""Maximum unknown keys to suggest a correction for; a suggestion takes 1 ms."""


def explain(error: ValidationError, lines: dict[Key, str]) -> dict[Key, Problem]:
    """Convert pydantic's errors to problems, one per key."""
    problems: dict[Key, Problem] = {}
    num_unknown = 0
    for detail in error.errors():
        location = detail["loc"]
        key = tuple(part for part in location[:-1] if not _is_union_label(part))
        if location and (detail["type"] == "extra_forbidden" or not _is_union_label(location[-1])):
            key = (*key, location[-1])  # an unknown key may have any name
        if key in problems and not _is_number_error(detail):
            continue
        if detail["type"] == "extra_forbidden":
            num_unknown += 1
            what, fix = UNKNOWN_KEY, suggest_key(key) if num_unknown <= _MAX_SUGGESTIONS else ""
        else:
            what, fix = _describe_error(detail, key)
        problems[key] = Problem(format_location(key, lines), what, fix)
    return problems


def _describe_error(detail: Any, key: Key) -> tuple[str, str]:
    """Return (what is wrong, fix) for one of pydantic's errors."""
    kind, context = detail["type"], detail.get("ctx", {})
    dotted = ".".join(map(str, key))
    value = _format_value(detail["input"])
    if kind == "literal_error":
        word = value.strip("'")
        near = difflib.get_close_matches(word, re.findall(r"'([^']*)'", context["expected"]))
        near.sort(key=lambda name: sorted(name) != sorted(word))  # swapped letters first: gpro is grpo, not gspo
        fix = f"did you mean {near[0]}?" if near else ""
        if key == ("objective",) and (objective := translate_objective(detail["input"])):
            fix = f"artel calls it {objective}"
        return f"{value} is not one of {context['expected']}", fix
    if kind == "value_error":
        what, _, fix = str(context["error"]).partition("; ")
        return what, fix
    if kind in ("model_type", "dict_type"):
        fix = _suggest_section(dotted, detail["input"]) or f"write {dotted}: {{…}} with keys inside"
        return f"{value} is not a section", fix
    if kind == "list_type":
        return f"{value} is not a list", _suggest_section(dotted, detail["input"]) or f"write {dotted}: […]"
    if kind in _BOUNDS:
        bound, relation, fix = _BOUNDS[kind]
        return f"{value} is {relation} {context[bound]:g}", fix.format(context[bound])
    return f"{detail['msg'].lower()}, but it is {value}", ""


_EXAMPLES = {
    "model": "model: {{from: {}}}",
    "tokenizer": "tokenizer: {{from: {}}}",
    "data": "data: {{sources: [{{path: {}}}]}}",
    "data.sources": "sources: [{{path: {}}}]",
    "data.sources.0": "{{path: {}}}",
    "train": "train: {{budget: {}}}",
    "model.lora": "lora: {{rank: 16, alpha: 32}}",
    "tokenizer.train": "train: {{vocab: auto}}",
}
"""Replacement for a section written as one value; {} is the value."""


def _suggest_section(dotted: str, value: object) -> str:
    """Return what to write for a single value where a section or a list is expected, or "" if unknown."""
    example = _EXAMPLES.get(re.sub(r"\.\d+$", ".0", dotted), "")
    is_usable = value is True if "{}" not in example.replace("{{", "").replace("}}", "") else isinstance(value, str)
    return f"write {example.format(value)}" if example and is_usable else ""


def _is_number_error(detail: Any) -> bool:
    """True if the error is about a number. For a key that takes a word or a number, it is the relevant error."""
    return detail["type"] == "greater_than_equal" or isinstance(detail.get("ctx", {}).get("error"), OverLimitError)


def _format_value(value: object) -> str:
    """Return the repr of a value, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print more digits
        return "a number with over 4,300 digits"
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


def _is_union_label(part: str | int) -> bool:
    """True if a part of an error's location is the union member that pydantic tried, not a key."""
    return isinstance(part, str) and (part in ("str", "float", "int") or "[" in part)
