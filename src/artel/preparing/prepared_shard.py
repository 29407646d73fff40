"""An input shard that a worker has prepared, as the later stages read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from artel.preparing.input_shards import DOCUMENT
from artel.preparing.workspace import Workspace
from artel.text import Contaminated, Rejected


@dataclass(frozen=True)
class PreparedShard:
    """What a worker made of an input shard."""

    folder: Path
    rows: NDArray
    """DOCUMENT, memory-mapped."""
    summary: dict[str, Any]
    """Its summary.json."""
    lines_before: int
    """Lines of its file in earlier shards; 0 for whole files."""

    @property
    def notes(self) -> Iterator[dict[str, Any]]:
        with (self.folder / "notes.jsonl").open("rb") as stream:
            yield from map(orjson.loads, stream)

    @property
    def rejected(self) -> Iterator[Rejected]:
        with (self.folder / "rejected.jsonl").open("rb") as stream:
            for origin, reason, detail, set_name in map(orjson.loads, stream):
                yield Rejected(self.origin(origin), reason, detail, set_name)

    @property
    def contaminated(self) -> Iterator[Contaminated]:
        with (self.folder / "contaminated.jsonl").open("rb") as stream:
            for origin, set_name, rows, words in map(orjson.loads, stream):
                yield Contaminated(self.origin(origin), set_name, rows, words)

    def origin(self, origin: str) -> str:
        """An origin `file:line` with its line counted in the whole file."""
        place, _, line = origin.rpartition(":")
        return f"{place}:{int(line) + self.lines_before}" if self.lines_before and line.isdigit() else origin


def prepared_shards(workspace: Workspace) -> list[PreparedShard]:
    """The prepared shards of a workspace, in order."""
    shards: list[PreparedShard] = []
    lines_before = 0
    for number, input_shard in enumerate(workspace.input_shards):
        folder = workspace.text(number)
        summary = orjson.loads((folder / "summary.json").read_bytes())
        span = input_shard.inputs[0].span if input_shard.inputs else None
        if span is None or span.start == 0:
            lines_before = 0
        is_empty = (folder / "documents").stat().st_size == 0
        rows = np.empty(0, DOCUMENT) if is_empty else np.memmap(folder / "documents", DOCUMENT, "r")
        shards.append(PreparedShard(folder, rows, summary, lines_before))
        lines_before += summary["lines"] or 0
    return shards


def encoder_notes(workspace: Workspace) -> list[str]:
    """Sentences for the user about the encoders; none about shards too small for more than one encoder."""
    notes = {shard.summary["encoder"] for shard in prepared_shards(workspace)}
    return sorted(note for note in notes if note and not note.startswith("Tokenizing the first"))
