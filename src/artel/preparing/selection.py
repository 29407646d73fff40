"""Selects documents after all input shards are prepared, with their number of copies and their store shards.

splits/00000     uint8: the split of each document of an input shard; 0 train, 1 validation
copies/00000     uint16: how often each document of an input shard is written; 0 if dropped
ledger.json      every document: read, kept, dropped by reason
rejected.jsonl   every record that could not be used
contaminated.jsonl  every document that shares n-grams with benchmarks, with data.decontaminate
shards.json      where each store shard begins and ends
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from artel.errors import InputError, Problem
from artel.messages import Phrase
from artel.objectives import objective_type, splits_by_label
from artel.preparing.document_lists import CONTAMINATED, REJECTED, create_ledger, write_contaminated
from artel.preparing.prepared_shard import PreparedShard, prepared_shards
from artel.preparing.selection_rules import (
    BUDGET,
    DUPLICATE,
    REPEATED,
    WEIGHT,
    copies_by_weight,
    near_duplicates_by_reason,
    over_budget,
    read_duplicate_kinds,
)
from artel.preparing.unknown_tokens import check_unknown_tokens
from artel.preparing.workspace import Workspace
from artel.storage import new_folder
from artel.text import Ledger, Rejected, check_ledger, check_sets, find_source
from artel.text.split import smallest_fraction
from artel.tokens.manifest import SPLITS
from artel.tokens.store import SHARD_TOKENS

_MIN_VALIDATION_DOCUMENTS = 10


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The documents of a store shard, [start, end), each given as (round, input shard, document in it)."""

    name: str
    split: str
    start: tuple[int, int, int]
    end: tuple[int, int, int]
    first_document: int
    """The index of its first document in its split."""

    @property
    def folder(self) -> str:
        return f"{self.split}-{self.name}"


