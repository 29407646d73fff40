"""When all parts are there: which documents are kept, how often each is written, and into which shard.

copies/00000     uint16: how often each document of a part is written; 0: it is dropped
ledger.json      every document: read, kept, dropped by reason
rejected.jsonl   every record that could not be used
shards.json      where each shard begins and ends
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from artel.config import SourceConfig
from artel.errors import InputError, Problem
from artel.preparing.input_shards import DOCUMENT
from artel.preparing.mixture import BUDGET, WEIGHT, copies_by_weight, over_budget
from artel.preparing.workspace import Workspace
from artel.storage import new_folder, write_file
from artel.text import Ledger, Rejected, check_ledger, check_sets, source_at
from artel.text.dedup.exact import DIGEST, repeated
from artel.text.dedup.near import BAND_GROUPS, Signatures, bands_and_rows, near_duplicates, similar_pairs
from artel.text.split import least_fraction
from artel.tokens.store.manifest import PARTS
from artel.tokens.store.shards import SHARD_TOKENS

# What `exact` says of a document.
_FIRST, _DUPLICATE, _REPEATED = range(3)


@dataclass(frozen=True)
class Made:
    """What a worker made of a part."""

    folder: Path
    rows: NDArray
    """DOCUMENT, memory-mapped."""
    told: dict[str, Any]
    """Its part.json."""
    lines_before: int
    """Lines of its file that earlier parts read; where its own lines are counted from."""

    @property
    def notes(self) -> Iterator[dict[str, Any]]:
        with (self.folder / "notes.jsonl").open("rb") as stream:
            yield from map(orjson.loads, stream)

    @property
    def rejected(self) -> Iterator[Rejected]:
        with (self.folder / "rejected.jsonl").open("rb") as stream:
            for origin, reason, detail, set_name in map(orjson.loads, stream):
                yield Rejected(self.origin(origin), reason, detail, set_name)

    def origin(self, of_part: str) -> str:
        """`file:line`, the line counted in the whole file."""
        place, _, line = of_part.rpartition(":")
        return f"{place}:{int(line) + self.lines_before}" if self.lines_before and line.isdigit() else of_part


def made_parts(workspace: Workspace) -> list[Made]:
    found: list[Made] = []
    before = 0
    for number, part in enumerate(workspace.parts):
        folder = workspace.text(number)
        told = orjson.loads((folder / "part.json").read_bytes())
        span = part.inputs[0].span if part.inputs else None
        if span is None or span.start == 0:
            before = 0
        empty = (folder / "documents").stat().st_size == 0
        rows = np.empty(0, DOCUMENT) if empty else np.memmap(folder / "documents", DOCUMENT, "r")
        found.append(Made(folder, rows, told, before))
        before += told["lines"] or 0
    return found


def encoder_notes(workspace: Workspace) -> list[str]:
    """What encoded the parts, sentences for the user; nothing of parts too small for more than one encoder."""
    notes = {part.told["encoder"] for part in made_parts(workspace)}
    return sorted(note for note in notes if note and not note.startswith("tokenizers encodes the first"))


def find_earlier_lines(workspace: Workspace) -> None:
    """Of each part the digests of those lines or paragraphs that stand in an earlier part."""
    digests = [np.fromfile(workspace.lines(number) / "digests", DIGEST) for number in range(len(workspace.parts))]
    again = repeated(digests)
    start = 0
    for number, part in enumerate(digests):
        write_file(workspace.earlier(number), part[again[start : start + len(part)]].tobytes())
        start += len(part)


def find_exact(workspace: Workspace) -> None:
    """`exact`: of each document whether an equal one came before (_DUPLICATE), or nothing is left of it (_REPEATED)."""
    parts = made_parts(workspace)
    has_new_text = np.concatenate([np.empty(0, np.uint8), *(part.rows["has_new_text"] for part in parts)])
    found = np.where(has_new_text == 1, _FIRST, _REPEATED).astype(np.uint8)
    if workspace.run.data.dedup.exact:
        found[repeated([part.rows["digest"] for part in parts])] = _DUPLICATE
    write_file(workspace.exact, found.tobytes())


def find_near(workspace: Workspace, parts: list[Made], group: int) -> None:
    """Pairs of near-duplicates that one group of bands shows."""
    near = workspace.run.data.dedup.near
    assert near is not None
    bands, _ = bands_and_rows(near.threshold, near.permutations)
    signatures = _signatures(parts, _exact(workspace) == _FIRST)
    pairs = similar_pairs(signatures, range(group, bands, BAND_GROUPS), near.threshold)
    write_file(workspace.near(group), pairs.tobytes())


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What a shard holds: documents from `start` to before `stop`, each (round, part of the text, document in it)."""

    name: str
    split: str
    start: tuple[int, int, int]
    stop: tuple[int, int, int]
    first_document: int
    """The number of its first document in its part of the store."""

    @property
    def folder(self) -> str:
        return f"{self.split}-{self.name}"


