"""From the parts to the store: its shards, each made by itself, then the manifest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from artel.objectives import Objective
from artel.preparing.selection import Made, ShardPlan, made_parts, shard_plans
from artel.preparing.workspace import Workspace
from artel.storage import new_folder
from artel.tokens.store.manifest import PARTS, write_manifest
from artel.tokens.store.shards import ShardWriter, facts_by_name, no_samples, origin_line, token_type
from artel.tokens.store.store import SOURCES


def write_shard(workspace: Workspace, parts: list[Made], plan: ShardPlan, objective: Objective) -> None:
    """A shard's files, and `entry.json`: what the manifest says of it."""
    document = plan.first_document
    dtype = token_type(objective.tokenizer.vocabulary)
    with new_folder(workspace.shard(plan.folder)) as folder:
        shard = ShardWriter(folder / plan.name, dtype)
        for number, chosen in _chosen(workspace, parts, plan):
            samples = _Samples(parts[number], plan.split, dtype)
            for first, last in _runs(chosen):
                samples.copy(shard, first, last, objective.document_number, document)
                document += last - first
        entry = shard.close()
        (folder / "entry.json").write_bytes(orjson.dumps([entry, shard.flags, shard.columns]))


def write_store(workspace: Workspace, folder: Path, about: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """The finished shards, the tokenizer, the ledger and the manifest into `folder`; the manifest."""
    parts = {split: no_samples() for split in PARTS}
    ledger = orjson.loads((workspace.verdict / "ledger.json").read_bytes())
    for split in PARTS:
        (folder / split).mkdir()
        parts[split]["documents"] = ledger["parts"][split]["documents"]
        parts[split]["bytes"] = ledger["parts"][split]["bytes"]
        parts[split]["files"] = _write_sources(workspace, folder / split, split)
    for plan in shard_plans(workspace):
        counts = parts[plan.split]
        made = workspace.shard(plan.folder)
        entry, flags, columns = orjson.loads((made / "entry.json").read_bytes())
        for name in entry["files"]:
            _link(made / name, folder / plan.split / name)
        if entry["samples"]:
            counts["shards"].append(entry)
            counts["tokens"] += entry["tokens"]
            counts["samples"] += entry["samples"]
            counts["flags"], counts["numbers"] = flags, columns
    shutil.copytree(workspace.tokenizer, folder / "tokenizer")
    counts = {name: {split: found[name] for split, found in parts.items()} for name in ("tokens", "samples")}
    (folder / "ledger.json").write_bytes(orjson.dumps({**ledger, **counts}, option=orjson.OPT_INDENT_2))
    _link(workspace.verdict / "rejected.jsonl", folder / "rejected.jsonl")
    return write_manifest(folder, token_type(vocabulary), about, parts)


class _Samples:
    """The samples that a part of the text has for one part of the split, by the numbers of their documents there."""

    def __init__(self, made: Made, split: str, dtype: str) -> None:
        rows = made.rows[made.rows["split"] == PARTS.index(split)]
        self._made = made
        self._tokens_end = np.cumsum(rows["tokens"].astype(np.int64))
        self._samples_end = np.cumsum(rows["samples"].astype(np.int64))
        base, told = made.folder / split, made.told[split]
        self._tokens = _mapped(base, ".tokens", dtype)
        self._lengths = np.diff(_mapped(base, ".ends", "<u8").astype(np.int64), prepend=0)
        self._flags = _mapped(base, ".flags", told["flags"]) if told["flags"] else None
        self._numbers = _mapped(base, ".numbers", "<i8").reshape(-1, told["numbers"]) if told["numbers"] else None
        self._origins = _mapped(base, ".origins", "u1")
        self._lines_end = np.flatnonzero(self._origins == ord("\n")) + 1

    def copy(self, shard: ShardWriter, first: int, last: int, number_column: int | None, document: int) -> None:
        """Documents first to before last; the first of them is number `document` in its part of the store."""
        tokens = slice(_before(self._tokens_end, first), _before(self._tokens_end, last))
        samples = slice(_before(self._samples_end, first), _before(self._samples_end, last))
        numbers = None if self._numbers is None else self._numbers[samples]
        if numbers is not None and number_column is not None:
            counts = np.diff(self._samples_end[first:last], prepend=samples.start)
            numbers = np.array(numbers)
            numbers[:, number_column] = document + np.repeat(np.arange(last - first), counts)
        origins = self._origins[_before(self._lines_end, samples.start) : _before(self._lines_end, samples.stop)]
        shard.add_many(self._tokens[tokens], self._lengths[samples], self._whole(origins.tobytes()),
                       None if self._flags is None else self._flags[tokens], numbers)  # fmt: skip

    def _whole(self, origins: bytes) -> bytes:
        """Lines of origins, each with its line counted in the whole file."""
        if not self._made.lines_before:
            return origins
        lines = origins.decode("utf-8", "surrogateescape").split("\n")[:-1]
        return b"".join(origin_line(self._made.origin(line)) for line in lines)


def _chosen(workspace: Workspace, parts: list[Made], plan: ShardPlan) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """For each round and part that the shard takes from: the part's number, and which of its documents in the split."""
    (round_, part, document), stop = plan.start, plan.stop
    while (round_, part, 0) < stop:
        chosen = _copies(workspace, part) > round_
        chosen[:document] = False
        if (round_, part) == stop[:2]:
            chosen[stop[2] :] = False
        yield part, chosen[parts[part].rows["split"] == PARTS.index(plan.split)]
        part, document = part + 1, 0
        if part == len(parts):
            round_, part = round_ + 1, 0


def _copies(workspace: Workspace, part: int) -> NDArray[np.uint16]:
    """How often each document of a part is written."""
    return np.fromfile(workspace.verdict / "copies" / f"{part:05d}", np.uint16)


def _runs(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and last + 1 of each run of those that are chosen."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _write_sources(workspace: Workspace, folder: Path, split: str) -> dict[str, Any]:
    """What the documents of a split are judged by, a line each, in the order of the store."""
    parts = made_parts(workspace)
    if not any((part.rows["has_source"] & (part.rows["split"] == PARTS.index(split))).any() for part in parts):
        return {}
    rounds = max(int(_copies(workspace, number).max(initial=0)) for number in range(len(parts)))
    everything = ShardPlan("", split, (0, 0, 0), (rounds, 0, 0), 0)
    with (folder / SOURCES).open("wb") as stream:
        for number, chosen in _chosen(workspace, parts, everything):
            rows = parts[number].rows[parts[number].rows["split"] == PARTS.index(split)]
            with (parts[number].folder / f"{split}.sources").open("rb") as lines:
                for is_chosen in chosen[rows["has_source"] == 1]:
                    line = lines.readline()
                    if is_chosen:
                        stream.write(line)
    return facts_by_name([folder / SOURCES])


def _mapped(base: Path, suffix: str, dtype: str) -> NDArray:
    file = base.with_suffix(suffix)
    kind = np.dtype(dtype).newbyteorder("<")
    return np.memmap(file, kind, "r") if file.stat().st_size else np.empty(0, kind)


def _before(ends: NDArray, number: int) -> int:
    """Where a thing begins whose predecessors end at `ends`."""
    return int(ends[number - 1]) if number else 0


def _link(file: Path, name: Path) -> None:
    """The same file under another name: nothing is copied on one disk."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)