class Selection:
    """Keeps or drops each document. If there are several reasons to drop it, the first one counts."""

    def __init__(self, workspace: Workspace, shard_tokens: int = SHARD_TOKENS) -> None:
        self._workspace = workspace
        self._shard_tokens = shard_tokens
        self._data, self._seed = workspace.config.data, workspace.config.seed
        self._shards = prepared_shards(workspace)
        self._starts = list(accumulate((len(shard.rows) for shard in self._shards), initial=0))
        self._reasons = [""]
        """The reasons that `_drop_reasons` refers to by index; 0 means kept."""
        self._drop_reasons = np.zeros(self._starts[-1], np.uint8)
        self._copies = np.ones(self._starts[-1], np.uint16)
        self._splits = np.concatenate([np.empty(0, np.uint8), *(shard.rows["split"] for shard in self._shards)])
        self._unusable_documents: list[list[Rejected]] = [[] for _ in self._shards]
        """Documents that yield no sample, per shard."""
        kinds = read_duplicate_kinds(workspace)
        self._drop(kinds == DUPLICATE, "duplicate")
        self._drop(kinds == REPEATED, "repeated")
        self._drop_near_duplicates()
        self._drop_unusable()
        self._splits_by_label = splits_by_label(workspace.config)
        if self._splits_by_label:
            self._hold_out_by_label()

    def larger_fraction(self) -> tuple[float, Phrase] | None:
        """Return a larger fraction to hold out, and a note, if `data.validation` holds out no document; else None.

        The larger fraction holds out the documents with the lowest hashes, at least one.
        """
        requested = self._data.held_out
        if self._workspace.held_out is not None or not requested or self._splits_by_label:
            return None
        hashes = [np.empty(0, np.uint64)]
        for shard, (start, end) in zip(self._shards, pairwise(self._starts), strict=True):
            kept_rows = shard.rows[self._drop_reasons[start:end] == 0]
            if (kept_rows["split"] == 1).any():
                return None
            hashes.append(kept_rows["split_hash"])
        all_hashes = np.concatenate(hashes)
        fraction = smallest_fraction(all_hashes, requested)
        if fraction is None:
            return None
        num_held_out = int(np.count_nonzero(all_hashes < fraction * 2**64))
        template = (
            "data.validation {share:g} catches none of the {count:,} documents, so the one whose hash comes first is "
            "held out"
        )
        if num_held_out > 1:
            template = (
                "data.validation {share:g} catches none of the {count:,} documents, so the {held:,} whose hashes come "
                "first are held out"
            )
        return fraction, Phrase(template, share=requested, count=len(all_hashes), held=num_held_out)

    def write(
        self,
        folder: Path,
        save_rejected: Callable[[Path], None],
        notes: Iterable[str] = (),
        review: Callable[[Iterator[tuple[str, dict[str, Any]]]], list[str]] = lambda observed: [],
    ) -> None:
        """Write the selection into `folder` atomically. Calls `save_rejected` with the file of rejected records.

        `notes`, and the notes of `review` on the kept documents (`Objective.review`), go into the ledger.

        Raise InputError if too many records are rejected, if no document is left, or if named sets do not occur.
        """
        self._apply_weights_and_budgets()
        self._copies[self._drop_reasons > 0] = 0
        with new_folder(folder) as partial:
            ledger = self._build_ledger(partial / REJECTED)
            if ledger.num_rejected:
                save_rejected(partial / REJECTED)
            self._check_sets()
            ledger.notes += [*self._workspace.notes, *notes]
            ledger.unread_files = self._workspace.unread_files
            counts = (shard.summary["unknown"] for shard in self._shards)
            ledger.unknown_tokens, unknown_notes = check_unknown_tokens(self._workspace.config, counts)
            ledger.notes += unknown_notes
            index = self._workspace.benchmark_index()
            if index is not None:
                contaminated = (item for shard in self._shards for item in shard.contaminated)
                ledger.contamination, note = write_contaminated(partial / CONTAMINATED, contaminated, index)
                ledger.notes.append(note)
            if self._data.splits_by_chapter:
                self._add_chapter_note(ledger)
            if self._splits_by_label:
                self._add_label_note(ledger)
            check_ledger(self._data, ledger)
            self._add_validation_note(ledger)
            ledger.notes += review(self._list_observations())
            ledger.check()
            (partial / "ledger.json").write_bytes(orjson.dumps(ledger.to_json()))
            for name, values in (("copies", self._copies), ("splits", self._splits)):
                (partial / name).mkdir()
                for shard_index, (start, end) in enumerate(pairwise(self._starts)):
                    (partial / name / f"{shard_index:05d}").write_bytes(values[start:end].tobytes())
            plans = [astuple(plan) for split in SPLITS for plan in self._shard_plans(split)]
            (partial / "shards.json").write_bytes(orjson.dumps(plans))

    def _drop(self, documents: NDArray, reason: str) -> None:
        """Drop the documents, by index or as bool (all documents,), that are not dropped yet."""
        if reason not in self._reasons:
            self._reasons.append(reason)
        is_selected = np.zeros(len(self._drop_reasons), np.bool_)
        is_selected[documents] = True
        self._drop_reasons[is_selected & (self._drop_reasons == 0)] = self._reasons.index(reason)

    def _drop_near_duplicates(self) -> None:
        if self._data.dedup.near is None:
            return
        dropped = near_duplicates_by_reason(self._workspace, self._shards, self._has_no_sample())
        for reason, documents in dropped.items():
            self._drop(documents, reason)

    def _has_no_sample(self) -> NDArray[np.bool_]:
        """Return bool (all documents,): True for documents that yield no sample."""
        has_no_sample = np.zeros(self._starts[-1], np.bool_)
        for shard, start in zip(self._shards, self._starts, strict=False):
            indices = [note["document"] for note in shard.notes if {"rejected", "dropped"} & note.keys()]
            has_no_sample[[start + index for index in indices]] = True
        return has_no_sample

    def _drop_unusable(self) -> None:
        dropped: dict[str, list[int]] = defaultdict(list)
        for shard, start, unusable in zip(self._shards, self._starts, self._unusable_documents, strict=False):
            for note in shard.notes:
                document = start + note["document"]
                if self._drop_reasons[document]:
                    continue
                if "rejected" in note:
                    origin, reason, detail = note["rejected"]
                    set_name = shard.summary["sets"][shard.rows["set"][note["document"]]]
                    unusable.append(Rejected(shard.origin(origin), reason, detail, set_name))
                    dropped[reason].append(document)
                elif "dropped" in note:
                    dropped[note["dropped"]].append(document)
        for reason, documents in dropped.items():
            self._drop(np.array(documents), reason)

    def _hold_out_by_label(self) -> None:
        """Hold out the texts with the lowest hashes of each label, with their groups. A label's only text stays."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(shard.rows["split_hash"] for shard in self._shards)])
        held_out = [np.empty(0, np.uint64)]
        for documents in self._documents_by_label().values():
            fraction = smallest_fraction(hashes[documents], self._data.held_out or 0.0)
            if fraction is not None:
                held_out.append(hashes[documents][hashes[documents] < fraction * 2**64])
        self._splits = np.isin(hashes, np.concatenate(held_out)).astype(np.uint8)

    def _documents_by_label(self) -> dict[str, NDArray[np.int64]]:
        """Return the indices of kept documents by label; "" for documents without a label."""
        documents: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
        for shard, start in zip(self._shards, self._starts, strict=False):
            kept_documents = np.flatnonzero(self._drop_reasons[start : start + len(shard.rows)] == 0)
            label_set_indices = shard.rows["labels"][kept_documents]
            by_labels = kept_documents[np.argsort(label_set_indices, kind="stable")] + start
            counts = np.bincount(label_set_indices, minlength=len(shard.summary["labels"]))
            groups = np.split(by_labels, np.cumsum(counts)[:-1])
            for labels, group in zip(shard.summary["labels"], groups, strict=True):
                for label in labels or [""]:
                    documents[label].append(group)
        return {label: np.concatenate(groups) for label, groups in documents.items()}

    def _apply_weights_and_budgets(self) -> None:
        """Apply weights and budgets to each source over all its shards. Validation documents are written once."""
        for key, shard_indices in self._shards_by_source().items():
            if key == "data.validation":
                continue
            source = find_source(self._data, key)
            for shard_index in shard_indices:
                shard, start = self._shards[shard_index], self._starts[shard_index]
                rows = shard.rows
                copies = copies_by_weight(source, shard.summary["sets"], rows["set"], rows["digest"], self._seed)
                copies[self._splits[start : start + len(rows)] == 1] = 1
                self._copies[start : start + len(rows)] = copies
                self._drop(np.flatnonzero(copies == 0) + start, WEIGHT)
            if source.budget_bytes is not None:
                self._apply_budget(source.budget_bytes, shard_indices)

    def _apply_budget(self, max_bytes: int, shard_indices: list[int]) -> None:
        rows, documents = [], []
        for shard_index in shard_indices:
            shard_rows, start = self._shards[shard_index].rows, self._starts[shard_index]
            is_kept = self._drop_reasons[start : start + len(shard_rows)] == 0
            kept_documents = np.flatnonzero((self._splits[start : start + len(shard_rows)] == 0) & is_kept)
            rows.append(shard_rows[kept_documents])
            documents.append(start + kept_documents)
        all_rows, all_documents = np.concatenate(rows), np.concatenate(documents)
        copies = self._copies[all_documents]
        is_over = over_budget(max_bytes, copies, all_rows["bytes"], all_rows["digest"], self._seed)
        self._drop(all_documents[is_over], BUDGET)

    def _shards_by_source(self) -> dict[str, list[int]]:
        """Return the indices of each source's shards, by its key in the run file."""
        shard_indices: dict[str, list[int]] = defaultdict(list)
        for shard_index, shard in enumerate(self._workspace.input_shards):
            shard_indices[shard.key].append(shard_index)
        return shard_indices

    def _build_ledger(self, rejected_file: Path) -> Ledger:
        with rejected_file.open("wb") as stream:
            ledger = create_ledger(self._workspace.config, stream)
            for index, shard in enumerate(self._shards):
                self._count_documents(ledger, shard, slice(self._starts[index], self._starts[index + 1]))
                for rejected in (*shard.rejected, *self._unusable_documents[index]):
                    ledger.list_rejected(rejected)
        return ledger

    def _count_documents(self, ledger: Ledger, shard: PreparedShard, documents: slice) -> None:
        for name, counts in shard.summary["ledger"].items():
            ledger.get_counts(name).read += counts["read"]
            ledger.get_counts(name).dropped.update(counts["dropped"])
        for source, encodings in shard.summary["encodings"].items():
            for encoding, files in encodings.items():
                ledger.add_encoding(source, encoding, files)
        dropped, copies = self._drop_reasons[documents], self._copies[documents].astype(np.int64)
        for set_index, name in enumerate(shard.summary["sets"]):
            counts = ledger.get_counts(name)
            is_in_set = shard.rows["set"] == set_index
            for reason, count in zip(*np.unique(dropped[is_in_set], return_counts=True), strict=True):
                if reason:
                    counts.dropped[self._reasons[reason]] += int(count)
                else:
                    counts.kept += int(count)
            for split_index, split in enumerate(SPLITS):
                is_counted = is_in_set & (self._splits[documents] == split_index)
                totals = {"documents": int(copies[is_counted].sum())}
                for column in ("characters", "bytes", "tokens", "samples"):
                    totals[column] = int((shard.rows[column][is_counted].astype(np.int64) * copies[is_counted]).sum())
                counts.splits[split].update(totals)
        for note in shard.notes:
            if "changed" in note and copies[note["document"]]:
                ledger.changes.update(note["changed"])

    def _list_observations(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (origin, `observed`) of each kept document."""
        for shard, start in zip(self._shards, self._starts, strict=False):
            for note in shard.notes:
                if "observed" in note and self._copies[start + note["document"]]:
                    origin, observed = note["observed"]
                    yield shard.origin(origin), observed

    def _check_sets(self) -> None:
        problems: list[Problem] = []
        for key, shard_indices in self._shards_by_source().items():
            seen = {name for index in shard_indices for name in self._shards[index].summary["ledger"]}
            problems += check_sets(find_source(self._data, key), key, seen)
        if problems:
            raise InputError(problems)

    def _add_chapter_note(self, ledger: Ledger) -> None:
        """Add the number of chapters in each split to the ledger."""
        is_kept = self._drop_reasons == 0
        hashes = np.concatenate([shard.rows["split_hash"] for shard in self._shards])[is_kept]
        chapters = {
            name: int(np.unique(hashes[self._splits[is_kept] == index]).size) for index, name in enumerate(SPLITS)
        }
        ledger.split_rule = {"by": "chapter", "fraction": self._data.held_out, "chapters": chapters}
        template = (
            "{held:,} of {count:,} chapters are held out: neighbouring pieces of a text stay on one side of the split "
            "(data.validation.by: chapter)"
        )
        ledger.notes.append(Phrase(template, held=chapters["validation"], count=sum(chapters.values())))

    def _add_label_note(self, ledger: Ledger) -> None:
        """Add the number of texts of each label in each split to the ledger."""
        counts = {
            label: {name: int((self._splits[documents] == index).sum()) for index, name in enumerate(SPLITS)}
            for label, documents in sorted(self._documents_by_label().items())
            if len(documents)
        }
        ledger.split_rule = {"by": "label", "fraction": self._data.held_out, "labels": counts}
        unsplit_labels = [label for label, splits in counts.items() if not splits["validation"]]
        if unsplit_labels:
            template = "of {count:,} labels no text is held out, since each has too few: {labels}"
            examples = ", ".join(repr(label) for label in unsplit_labels[:5]) + (
                " …" if len(unsplit_labels) > 5 else ""
            )
            ledger.notes.append(Phrase(template, count=len(unsplit_labels), labels=examples))

    def _add_validation_note(self, ledger: Ledger) -> None:
        """Add a note to the ledger if validation has too few documents for metrics per document."""
        count = ledger.total.splits["validation"]["documents"]
        if (
            objective_type(self._workspace.config).packs_text
            or self._data.held_out == 1.0
            or not 0 < count < _MIN_VALIDATION_DOCUMENTS
        ):
            return
        fix = Phrase("write a larger data.validation" if self._data.held_out else "add more of them to data.validation")
        template = "validation has {count} documents, too few for meaningful metrics: {fix}"
        if count == 1:
            template = "validation has {count} document, too few for meaningful metrics: {fix}"
        ledger.notes.append(Phrase(template, count=count, fix=fix))

    def _shard_plans(self, split: str) -> Iterator[ShardPlan]:
        """Divide the documents of a split into store shards of `shard_tokens` or slightly more tokens, in order."""
        plan_index = document_index = num_tokens = 0
        rounds = int(self._copies.max(initial=0))
        start: tuple[int, int, int] | None = None
        first_document = 0
        for round_index in range(rounds):
            for shard_index, shard in enumerate(self._shards):
                documents = slice(self._starts[shard_index], self._starts[shard_index + 1])
                is_in_split = self._splits[documents] == SPLITS.index(split)
                chosen = np.flatnonzero((self._copies[documents] > round_index) & is_in_split)
                ends = np.cumsum(shard.rows["tokens"][chosen].astype(np.int64))
                position = 0
                while position < len(chosen):
                    if start is None:
                        start, first_document = (round_index, shard_index, int(chosen[position])), document_index
                    tokens_before = int(ends[position - 1]) if position else 0
                    max_tokens = tokens_before + self._shard_tokens - num_tokens
                    end = min(int(np.searchsorted(ends, max_tokens)) + 1, len(chosen))
                    num_tokens += int(ends[end - 1]) - tokens_before
                    document_index += end - position
                    position = end
                    if num_tokens >= self._shard_tokens:
                        plan_end = (round_index, shard_index, int(chosen[end - 1]) + 1)
                        yield ShardPlan(f"{plan_index:05d}", split, start, plan_end, first_document)
                        plan_index, num_tokens, start = plan_index + 1, 0, None
        if start is not None:
            yield ShardPlan(f"{plan_index:05d}", split, start, (rounds, 0, 0), first_document)


def shard_plans(workspace: Workspace) -> list[ShardPlan]:
    plans = orjson.loads((workspace.selection_path / "shards.json").read_bytes())
    return [ShardPlan(name, split, tuple(start), tuple(end), first) for name, split, start, end, first in plans]
