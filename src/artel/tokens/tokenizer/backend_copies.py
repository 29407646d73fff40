"""Copies of a tokenizer's backend that differ in how they read a text, with the same ids for its tokens."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

_NO_CHARACTER = "\ufdd0"  # of Unicode's noncharacters, which no text has


def is_unigram(backend: Any) -> bool:
    return type(backend.model).__name__ == "Unigram"


def without_special_tokens(backend: Any, special: Collection[str]) -> Any:
    """Return a copy of a Unigram backend that takes no letters of a text for one of `special`.

    Such models (T5, XLM-R) have the special tokens in their vocabulary, as pieces of the best score.
    """
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in special]
    for piece in state["model"]["vocab"]:
        piece[0] = f"{_NO_CHARACTER}{piece[0]}" if piece[0] in special else piece[0]
    return type(backend).from_str(json.dumps(state))


def without_added_space(backend: Any) -> Any:
    """Return a copy of a backend that adds no space before a text, or `backend` itself if it adds none."""
    steps = [step for step in (backend.normalizer, backend.pre_tokenizer) if step is not None]
    if all(_without_added_space(state) == state for state in (json.loads(step.__getstate__()) for step in steps)):
        return backend
    state = json.loads(backend.to_str())
    state |= {name: _without_added_space(state[name]) for name in ("normalizer", "pre_tokenizer")}
    return type(backend).from_str(json.dumps(state))


def _without_added_space(step: Any) -> Any:
    """Return the state of a normalizer or pre-tokenizer, changed to add no space. None if it only adds one."""
    if not isinstance(step, dict) or step["type"] == "Prepend":
        return None
    for parts in ("normalizers", "pretokenizers"):
        if parts in step:
            step = step | {parts: [part for one in step[parts] if (part := _without_added_space(one)) is not None]}
    off = {"prepend_scheme": "never", "add_prefix_space": False}
    return step | {key: value for key, value in off.items() if key in step}
