"""Length of a run before it starts: from its prepared text, its run file, or a sample of its sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from artel.config import RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.objectives import DocumentSamples, Objective, objective_of, objective_type
from artel.planning.outline import tokenizer_here
from artel.planning.plan.batches import PlannedData, planned_data
from artel.text import Document, InputShard, Ledger, clean_shard, input_shards
from artel.tokens import PackedSamples, train_tokenizer
from artel.tokens.packing import best_fit, sample_sizes
from artel.training.packing import AUTO, choose_by_lengths, choose_packing, with_packing
from artel.training.schedule import Length, run_length

_PIECE_BYTES = 128 * 1024
_PIECES = 8
_LARGEST_BYTES = 8 * 2**20
"""Of a file that cannot be divided (a table, a compressed file): one that is larger is not read for an estimate."""


@dataclass(frozen=True, slots=True)
class PlannedLength:
    """The length of a run, as far as it is known before it."""

    steps: int
    tokens: float
    """In all steps together, without padding."""
    epoch_tokens: float | None
    """Of the training part, once; None where the length does not depend on it, and it was not looked at."""
    note: str
    """Source of the length, in parentheses in the plan."""
    filler: float = 0.0
    """The share of blocks that holds no token, 0 to 1."""


def planned_length(run: RunConfig, data: PlannedData) -> PlannedLength | None:
    """How long the run is; None where only `artel prepare` can tell, or `train.budget` ends it."""
    if run.train.budget is not None:
        return None
    if data.store is not None:
        part, length = data.store.train, run_length(run, data.samples, data.store.train)
        if data.objective.packs_text:
            return _planned(length, length.samples * run.data.block, "counted in the prepared text")
        filler = data.samples.padding if isinstance(data.samples, PackedSamples) else 0.0
        return _planned(length, part.tokens, "counted in the prepared text", filler)
    if data.objective.packs_text and run.train.steps is not None:
        in_all = run.train.steps * run.train.batch * run.data.block
        return PlannedLength(run.train.steps, in_all, None, "set by train.steps")
    if data.objective.packs_text and run.train.tokens is not None:
        steps = -(-run.train.tokens // (run.train.batch * run.data.block))
        return PlannedLength(steps, run.train.tokens, None, "set by train.tokens")
    sampled = _sampled(run, data)
    if sampled is None:
        return None
    counts, share = sampled
    tokens = float(counts.sum()) / share
    note = "counted in the whole text" if share == 1 else f"estimated from {share:.1%} of the text"
    if data.objective.packs_text:
        samples = tokens / run.data.block
    elif data.objective.fills_blocks(run):
        samples = best_fit(sample_sizes(counts, 1), run.data.block)[1] / share
    else:
        samples = len(counts) / share
    length = Length.of(run.train, max(1, round(samples)), tokens / samples)
    filler = max(0.0, 1 - tokens / (samples * run.data.block)) if data.objective.fills_blocks(run) else 0.0
    return _planned(length, tokens, note, filler)


def _planned(length: Length, epoch_tokens: float, note: str, filler: float = 0.0) -> PlannedLength:
    assert length.total is not None  # a budget has no planned length
    assert length.steps is not None
    tokens = length.total * epoch_tokens / length.samples
    return PlannedLength(length.steps, tokens, epoch_tokens, note, filler)


def with_planned_packing(run: RunConfig) -> RunConfig:
    """The run with what will be chosen in place of `data.packing: auto`, as far as its store or its text tells."""
    if run.data.packing != AUTO or not objective_type(run).packs_samples:
        return run
    data = planned_data(run)
    if data.store is not None:
        return with_packing(run, choose_packing(run, data.store.train).value)
    sampled = _sampled(run, data)
    return run if sampled is None else with_packing(run, choose_by_lengths(run, *sampled).value)


def _sampled(run: RunConfig, data: PlannedData) -> tuple[np.ndarray, float] | None:
    """(tokens of each sample, share): from the share of the training part's bytes that was read.

    Duplicates are not looked for. None where nothing that tells of the rest can be read.
    """
    try:
        pieces = [piece for piece in input_shards(run.data, _PIECE_BYTES) if piece.key != "data.validation"]
    except InputError:  # the text may be where the run will be: `artel prepare` says so if it is not
        return None
    if not pieces or any(piece.size == 0 for piece in pieces):
        return None
    readable = [piece for piece in pieces if piece.size <= _LARGEST_BYTES]
    if {piece.key for piece in readable} != {piece.key for piece in pieces}:
        return None
    chosen = readable[:: max(1, len(readable) // _PIECES)]
    documents = list(_documents(run, chosen))
    share = sum(piece.size for piece in chosen) / sum(piece.size for piece in pieces)
    objective = _with_tokenizer(run, data.objective, documents)
    made = [item for item in objective.samples(documents) if isinstance(item, DocumentSamples)]
    counts = [len(sample.ids) for item in made for sample in item.samples]
    return (np.array(counts), share) if sum(counts) else None


def _documents(run: RunConfig, pieces: list[InputShard]) -> Iterator[Document]:
    """The documents for training in some pieces of the text."""
    for piece in pieces:
        for cleaned in clean_shard(piece, run.data, Ledger()):
            if cleaned.document.split == "train":
                yield cleaned.document


def _with_tokenizer(run: RunConfig, objective: Objective, documents: list[Document]) -> Objective:
    """The objective with a tokenizer that counts as the run's will: trained on `documents` if it is not there yet."""
    if tokenizer_here(run) is not None:
        return objective
    training = run.tokenizer.train or TokenizerTraining()
    texts = [document.record.text for document in documents]
    return objective_of(run, train_tokenizer(iter(texts), training, encoder=objective_type(run).encoder))
