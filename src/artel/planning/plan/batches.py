"""Micro-batches for a plan: the largest (the longest sample), and an average one (from the first steps)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from transformers import PreTrainedModel

from artel.config import RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.objectives import Batch, Objective, build_objective, objective_type
from artel.planning.outline import known_tokenizer, local_tokenizer
from artel.preparing import is_prepared, prepare_silently
from artel.text import Ledger, read_documents
from artel.tokens import (
    Rows,
    Sample,
    SampleList,
    Samples,
    Tokenizer,
    TokenStore,
    evaluation_rows,
    micro_batches,
    step_positions,
    train_tokenizer,
)
from artel.tokens.packing import best_fit, join_samples, sample_sizes
from artel.training.micro_batch import longest_sample, repeat_sample
from artel.training.schedule import run_length

_MAX_DOCUMENTS = 200  # documents to read if there is no token store
_NUM_SAMPLES = 256
"""Approximate number of samples to examine. Of a large batch, only some micro-batches are examined."""


@dataclass(frozen=True, slots=True)
class PlannedData:
    """The data of a run that a plan needs."""

    objective: Objective
    tokenizer: Tokenizer
    """Has as many ids as the run's tokenizer, which may not be trained yet."""
    samples: Samples
    """Samples of the token store, or of the first documents if there is none."""
    longest: int
    """Index of the sample that makes the largest batch."""
    row_tokens: int
    """Tokens of a row, with padding."""
    note: str
    """Origin of the sample, for `artel plan`."""
    store: TokenStore | None = None

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each sample of the token store, or of those that were read."""
        if self.store is None:
            return np.array([len(self.samples.read(index).ids) for index in range(len(self.samples))])
        return np.diff(self.store.train.ends().astype(np.int64), prepend=0)

    def batch(self, num_rows: int) -> Batch:
        """Return a micro-batch of `num_rows` rows of the longest sample."""
        if self.store is not None:
            return repeat_sample(self.objective, self.samples, self.longest, num_rows)
        return self.objective.batch(evaluation_rows(self.samples, np.full(num_rows, self.longest), num_rows))

    def with_layout_for(self, build: Callable[[], PreTrainedModel], device: str) -> PlannedData:
        """Return the data as laid out for a model on this device type. `build` returns the model on the meta device."""
        self.objective.plan_for(build, device)
        if self.store is None:
            return replace(self, row_tokens=self.batch(1).tensors["input_ids"].numel())
        longest, tokens = longest_sample(self.objective, self.samples)
        return replace(self, longest=longest, row_tokens=tokens)


def plan_data(config: RunConfig) -> PlannedData:
    """Return the run's objective and samples. Raise InputError if the text has no usable sample."""
    if is_prepared(config):
        prepared = prepare_silently(config)
        store = prepared.open()
        objective = build_objective(prepared.config, prepared.tokenizer())
        dataset = objective.dataset(store.train)
        index, tokens = longest_sample(objective, dataset)
        return PlannedData(objective, objective.tokenizer, dataset, index, tokens, "its token store", store)
    objective = build_objective(config, local_tokenizer(config) or _small_tokenizer(config))
    if objective.packs_text:
        samples = [_text_block(config, objective)]
        note = f"blocks of {config.data.block} tokens"
    elif objective.fills_blocks(config):
        samples = [_packed_block(config, _read_samples(config, objective))]
        note = f"blocks of {config.data.block} tokens, filled with samples of its text"
    else:
        samples = _read_samples(config, objective)
        note = (
            f"the longest of the first {_MAX_DOCUMENTS} documents: {max(len(sample.ids) for sample in samples)} tokens"
        )
    longest = max(range(len(samples)), key=lambda index: len(samples[index].ids))
    data = PlannedData(objective, known_tokenizer(config), SampleList(samples), longest, 0, note)
    return replace(data, row_tokens=data.batch(1).tensors["input_ids"].numel())


def _small_tokenizer(config: RunConfig) -> Tokenizer:
    """Train a placeholder for a tokenizer that is not trained yet, with the same special tokens and a few ids."""
    objective_class = objective_type(config)
    training = config.tokenizer.train or TokenizerTraining()
    special = list(dict.fromkeys([*objective_class.special_tokens(config), *training.special]))
    small_training = training.model_copy(update={"vocab": 256 + len(special) + 16, "special": special})
    return train_tokenizer(
        iter([" ".join(map(str, range(2000)))]), small_training, encoder=objective_class.adds_special_tokens
    )


