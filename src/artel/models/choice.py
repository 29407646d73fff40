"""A choice that artel makes for its user, with its reason, for `artel doctor` and the log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why."""

    value: str
    why: str
