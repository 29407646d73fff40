"""Assembles the token store from prepared shards: first each store shard independently, then the manifest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from artel.objectives import Objective
from artel.preparing.document_lists import LISTS
from artel.preparing.prepared_shard import PreparedShard, prepared_shards
from artel.preparing.selection import ShardPlan, shard_plans
from artel.preparing.workspace import Workspace
from artel.storage import new_folder
from artel.tokens.manifest import SPLITS, write_manifest
from artel.tokens.store import REFERENCES_FILE, ShardWriter, empty_split, file_entries, id_dtype, origin_line


def write_shard(workspace: Workspace, shards: list[PreparedShard], plan: ShardPlan, objective: Objective) -> None:
    """Write the files of a store shard, and `entry.json`, its entry in the manifest."""
    document_index = plan.first_document
    dtype = id_dtype(objective.tokenizer.vocabulary)
    with new_folder(workspace.shard_path(plan.folder)) as folder:
        writer = ShardWriter(folder / plan.name, dtype)
        for shard_index, is_chosen in _iter_chosen_documents(workspace, shards, plan):
            samples: dict[int, _SplitSamples] = {}
            for split_index, start, end in _document_runs(is_chosen, shards[shard_index].rows["split"]):
                if split_index not in samples:
                    samples[split_index] = _SplitSamples(shards[shard_index], SPLITS[split_index], dtype)
                samples[split_index].copy(writer, start, end, objective.document_number, document_index)
                document_index += end - start
        entry = writer.close()
        (folder / "entry.json").write_bytes(orjson.dumps([entry, writer.flags, writer.columns]))


def write_store(
    workspace: Workspace, folder: Path, manifest_entries: dict[str, Any], vocabulary: int
) -> dict[str, Any]:
    """Write the finished shards, the tokenizer, the ledger and the manifest into `folder`; return the manifest."""
    splits = {split: empty_split() for split in SPLITS}
    ledger = orjson.loads((workspace.selection_path / "ledger.json").read_bytes())
    for split in SPLITS:
        (folder / split).mkdir()
        splits[split]["documents"] = ledger["parts"][split]["documents"]
        splits[split]["bytes"] = ledger["parts"][split]["bytes"]
        splits[split]["files"] = _write_references(workspace, folder / split, split)
    for plan in shard_plans(workspace):
        counts = splits[plan.split]
        shard = workspace.shard_path(plan.folder)
        entry, flags, columns = orjson.loads((shard / "entry.json").read_bytes())
        for name in entry["files"]:
            _link_or_copy(shard / name, folder / plan.split / name)
        if entry["samples"]:
            counts["shards"].append(entry)
            counts["tokens"] += entry["tokens"]
            counts["samples"] += entry["samples"]
            counts["flags"], counts["numbers"] = flags, columns
    shutil.copytree(workspace.tokenizer_path, folder / "tokenizer")
    totals = {name: {split: counts[name] for split, counts in splits.items()} for name in ("tokens", "samples")}
    (folder / "ledger.json").write_bytes(orjson.dumps({**ledger, **totals}, option=orjson.OPT_INDENT_2))
    for name in LISTS:
        if (workspace.selection_path / name).is_file():
            _link_or_copy(workspace.selection_path / name, folder / name)
    return write_manifest(folder, id_dtype(vocabulary), manifest_entries, splits)


class _SplitSamples:
    """The samples of a prepared shard in one split, addressed by document number."""

    def __init__(self, shard: PreparedShard, split: str, dtype: str) -> None:
        rows = shard.rows[shard.rows["split"] == SPLITS.index(split)]
        self._shard = shard
        self._token_ends = np.cumsum(rows["tokens"].astype(np.int64))
        self._sample_ends = np.cumsum(rows["samples"].astype(np.int64))
        base = shard.folder / split
        columns = shard.summary[split]
        self._tokens = _map_file(base, ".tokens", dtype)
        self._lengths = np.diff(_map_file(base, ".ends", "<u8").astype(np.int64), prepend=0)
        self._flags = _map_file(base, ".flags", columns["flags"]) if columns["flags"] else None
        width = columns["numbers"]
        self._numbers = _map_file(base, ".numbers", "<i8").reshape(-1, width) if width else None
        self._origins = _map_file(base, ".origins", "u1")
        self._line_ends = np.flatnonzero(self._origins == ord("\n")) + 1

    def copy(self, writer: ShardWriter, start: int, end: int, number_column: int | None, first_number: int) -> None:
        """Copy the documents [start, end). `first_number`: the number of the first one in the store's split."""
        tokens = slice(_item_start(self._token_ends, start), _item_start(self._token_ends, end))
        samples = slice(_item_start(self._sample_ends, start), _item_start(self._sample_ends, end))
        numbers = None if self._numbers is None else self._numbers[samples]
        if numbers is not None and number_column is not None:
            counts = np.diff(self._sample_ends[start:end], prepend=samples.start)
            numbers = np.array(numbers)
            numbers[:, number_column] = first_number + np.repeat(np.arange(end - start), counts)
        origins = self._origins[
            _item_start(self._line_ends, samples.start) : _item_start(self._line_ends, samples.stop)
        ]
        flags = None if self._flags is None else self._flags[tokens]
        lines = self._with_file_lines(origins.tobytes())
        writer.add_many(self._tokens[tokens], self._lengths[samples], lines, flags, numbers)

    def _with_file_lines(self, origins: bytes) -> bytes:
        """Return lines of origins with line numbers counted in the full file."""
        if not self._shard.lines_before:
            return origins
        lines = origins.decode("utf-8", "surrogateescape").split("\n")[:-1]
        return b"".join(origin_line(self._shard.origin(line)) for line in lines)