class Verdict:
    """What becomes of each document; where there are several reasons to drop it, the first one found counts."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._data, self._seed = workspace.run.data, workspace.run.seed
        self._parts = made_parts(workspace)
        self._starts = list(accumulate((len(part.rows) for part in self._parts), initial=0))
        self._reasons = [""]
        """Why a document is dropped, by the number that `_dropped` has for it; 0: it is kept."""
        self._dropped = np.zeros(self._starts[-1], np.uint8)
        self._copies = np.ones(self._starts[-1], np.uint16)
        self._unusable: list[list[Rejected]] = [[] for _ in self._parts]
        """Of each part the documents of which no sample can be made, for they are bad."""
        self._drop_duplicates()
        self._drop_near()
        self._drop_unusable()

    def wider_share(self) -> tuple[float, str] | None:
        """What to hold out where `data.validation` catches none of the documents, and a note of it; else None.

        As many as the share says, at least one: those of the lowest hashes, which a larger share would catch first.
        """
        share = self._data.validation
        if self._workspace.held_out is not None or not isinstance(share, float) or share == 0:
            return None
        hashes = [np.empty(0, np.uint64)]
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            kept = part.rows[self._dropped[start:stop] == 0]
            if (kept["split"] == 1).any():
                return None
            hashes.append(kept["split_hash"])
        together = np.concatenate(hashes)
        fraction = least_fraction(together, share)
        if fraction is None:
            return None
        held = int(np.count_nonzero(together < fraction * 2**64))
        which = "the one whose hash comes first is" if held == 1 else f"the {held:,} whose hashes come first are"
        return fraction, f"data.validation {share:g} catches none of the {len(together):,} documents: {which} held out"

    def write(self, folder: Path, keep_rejected: Callable[[Path], None]) -> None:
        """The verdict into `folder`, whole or not at all; the file of all that could not be used to `keep_rejected`.

        Raises InputError when those are too many, when nothing is left, and for sets that are named and never came.
        """
        self._mix()
        self._copies[self._dropped > 0] = 0
        with new_folder(folder) as partial:
            ledger = self._ledger(partial / "rejected.jsonl")
            if ledger.rejected:
                keep_rejected(partial / "rejected.jsonl")
            self._check_sets()
            ledger.notes += self._workspace.notes
            check_ledger(self._data, ledger)
            ledger.check()
            (partial / "ledger.json").write_bytes(orjson.dumps(ledger.to_json()))
            (partial / "copies").mkdir()
            for number, (start, stop) in enumerate(pairwise(self._starts)):
                (partial / "copies" / f"{number:05d}").write_bytes(self._copies[start:stop].tobytes())
            shards = [astuple(plan) for split in PARTS for plan in self._shards(split)]
            (partial / "shards.json").write_bytes(orjson.dumps(shards))

    def _drop(self, places: NDArray, reason: str) -> None:
        """For documents (numbers or bool) that nothing spoke against before."""
        if reason not in self._reasons:
            self._reasons.append(reason)
        chosen = np.zeros(len(self._dropped), np.bool_)
        chosen[places] = True
        self._dropped[chosen & (self._dropped == 0)] = self._reasons.index(reason)

    def _drop_duplicates(self) -> None:
        found = _exact(self._workspace)
        self._drop(found == _DUPLICATE, "duplicate")
        self._drop(found == _REPEATED, "repeated")

    def _drop_near(self) -> None:
        if self._data.dedup.near is None:
            return
        signatures = _signatures(self._parts, _exact(self._workspace) == _FIRST)
        pairs = (np.fromfile(self._workspace.near(group), np.int64).reshape(-1, 2) for group in range(BAND_GROUPS))
        for reason, places in near_duplicates(signatures, pairs, self._given_validation()).items():
            self._drop(places, reason)

    def _given_validation(self) -> NDArray[np.bool_]:
        """Of each document whether it is a validation text given by a path: such a one stays however alike."""
        given = [part.key == "data.validation" for part in self._workspace.parts]
        return np.repeat(np.array(given, np.bool_), np.diff(self._starts))

    def _drop_unusable(self) -> None:
        found: dict[str, list[int]] = defaultdict(list)
        for part, start, unusable in zip(self._parts, self._starts, self._unusable, strict=False):
            for note in part.notes:
                place = start + note["document"]
                if self._dropped[place]:
                    continue
                if "rejected" in note:
                    origin, reason, detail = note["rejected"]
                    set_name = part.told["sets"][part.rows["set"][note["document"]]]
                    unusable.append(Rejected(part.origin(origin), reason, detail, set_name))
                    found[reason].append(place)
                elif "dropped" in note:
                    found[note["dropped"]].append(place)
        for reason, places in found.items():
            self._drop(np.array(places), reason)

    def _mix(self) -> None:
        """Weights and budgets, of each source over all its parts; validation documents come once."""
        for where in dict.fromkeys(part.key for part in self._workspace.parts):
            if where == "data.validation":
                continue
            source = source_at(self._data, where)
            numbers = [number for number, part in enumerate(self._workspace.parts) if part.key == where]
            for number in numbers:
                made, place = self._parts[number], slice(self._starts[number], self._starts[number + 1])
                copies = copies_by_weight(source, made.told["sets"], made.rows["set"], made.rows["digest"], self._seed)
                copies[made.rows["split"] == 1] = 1
                self._copies[place] = copies
                self._drop(np.flatnonzero(copies == 0) + self._starts[number], WEIGHT)
            if source.budget_bytes is not None or source.budget_documents is not None:
                self._keep_to_budget(source, numbers)

    def _keep_to_budget(self, source: SourceConfig, numbers: list[int]) -> None:
        places = [np.flatnonzero((self._parts[number].rows["split"] == 0)
                                 & (self._dropped[self._starts[number] : self._starts[number + 1]] == 0))
                  for number in numbers]  # fmt: skip
        rows = np.concatenate([self._parts[number].rows[place] for number, place in zip(numbers, places, strict=True)])
        place = np.concatenate([self._starts[number] + place for number, place in zip(numbers, places, strict=True)])
        over = over_budget(source, self._copies[place], rows["bytes"], rows["digest"], self._seed)
        self._drop(place[over], BUDGET)

    def _ledger(self, rejected_file: Path) -> Ledger:
        with rejected_file.open("wb") as stream:
            ledger = Ledger(on_reject=lambda each: stream.write(orjson.dumps(each.to_json()) + b"\n"))
            for number, part in enumerate(self._parts):
                self._count(ledger, part, slice(self._starts[number], self._starts[number + 1]))
                for rejected in (*part.rejected, *self._unusable[number]):
                    ledger.list(rejected)
        return ledger

    def _count(self, ledger: Ledger, part: Made, place: slice) -> None:
        for name, counts in part.told["ledger"].items():
            ledger.of(name).read += counts["read"]
            ledger.of(name).dropped.update(counts["dropped"])
        for source, encodings in part.told.get("encodings", {}).items():
            for encoding, files in encodings.items():
                ledger.add_encoding(source, encoding, files)
        dropped, copies = self._dropped[place], self._copies[place].astype(np.int64)
        for number, name in enumerate(part.told["sets"]):
            counts = ledger.of(name)
            of_set = part.rows["set"] == number
            for reason, count in zip(*np.unique(dropped[of_set], return_counts=True), strict=True):
                if reason:
                    counts.dropped[self._reasons[reason]] += int(count)
                else:
                    counts.kept += int(count)
            for split, split_name in enumerate(PARTS):
                chosen = of_set & (part.rows["split"] == split)
                written = {"documents": int(copies[chosen].sum())}
                for column in ("characters", "bytes", "tokens", "samples"):
                    written[column] = int((part.rows[column][chosen].astype(np.int64) * copies[chosen]).sum())
                counts.splits[split_name].update(written)
        for note in part.notes:
            if "changed" in note and copies[note["document"]]:
                ledger.changed.update(note["changed"])

    def _check_sets(self) -> None:
        problems: list[Problem] = []
        for where in dict.fromkeys(part.key for part in self._workspace.parts):
            made = (made for made, part in zip(self._parts, self._workspace.parts, strict=True) if part.key == where)
            seen = {name for each in made for name in each.told["ledger"]}
            problems += check_sets(source_at(self._data, where), where, seen)
        if problems:
            raise InputError(problems)

    def _shards(self, split: str) -> Iterator[ShardPlan]:
        """Documents in the order of the sources, those that come again after all that come once; a shard is full when
        it has SHARD_TOKENS or more."""
        number = document = held = 0
        rounds = int(self._copies.max(initial=0))
        start: tuple[int, int, int] | None = None
        first = 0
        for round_ in range(rounds):
            for part, made in enumerate(self._parts):
                copies = self._copies[self._starts[part] : self._starts[part + 1]]
                chosen = np.flatnonzero((copies > round_) & (made.rows["split"] == PARTS.index(split)))
                ends = np.cumsum(made.rows["tokens"][chosen].astype(np.int64))
                at = 0
                while at < len(chosen):
                    if start is None:
                        start, first = (round_, part, int(chosen[at])), document
                    before = int(ends[at - 1]) if at else 0
                    stop = int(np.searchsorted(ends, before + SHARD_TOKENS - held)) + 1
                    taken = min(stop, len(chosen))
                    held += int(ends[taken - 1]) - before
                    document += taken - at
                    at = taken
                    if held >= SHARD_TOKENS:
                        end = (round_, part, int(chosen[taken - 1]) + 1)
                        yield ShardPlan(f"{number:05d}", split, start, end, first)
                        number, held, start = number + 1, 0, None
        if start is not None:
            yield ShardPlan(f"{number:05d}", split, start, (rounds, 0, 0), first)


def shard_plans(workspace: Workspace) -> list[ShardPlan]:
    rows = orjson.loads((workspace.verdict / "shards.json").read_bytes())
    return [ShardPlan(name, split, tuple(start), tuple(stop), first) for name, split, start, stop, first in rows]


def _exact(workspace: Workspace) -> NDArray[np.uint8]:
    return np.fromfile(workspace.exact, np.uint8)


def _signatures(parts: list[Made], alive: NDArray[np.bool_]) -> Signatures:
    return Signatures([part.folder / "near" for part in parts], [len(part.rows) for part in parts], alive)
