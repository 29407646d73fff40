"""The ledger: every document read, kept, or dropped with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from artel.errors import InputError, Problem, WorkError
from artel.text.records import Document, Rejected

_LISTED = 1000


def _no_parts() -> dict[str, Counter[str]]:
    return {
        "train": Counter(documents=0, characters=0, bytes=0),
        "validation": Counter(documents=0, characters=0, bytes=0),
    }


def in_words(dropped: Mapping[str, int]) -> str:
    """How many documents were dropped by which reason, for people: `12 duplicate, 3 too short`; empty where none."""
    return ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(dropped.items()) if count)


@dataclass(slots=True)
class Counts:
    """Of one set of documents, or of all."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    parts: dict[str, Counter[str]] = field(default_factory=_no_parts)
    """What was written: documents, characters, bytes (and of a store tokens and samples); of a document that comes
    several times in an epoch each time."""

    def add(self, other: Counts) -> None:
        self.read += other.read
        self.kept += other.kept
        self.dropped.update(other.dropped)
        for part, counts in other.parts.items():
            self.parts[part].update(counts)

    def documents(self) -> dict[str, Any]:
        return {"read": self.read, "kept": self.kept, "dropped": dict(sorted(self.dropped.items()))}


@dataclass(slots=True)
class Ledger:
    """Counts of each set of documents (a source's name, or what its `set_field` says)."""

    sets: dict[str, Counts] = field(default_factory=dict)
    changed: Counter[str] = field(default_factory=Counter)
    """What was done to documents that were kept: truncated, split."""
    encodings: dict[str, Counter[str]] = field(default_factory=dict)
    """Of each source how many files were guessed to be in which encoding."""
    rejected: int = 0
    listed: list[Rejected] = field(default_factory=list)
    """The first thousand of the records that could not be used."""
    on_reject: Callable[[Rejected], object] | None = None
    """Told of each of them."""
    notes: list[str] = field(default_factory=list)
    """What was decided about the text that its user should know, in sentences."""

    @property
    def total(self) -> Counts:
        total = Counts()
        for counts in self.sets.values():
            total.add(counts)
        return total

    def of(self, set_name: str) -> Counts:
        if set_name not in self.sets:
            self.sets[set_name] = Counts()
        return self.sets[set_name]

    def read(self, set_name: str) -> None:
        self.of(set_name).read += 1

    def guess(self, source: str, encoding: str, files: int = 1) -> None:
        """Files of a source whose encoding was not given."""
        self.encodings.setdefault(source, Counter())[encoding] += files

    def drop(self, set_name: str, reason: str) -> None:
        self.of(set_name).dropped[reason] += 1

    def reject(self, rejected: Rejected) -> None:
        """A record that could not be used: dropped with its reason, and listed."""
        self.drop(rejected.set_name, rejected.reason)
        self.list(rejected)

    def list(self, rejected: Rejected) -> None:
        """The same where it is counted as dropped already."""
        self.rejected += 1
        if len(self.listed) < _LISTED:
            self.listed.append(rejected)
        if self.on_reject is not None:
            self.on_reject(rejected)

    def keep(self, document: Document) -> None:
        counts = self.of(document.record.set_name)
        counts.kept += 1
        text = document.record.text
        counts.parts[document.part].update(documents=1, characters=len(text), bytes=len(text.encode()))

    def add(self, other: Ledger) -> None:
        for name, counts in other.sets.items():
            self.of(name).add(counts)
        self.changed.update(other.changed)
        for source, encodings in other.encodings.items():
            for encoding, files in encodings.items():
                self.guess(source, encoding, files)
        self.rejected += other.rejected
        self.listed += other.listed[: _LISTED - len(self.listed)]

    def judge(self, max_bad: float) -> None:
        """Raise InputError, with the first of those that could not be used, when they are over `max_bad` of all."""
        read = self.total.read
        if self.rejected > max_bad * read:
            problems = [Problem(item.origin, item.detail) for item in self.listed[:10]]
            share = f"{self._unusable(read)}, more than data.max_bad ({max_bad:g})"
            raise InputError([*problems, Problem("data", share, "mend them, or raise data.max_bad")])
        if self.rejected:
            first = self.listed[0]
            listed = "it is listed" if self.rejected == 1 else "each is listed"
            self.notes.append(
                f"{self._unusable(read)}; {listed} in rejected.jsonl of the run's folder, the first: "
                f"{first.origin}: {first.detail}"
            )

    def _unusable(self, read: int) -> str:
        return f"{self.rejected:,} of {read:,} records ({self.rejected / read:.2%}) cannot be used"

    def check(self) -> None:
        """Raise WorkError unless everything read is kept or dropped."""
        for name, counts in self.sets.items():
            if counts.read != counts.kept + counts.dropped.total():
                what = f"{name}: {counts.documents()} does not add up"
                raise WorkError.at("ledger", what, "this is a bug of artel")

    def to_json(self) -> dict[str, Any]:
        total = self.total
        written = {part: dict(counts) for part, counts in total.parts.items()}
        return {
            "documents": total.documents(),
            "sets": {
                name: counts.documents() | {part: dict(found) for part, found in counts.parts.items()}
                for name, counts in self.sets.items()
            },
            "parts": written,
            "bytes": {part: counts["bytes"] for part, counts in written.items()},
            "changed": dict(sorted(self.changed.items())),
            "notes": self.notes,
            "encodings": {source: dict(sorted(found.items())) for source, found in self.encodings.items()},
            "rejected": [item.to_json() for item in self.listed],
        }