def _iter_chosen_documents(
    workspace: Workspace, shards: list[PreparedShard], plan: ShardPlan
) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield (shard index, bool (documents,): True for documents to write) for each prepared shard, in each round."""
    round_index, shard_index, start_document = plan.start
    end = plan.end
    while (round_index, shard_index, 0) < end:
        is_chosen = _read_column(workspace, "copies", shard_index, np.uint16) > round_index
        is_chosen[:start_document] = False
        if (round_index, shard_index) == end[:2]:
            is_chosen[end[2] :] = False
        is_in_split = _read_column(workspace, "splits", shard_index, np.uint8) == SPLITS.index(plan.split)
        yield shard_index, is_chosen & is_in_split
        shard_index, start_document = shard_index + 1, 0
        if shard_index == len(shards):
            round_index, shard_index = round_index + 1, 0


def _read_column(workspace: Workspace, name: str, shard_index: int, dtype: type[np.generic]) -> NDArray:
    """Read a number per document of a prepared shard: how often it is written (copies), or its split (splits)."""
    return np.fromfile(workspace.selection_path / name / f"{shard_index:05d}", dtype)


def _document_runs(is_chosen: NDArray[np.bool_], split_indices: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """Return runs of chosen documents: (split of the prepared shard, start and end of the run in that split).

    `is_chosen` and `split_indices`: (documents,). If labels moved documents, their split differs from the store's.
    """
    indices = np.where(split_indices == 0, np.cumsum(split_indices == 0), np.cumsum(split_indices == 1)) - 1
    documents = np.flatnonzero(is_chosen)
    is_last = (np.diff(indices[documents]) != 1) | (np.diff(split_indices[documents].astype(np.int8)) != 0)
    runs = np.split(documents, np.flatnonzero(is_last) + 1) if len(documents) else []
    return [(int(split_indices[run[0]]), int(indices[run[0]]), int(indices[run[-1]]) + 1) for run in runs]


def _write_references(workspace: Workspace, folder: Path, split: str) -> dict[str, Any]:
    """Write the references of a split's documents, one line each, in the order of the store."""
    shards = prepared_shards(workspace)
    if not any(shard.rows["has_reference"].any() for shard in shards):
        return {}
    copies = (_read_column(workspace, "copies", shard_index, np.uint16) for shard_index in range(len(shards)))
    rounds = max(int(counts.max(initial=0)) for counts in copies)
    full_plan = ShardPlan("", split, (0, 0, 0), (rounds, 0, 0), 0)
    with (folder / REFERENCES_FILE).open("wb") as stream:
        for shard_index, chosen in _iter_chosen_documents(workspace, shards, full_plan):
            rows = shards[shard_index].rows
            with ExitStack() as stack:
                files = (shards[shard_index].folder / f"{name}.references" for name in SPLITS)
                lines = [stack.enter_context(file.open("rb")) for file in files]
                has_reference = rows["has_reference"] == 1
                for split_index, is_chosen in zip(rows["split"][has_reference], chosen[has_reference], strict=True):
                    line = lines[split_index].readline()
                    if is_chosen:
                        stream.write(line)
        is_empty = stream.tell() == 0
    if is_empty:
        (folder / REFERENCES_FILE).unlink()
        return {}
    return file_entries([folder / REFERENCES_FILE])


def _map_file(base: Path, suffix: str, dtype: str) -> NDArray:
    file = base.with_suffix(suffix)
    file_dtype = np.dtype(dtype).newbyteorder("<")
    return np.memmap(file, file_dtype, "r") if file.stat().st_size else np.empty(0, file_dtype)


def _item_start(ends: NDArray, index: int) -> int:
    """Return the start of the item at `index`, given the ends of all items."""
    return int(ends[index - 1]) if index else 0


def _link_or_copy(file: Path, link: Path) -> None:
    """Hard-link a file, or copy it if linking fails (on another disk)."""
    try:
        os.link(file, link)
    except OSError:
        shutil.copyfile(file, link)
