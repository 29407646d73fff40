"""The ledger: a count of every document that is read, as kept or as dropped for a reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from artel.errors import InputError, Problem, WorkError
from artel.messages import Phrase, to_json
from artel.text.records import ContaminatedDocument, Document, Rejected

_NUMBER_PATTERN = re.compile(r"0x[\da-fA-F]+|\d[\d,.]*")
_MAX_LISTED = 1000
_MAX_PROBLEMS, _MAX_ORIGINS = 10, 3  # in the error about too many rejected records


def describe_drops(dropped: Mapping[str, int]) -> str:
    """Describe the dropped documents by reason: `12 duplicates, 3 too short`; empty if there are none."""
    return ", ".join(f"{count:,} {_reason_text(reason, count)}" for reason, count in sorted(dropped.items()) if count)


def count_drops(dropped: Mapping[str, int]) -> str:
    """Return the number of dropped documents with reasons: `15 dropped (12 duplicates, 3 too short)`."""
    counts = {reason: count for reason, count in dropped.items() if count}
    if len(counts) > 1:
        return f"{sum(counts.values()):,} dropped ({describe_drops(counts)})"
    return next(
        (f"{count:,} dropped as {_reason_text(reason, count)}" for reason, count in counts.items()), "none dropped"
    )


def _reason_text(reason: str, count: int) -> str:
    return reason.replace("_", " ") + ("s" if reason.endswith("duplicate") and count > 1 else "")


@dataclass(slots=True)
class Counts:
    """Counts of one set of documents, or of all sets."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    splits: dict[str, Counter[str]] = field(
        default_factory=lambda: {
            split: Counter(documents=0, characters=0, bytes=0) for split in ("train", "validation")
        }
    )
    """Documents, characters and bytes of each split (for a store also tokens and samples). A document that occurs
    several times in an epoch counts each time."""

    def add(self, other: Counts) -> None:
        self.read += other.read
        self.kept += other.kept
        self.dropped.update(other.dropped)
        for split, counts in other.splits.items():
            self.splits[split].update(counts)

    def document_counts(self) -> dict[str, Any]:
        return {"read": self.read, "kept": self.kept, "dropped": dict(sorted(self.dropped.items()))}