def _text_block(config: RunConfig, objective: Objective) -> Sample:
    """Return a block of text from one document."""
    ids = np.arange(config.data.block + 1) % max(1, objective.tokenizer.vocabulary - 1)
    flags = np.full(len(ids), 3, dtype=np.uint32) if objective.isolated_documents else None
    return Sample(ids, flags)


def _packed_block(config: RunConfig, samples: list[Sample]) -> Sample:
    """Return the fullest block when the samples are packed."""
    sizes = sample_sizes(np.array([len(sample.ids) for sample in samples]), 1)
    blocks = best_fit(sizes, config.data.block)[0]
    fullest = int(np.argmax(np.bincount(blocks, weights=sizes)))
    return join_samples([sample for sample, block in zip(samples, blocks, strict=True) if block == fullest])


def _read_samples(config: RunConfig, objective: Objective) -> list[Sample]:
    documents = list(islice(read_documents(config.data, Ledger()), _MAX_DOCUMENTS))
    results = [result for result in objective.samples(documents) if hasattr(result, "samples")]
    samples = [sample for result in results for sample in result.samples]
    if not samples:
        what = f"the first {len(documents)} documents make no sample of up to {config.data.block} tokens"
        raise InputError.at("data.sources", what, "run artel prepare to see why")
    return samples


@dataclass(frozen=True, slots=True)
class AverageStep:
    """Average work per step."""

    batch: Batch
    """A micro-batch with about as many positions as the slowest rank has on average."""
    tokens: float
    """Tokens of all ranks in a step, without padding."""


def find_average_step(config: RunConfig, data: PlannedData, num_rows: int, dp_degree: int) -> AverageStep | None:
    """Return the average step with `num_rows` rows on each of `dp_degree` data-parallel ranks.

    None if all rows are blocks. A step takes as long as the rank with the most to compute.
    """
    if data.objective.packs_text or data.objective.fills_blocks(config):
        return None
    ranks = range(min(dp_degree, max(1, _NUM_SAMPLES // num_rows)))
    per_rank = max(1, _NUM_SAMPLES // (num_rows * len(ranks)))
    steps = max(1, _NUM_SAMPLES // config.train.batch)
    batches: list[Batch] = []
    slowest: list[float] = []
    num_micro_batches = 1
    for step in _rows_of_steps(config, data, num_rows, steps, ranks, dp_degree):
        num_micro_batches = len(step[0])
        rank_batches = [[data.objective.batch(micro_batch) for micro_batch in rank[:per_rank]] for rank in step]
        slowest.append(max(float(np.mean([batch.computed_positions for batch in rank])) for rank in rank_batches))
        batches += [batch for rank in rank_batches for batch in rank]
    mean_positions = float(np.mean(slowest))
    tokens = float(np.mean([batch.tokens for batch in batches])) * num_micro_batches * dp_degree
    return AverageStep(min(batches, key=lambda batch: abs(batch.computed_positions - mean_positions)), tokens)


def _rows_of_steps(
    config: RunConfig, data: PlannedData, num_rows: int, steps: int, ranks: Sequence[int], dp_degree: int
) -> Iterator[list[list[Rows]]]:
    """Yield, for each of the first steps, the micro-batches of these data-parallel ranks in training order.

    Without a token store, samples read from the sources are drawn at random.
    """
    samples = data.samples
    batch = config.train.batch
    length = None if data.store is None else run_length(config, samples, data.store.train)
    order = None if data.store is None else data.objective.order(data.store.train, len(samples))
    total_samples = None if length is None else length.total_samples
    if length is not None and length.steps is not None:
        steps = min(steps, length.steps)
    for step in range(steps):
        positions = step_positions(step, batch, total_samples)
        if order is None:
            indices, epochs = np.random.default_rng(step).integers(len(samples), size=batch), np.full(batch, -1)
        else:
            indices, epochs = order.at(positions), positions // len(samples)
        yield [
            micro_batches(
                samples, indices, epochs, rank=rank, world_size=dp_degree, batch_size=batch, max_rows=num_rows
            )
            for rank in ranks
        ]
