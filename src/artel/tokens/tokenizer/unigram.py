"""Unigram models (T5, XLM-R), whose vocabulary has the special tokens as pieces of the best score."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

_NO_CHARACTER = "\ufdd0"  # of Unicode's noncharacters, which no text has


def is_unigram(backend: Any) -> bool:
    return type(backend.model).__name__ == "Unigram"


def without_special_tokens(backend: Any, special: Collection[str]) -> Any:
    """A copy of a Unigram backend, with the same ids, that takes no letters of a text for one of `special`."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in special]
    for piece in state["model"]["vocab"]:
        piece[0] = f"{_NO_CHARACTER}{piece[0]}" if piece[0] in special else piece[0]
    return type(backend).from_str(json.dumps(state))
