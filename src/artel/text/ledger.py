"""The ledger: every document read, kept, or dropped with its reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from artel.errors import InputError, Problem, WorkError
from artel.text.records import Document, Dropped, Rejected

_LISTED = 1000


@dataclass(slots=True)
class _Counts:
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        return {"read": self.read, "kept": self.kept, "dropped": dict(sorted(self.dropped.items()))}


@dataclass(slots=True)
class Ledger:
    """Counts in total and for each set of documents (a source's name)."""

    total: _Counts = field(default_factory=_Counts)
    sets: dict[str, _Counts] = field(default_factory=dict)
    parts: dict[str, dict[str, int]] = field(
        default_factory=lambda: {
            part: {"documents": 0, "characters": 0, "bytes": 0} for part in ("train", "validation")
        }
    )
    changed: Counter[str] = field(default_factory=Counter)
    """What was done to documents that were kept: truncated, split."""
    rejected: int = 0
    listed: list[Rejected] = field(default_factory=list)

    def read(self, set_name: str) -> None:
        for counts in (self.total, self._set(set_name)):
            counts.read += 1

    def drop(self, set_name: str, reason: str) -> None:
        for counts in (self.total, self._set(set_name)):
            counts.dropped[reason] += 1

    def reject(self, rejected: Rejected) -> None:
        """A record that could not be read: dropped with its reason, and listed (the first thousand)."""
        self.drop(rejected.set_name, rejected.reason)
        self.rejected += 1
        if len(self.listed) < _LISTED:
            self.listed.append(rejected)

    def keep(self, document: Document) -> None:
        for counts in (self.total, self._set(document.record.set_name)):
            counts.kept += 1
        self._count(document, 1)

    def take_back(self, document: Document, why: Rejected | Dropped) -> None:
        """A document that was kept and of which no sample can be made: dropped after all, and listed when it is bad."""
        for counts in (self.total, self._set(document.record.set_name)):
            counts.kept -= 1
        self._count(document, -1)
        if isinstance(why, Rejected):
            self.reject(why)
        else:
            self.drop(document.record.set_name, why.reason)

    def judge(self, max_bad: float) -> None:
        """Raise InputError, with the first of those that could not be used, when they are over `max_bad` of all."""
        if self.rejected > max_bad * self.total.read:
            problems = [Problem(item.origin, item.detail) for item in self.listed[:10]]
            share = (
                f"{self.rejected:,} of {self.total.read:,} records cannot be used, more than data.max_bad ({max_bad:g})"
            )
            raise InputError([*problems, Problem("data", share, "mend them, or raise data.max_bad")])

    def check(self) -> None:
        """Raise WorkError unless everything read is kept or dropped."""
        for name, counts in [("all", self.total), *self.sets.items()]:
            if counts.read != counts.kept + counts.dropped.total():
                raise WorkError(
                    [Problem("ledger", f"{name}: {counts.to_json()} does not add up", "this is a bug of artel")]
                )

    def to_json(self) -> dict[str, Any]:
        return {
            "documents": self.total.to_json(),
            "sets": {name: counts.to_json() for name, counts in self.sets.items()},
            "parts": self.parts,
            "bytes": {part: counts["bytes"] for part, counts in self.parts.items()},
            "changed": dict(sorted(self.changed.items())),
            "rejected": [{"origin": item.origin, "reason": item.reason, "detail": item.detail} for item in self.listed],
        }

    def _count(self, document: Document, sign: int) -> None:
        part = self.parts[document.part]
        part["documents"] += sign
        part["characters"] += sign * len(document.record.text)
        part["bytes"] += sign * len(document.record.text.encode())

    def _set(self, name: str) -> _Counts:
        return self.sets.setdefault(name, _Counts())
