"""Turn pydantic's errors about a run file into problems with key, line and fix."""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import ValidationError

from artel.config.schema.quantities import OverLimit
from artel.config.suggest import key_advice, other_objective
from artel.config.yaml_lines import Key, place_of
from artel.errors import Problem

_LONGEST_SHOWN = 200  # characters of a wrong value in a message

_BOUNDS = {
    "greater_than_equal": ("ge", "below", "write {:g} or more"),
    "greater_than": ("gt", "not above", "write more than {:g}"),
    "less_than_equal": ("le", "above", "write {:g} or less"),
    "less_than": ("lt", "not below", "write less than {:g}"),
}
"""Pydantic's errors of numbers: where the bound is in the context, how a value stands to it, what to write."""

UNKNOWN_KEY = "there is no such key"
_MOST_GUESSES = 100
"""Unknown keys of which it is guessed what they mean, which takes a millisecond each."""


def explain(error: ValidationError, lines: dict[Key, str]) -> dict[Key, Problem]:
    """Pydantic's errors as problems with key, line and remedy, one for each key."""
    problems: dict[Key, Problem] = {}
    guesses = 0
    for detail in error.errors():
        place = detail["loc"]
        key = tuple(part for part in place[:-1] if not _is_union_label(part))
        if place and (detail["type"] == "extra_forbidden" or not _is_union_label(place[-1])):
            key = (*key, place[-1])  # an unknown key may have any name
        dotted = ".".join(str(part) for part in key)
        if key in problems and not _is_plainer(detail):
            continue
        line = place_of(key, lines)
        kind, context = detail["type"], detail.get("ctx", {})
        if kind == "extra_forbidden":
            guesses += 1
            what, fix = UNKNOWN_KEY, key_advice(key) if guesses <= _MOST_GUESSES else ""
        elif kind == "literal_error":
            near = difflib.get_close_matches(
                _shown(detail["input"]).strip("'"), re.findall(r"'([^']*)'", context["expected"]), 1
            )
            what = f"{_shown(detail['input'])} is not one of {context['expected']}"
            fix = f"did you mean {near[0]}?" if near else ""
            if key == ("objective",) and (other := other_objective(detail["input"])):
                fix = f"artel calls it {other}"
        elif kind == "value_error":
            what, _, fix = str(context["error"]).partition("; ")
        elif kind in ("model_type", "dict_type"):
            what = f"{_shown(detail['input'])} is not a section"
            fix = _example(dotted, detail["input"]) or f"write {dotted}: {{…}} with keys inside"
        elif kind == "list_type":
            what = f"{_shown(detail['input'])} is not a list"
            fix = _example(dotted, detail["input"]) or f"write {dotted}: […]"
        elif kind in _BOUNDS:
            name, what_it_is, remedy = _BOUNDS[kind]
            what, fix = f"{_shown(detail['input'])} is {what_it_is} {context[name]:g}", remedy.format(context[name])
        else:
            what, fix = f"{detail['msg'].lower()}, but it is {_shown(detail['input'])}", ""
        problems[key] = Problem(line, what, fix)
    return problems


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
"""Replacement for a section written as one value; {} stands for the value."""


def _example(dotted: str, value: object) -> str:
    """Return what a single value in place of a section or a list means; empty if unknown."""
    example = _EXAMPLES.get(re.sub(r"\.\d+$", ".0", dotted), "")
    is_fitting = value is True if "{}" not in example.replace("{{", "").replace("}}", "") else isinstance(value, str)
    return f"write {example.format(value)}" if example and is_fitting else ""


def _is_plainer(detail: Any) -> bool:
    """True for an error about a number, where a key takes a word or a number: the user wrote a number."""
    return detail["type"] == "greater_than_equal" or isinstance(detail.get("ctx", {}).get("error"), OverLimit)


def _shown(value: object) -> str:
    """A value as Python writes it, cut off where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of over 4,300 digits
        return "a number too long to be shown"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _is_union_label(part: str | int) -> bool:
    """Pydantic adds the name of the tried type to the place of an error inside a union."""
    return isinstance(part, str) and (part in ("str", "float", "int") or "[" in part)
