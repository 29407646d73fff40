"""OmegaConf's `${key}` in torchtune's YAML."""

from __future__ import annotations

import re
from typing import Any

from artel.config.converters.keys import YamlKeys

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MOST_ROUNDS = 10


def resolve(old: YamlKeys) -> None:
    """Put the values that `${key}` names in their place. Others (`${eval:…}`, no such key) are refused."""
    for key in old.given():
        value = old.peek(key)
        for _ in range(_MOST_ROUNDS):
            if not (isinstance(value, str) and "${" in value):
                break
            value = _replaced(old, value)
        if isinstance(value, str) and "${" in value:
            old.refuse(key, f"{value} cannot be resolved; write its value")
            value = None
        old.give_value(key, value)


def _replaced(old: YamlKeys, value: str) -> Any:
    """One round of replacing: a whole reference keeps the type of what it names."""
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return old.peek(whole[1]) if whole[1] in old.given() else value
    known = set(old.given())
    return _REFERENCE.sub(lambda match: str(old.peek(match[1])) if match[1] in known else match[0], value)