@dataclass(slots=True)
class Ledger:
    """Counts of each set of documents (named by the source, or by its `set_field`)."""

    sets: dict[str, Counts] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    """Changes to kept documents: truncated, split."""
    encodings: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of files in each detected encoding, by source."""
    num_rejected: int = 0
    rejected_records: list[Rejected] = field(default_factory=list)
    """The first 1,000 rejected records."""
    on_reject: Callable[[Rejected], object] | None = None
    """Called with each rejected record."""
    rejected_file: str = ""
    """The file that lists all rejected records for the user; empty if there is none."""
    on_contaminated: Callable[[ContaminatedDocument], object] | None = None
    """Called with each document that is dropped for sharing n-grams with benchmarks."""
    contamination: dict[str, Any] = field(default_factory=dict)
    """Per benchmark: its rows, the number that occur in documents, and the number of these documents."""
    unknown_tokens: dict[str, Any] = field(default_factory=dict)
    """Unknown tokens, by set; empty if there are none."""
    split_rule: dict[str, Any] = field(default_factory=dict)
    """The rule of the validation split, if it was not chosen document by document."""
    unread_files: list[str] = field(default_factory=list)
    """Files in the folders of sources with suffixes that their formats do not read."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user about decisions."""

    @property
    def total(self) -> Counts:
        total = Counts()
        for counts in self.sets.values():
            total.add(counts)
        return total

    def get_counts(self, set_name: str) -> Counts:
        if set_name not in self.sets:
            self.sets[set_name] = Counts()
        return self.sets[set_name]

    def read(self, set_name: str) -> None:
        self.get_counts(set_name).read += 1

    def add_encoding(self, source: str, encoding: str, files: int = 1) -> None:
        """Count files of a source with a detected encoding."""
        self.encodings.setdefault(source, Counter())[encoding] += files

    def drop(self, set_name: str, reason: str) -> None:
        self.get_counts(set_name).dropped[reason] += 1

    def reject(self, rejected: Rejected) -> None:
        """Count an unusable record as dropped, and list it."""
        self.drop(rejected.set_name, rejected.reason)
        self.list_rejected(rejected)

    def drop_contaminated(self, contaminated: ContaminatedDocument) -> None:
        """Count a document as dropped for sharing n-grams with benchmarks."""
        self.drop(contaminated.set_name, "contaminated")
        if self.on_contaminated is not None:
            self.on_contaminated(contaminated)

    def list_rejected(self, rejected: Rejected) -> None:
        """List a rejected record that already counts as dropped."""
        self.num_rejected += 1
        if len(self.rejected_records) < _MAX_LISTED:
            self.rejected_records.append(rejected)
        if self.on_reject is not None:
            self.on_reject(rejected)

    def keep(self, document: Document) -> None:
        counts = self.get_counts(document.record.set_name)
        counts.kept += 1
        text = document.record.text
        counts.splits[document.split].update(documents=1, characters=len(text), bytes=len(text.encode()))

    def add(self, other: Ledger) -> None:
        for name, counts in other.sets.items():
            self.get_counts(name).add(counts)
        self.changes.update(other.changes)
        for source, encodings in other.encodings.items():
            for encoding, files in encodings.items():
                self.add_encoding(source, encoding, files)
        self.num_rejected += other.num_rejected
        self.rejected_records += other.rejected_records[: _MAX_LISTED - len(self.rejected_records)]

    def check_rejected(self, max_bad: float) -> None:
        """Raise InputError if over `max_bad` (0 to 1) of the records are rejected. The error shows the first ones."""
        read = self.total.read
        fraction = self.num_rejected / max(read, 1)
        if self.num_rejected > max_bad * read:
            rejected = f"{self.num_rejected:,} of {read:,} records ({fraction:.2%}) cannot be used"
            what = f"{rejected}, more than data.max_bad ({max_bad:g})"
            raise InputError(
                [*self._rejected_problems(), Problem("data", what, "fix the records, or raise data.max_bad")]
            )
        if self.num_rejected:
            first = self.rejected_records[0]
            template = (
                "{count:,} of {read:,} records ({share:.2%}) cannot be used; it is listed in rejected.jsonl of the "
                "run's folder, the first: {origin}: {detail}"
                if self.num_rejected == 1
                else "{count:,} of {read:,} records ({share:.2%}) cannot be used; each is listed in rejected.jsonl of "
                "the run's folder, the first: {origin}: {detail}"
            )
            counts = {"count": self.num_rejected, "read": read, "share": fraction}
            self.notes.append(Phrase(template, **counts, origin=first.origin, detail=first.detail))

    def _rejected_problems(self) -> Iterator[Problem]:
        """Yield the first rejected records, merging those that differ only in numbers, and the number of others."""
        by_detail = defaultdict(list)
        for item in self.rejected_records:
            by_detail[_NUMBER_PATTERN.sub("0", item.detail)].append(item)
        groups = [*by_detail.values()][:_MAX_PROBLEMS]
        for first, *similar in groups:
            origins = ", ".join(item.origin for item in similar[:_MAX_ORIGINS])
            ellipsis = " …" if len(similar) > _MAX_ORIGINS else ""
            fix = f"{len(similar):,} more like this: {origins}{ellipsis}" if similar else ""
            yield Problem(first.origin, first.detail, fix)
        num_unlisted = self.num_rejected - sum(map(len, groups))
        if num_unlisted:
            where = f": {self.rejected_file}" if self.rejected_file else ""
            yield Problem("", f"… and {num_unlisted:,} more{where}")

    def check(self) -> None:
        """Raise WorkError unless every document is counted as kept or dropped."""
        for name, counts in self.sets.items():
            if counts.read != counts.kept + counts.dropped.total():
                what = f"{name}: {counts.document_counts()} does not add up"
                raise WorkError.at("ledger", what, "this is a bug in artel: please report it")

    def to_json(self) -> dict[str, Any]:
        """Return the content of ledger.json."""
        total = self.total
        split_counts = {split: dict(counts) for split, counts in total.splits.items()}
        optional: dict[str, Any] = {"split": self.split_rule, "unknown_tokens": self.unknown_tokens}
        optional |= {"contamination": self.contamination, "not_read": self.unread_files}
        return {
            "documents": total.document_counts(),
            "sets": {
                name: counts.document_counts() | {split: dict(of_split) for split, of_split in counts.splits.items()}
                for name, counts in self.sets.items()
            },
            "parts": split_counts,
            "bytes": {split: counts["bytes"] for split, counts in split_counts.items()},
            "changed": dict(sorted(self.changes.items())),
            **{name: value for name, value in optional.items() if value},
            "notes": to_json(self.notes),
            "encodings": {source: dict(sorted(counts.items())) for source, counts in self.encodings.items()},
            "rejected": [item.to_json() for item in self.rejected_records],
        }
