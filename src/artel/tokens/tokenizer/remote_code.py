"""Code in a model's repository (`auto_map`): it runs only where `model.trust_remote_code` names the repository.

Code in another repository never runs, whoever refers to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from artel.errors import InputError

KEY = "model.trust_remote_code"


def remedy(name: str) -> str:
    """The remedy with which the code of a repository runs."""
    return f"read that code, and where you trust it write {KEY}: {name}"


def check_whose(values: dict[str, Any], name: str) -> None:
    """Raise InputError where a configuration of the repository `name` refers to code in another one."""
    for reference in _references(values.get("auto_map")):
        owner, dashes, _ = reference.partition("--")
        if dashes and owner != name:
            fix = "take that repository, or put code and model into one folder and name it in model.from"
            raise InputError.at(KEY, f"the code of {name} lies in another repository, {owner}", fix)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _references(item)
