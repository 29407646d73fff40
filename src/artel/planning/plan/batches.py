"""The micro-batches of a run's worst step: of the longest sample in its token store, or in the first of its texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from transformers import PreTrainedModel

from artel.config import RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.objectives import Batch, Objective, objective_of, objective_type
from artel.planning.outline import known_tokenizer, tokenizer_here
from artel.preparing import is_prepared, prepare
from artel.text import Ledger, read_documents
from artel.tokens import Sample, SampleList, Samples, Tokenizer, TokenStore, evaluation_rows, train_tokenizer
from artel.tokens.packing import best_fit, join_samples, sample_sizes
from artel.training.micro_batch import longest_sample, repeat_sample

_DOCUMENTS = 200  # of the sources that are read where there is no store


@dataclass(frozen=True, slots=True)
class PlannedData:
    """What a plan knows of a run's data."""

    objective: Objective
    tokenizer: Tokenizer
    """Of as many ids as the run's own, which may still have to be trained."""
    samples: Samples
    """Those of the token store, or of some of its texts where there is none."""
    longest: int
    """The index of the one that makes the largest batch."""
    row_tokens: int
    note: str
    store: TokenStore | None = None

    def batch(self, rows: int) -> Batch:
        """A micro-batch of so many rows of the longest sample."""
        if self.store is not None:
            return repeat_sample(self.objective, self.samples, self.longest, rows)
        return self.objective.batch(evaluation_rows(self.samples, np.full(rows, self.longest), rows))

    def laid_out_for(self, build: Callable[[], PreTrainedModel], device: str) -> PlannedData:
        """The data as they are laid out for a model on a device of this type; `build` gives it on the meta device."""
        self.objective.plan_for(build, device)
        if self.store is None:
            return replace(self, row_tokens=self.batch(1).tensors["input_ids"].numel())
        longest, tokens = longest_sample(self.objective, self.samples)
        return replace(self, longest=longest, row_tokens=tokens)


def planned_data(run: RunConfig) -> PlannedData:
    """The run's objective and its longest sample. Raises InputError."""
    if is_prepared(run):
        prepared = prepare(run)
        store = prepared.open()
        objective = objective_of(prepared.config, prepared.tokenizer())
        samples = objective.dataset(store.train)
        index, tokens = longest_sample(objective, samples)
        return PlannedData(objective, objective.tokenizer, samples, index, tokens, "its token store", store)
    objective = objective_of(run, tokenizer_here(run) or _small_tokenizer(run))
    if objective.packs_text:
        some = [_block(run, objective)]
        note = f"blocks of {run.data.block} tokens"
    elif objective.fills_blocks(run):
        some = [_packed_block(run, _samples_of_sources(run, objective))]
        note = f"blocks of {run.data.block} tokens, filled with samples of its text"
    else:
        some = _samples_of_sources(run, objective)
        note = f"the longest of the first {_DOCUMENTS} documents: {max(len(sample.ids) for sample in some)} tokens"
    longest = max(range(len(some)), key=lambda index: len(some[index].ids))
    data = PlannedData(objective, known_tokenizer(run), SampleList(some), longest, 0, note)
    return replace(data, row_tokens=data.batch(1).tensors["input_ids"].numel())


def _small_tokenizer(run: RunConfig) -> Tokenizer:
    """In place of one that is still to be trained: the same special tokens, and a few ids."""
    kind = objective_type(run)
    training = run.tokenizer.train or TokenizerTraining()
    special = list(dict.fromkeys([*kind.special_tokens(run), *training.special]))
    few = training.model_copy(update={"vocab": 256 + len(special) + 16, "special": special})
    return train_tokenizer(iter([" ".join(map(str, range(2000)))]), few, encoder=kind.encoder)


def _block(run: RunConfig, objective: Objective) -> Sample:
    """A block of text, of one document."""
    ids = np.arange(run.data.block + 1) % max(1, objective.tokenizer.vocabulary - 1)
    flags = np.full(len(ids), 3, dtype=np.uint32) if objective.isolated_documents else None
    return Sample(ids, flags)


def _packed_block(run: RunConfig, samples: list[Sample]) -> Sample:
    """The fullest block of some samples."""
    sizes = sample_sizes(np.array([len(sample.ids) for sample in samples]), 1)
    blocks = best_fit(sizes, run.data.block)[0]
    fullest = int(np.argmax(np.bincount(blocks, weights=sizes)))
    return join_samples([sample for sample, block in zip(samples, blocks, strict=True) if block == fullest])


def _samples_of_sources(run: RunConfig, objective: Objective) -> list[Sample]:
    documents = list(islice(read_documents(run.data, Ledger()), _DOCUMENTS))
    made = [item for item in objective.samples(documents) if hasattr(item, "samples")]
    samples = [sample for item in made for sample in item.samples]
    if not samples:
        what = f"the first {len(documents)} documents make no sample of up to {run.data.block} tokens"
        raise InputError.at("data.sources", what, "artel prepare says why")
    return samples
