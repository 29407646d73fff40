"""Length of a run and its disk space, before it starts: from its token store, its run file, or a sample of its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from artel.config import RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.integers import ceil_div
from artel.models.loading.language_part import MultimodalModel
from artel.objectives import DocumentSamples, Objective, build_objective, objective_type
from artel.planning.outline import local_tokenizer
from artel.planning.plan.batches import PlannedData, plan_data
from artel.text import Document, InputShard, Ledger, clean_shard, input_shards
from artel.tokens import PackedSamples, train_tokenizer
from artel.tokens.packing import best_fit, sample_sizes
from artel.tokens.store import id_dtype
from artel.training.checkpoint.retention import checkpoint_bytes
from artel.training.packing import AUTO, choose_by_lengths, choose_packing, with_packing
from artel.training.schedule import Length, run_length

_SHARD_BYTES = 128 * 1024
_NUM_SAMPLED_SHARDS = 8
_MAX_FILE_BYTES = 8 * 2**20
"""Largest file read for an estimate if it cannot be divided (a table, a compressed file)."""


@dataclass(frozen=True, slots=True)
class PlannedLength:
    """The length of a run, as far as it is known before it starts."""

    steps: int
    tokens: float
    """Tokens of all steps, without padding."""
    epoch_tokens: float | None
    """Tokens in one epoch of the training text. None if the length does not depend on it, so nothing was read."""
    note: str
    """Source of the length, in parentheses in the plan."""
    padding: float = 0.0
    """Fraction of the blocks that is padding, 0 to 1."""


def plan_length(config: RunConfig, data: PlannedData) -> PlannedLength | None:
    """Return the length of the run. None if only `artel prepare` can count it, or if `train.budget` ends the run."""
    if config.train.budget is not None:
        return None
    if data.store is not None:
        split = data.store.train
        length = run_length(config, data.samples, split)
        if data.objective.packs_text:
            return _from_length(length, length.samples * config.data.block, "counted in the prepared text")
        padding = data.samples.padding if isinstance(data.samples, PackedSamples) else 0.0
        return _from_length(length, split.tokens, "counted in the prepared text", padding)
    if data.objective.packs_text and config.train.steps is not None:
        total_tokens = config.train.steps * config.train.batch * config.data.block
        return PlannedLength(config.train.steps, total_tokens, None, "set by train.steps")
    if data.objective.packs_text and config.train.tokens is not None:
        steps = ceil_div(config.train.tokens, config.train.batch * config.data.block)
        return PlannedLength(steps, config.train.tokens, None, "set by train.tokens")
    sampled = _sample_counts(config, data)
    if sampled is None:
        return None
    counts, fraction = sampled
    tokens = float(counts.sum()) / fraction
    note = "counted in the whole text" if fraction == 1 else f"estimated from {fraction:.1%} of the text"
    if data.objective.packs_text:
        samples = tokens / config.data.block
    elif data.objective.fills_blocks(config):
        samples = best_fit(sample_sizes(counts, 1), config.data.block)[1] / fraction
    else:
        samples = len(counts) / fraction
    length = Length.from_config(config.train, max(1, round(samples)), tokens / samples)
    padding = max(0.0, 1 - tokens / (samples * config.data.block)) if data.objective.fills_blocks(config) else 0.0
    return _from_length(length, tokens, note, padding)


def _from_length(length: Length, epoch_tokens: float, note: str, padding: float = 0.0) -> PlannedLength:
    assert length.total_samples is not None  # a budget has no planned length
    assert length.steps is not None
    tokens = length.total_samples * epoch_tokens / length.samples
    return PlannedLength(length.steps, tokens, epoch_tokens, note, padding)


def with_planned_packing(config: RunConfig) -> RunConfig:
    """Return the run with `data.packing: auto` resolved, if its token store or a sample of its text allows it."""
    if config.data.packing != AUTO or not objective_type(config).packs_samples:
        return config
    data = plan_data(config)
    if data.store is not None:
        return with_packing(config, choose_packing(config, data.store.train).value)
    sampled = _sample_counts(config, data)
    return config if sampled is None else with_packing(config, choose_by_lengths(config, *sampled).value)


def _sample_counts(config: RunConfig, data: PlannedData) -> tuple[np.ndarray, float] | None:
    """Return (tokens of each sample, fraction of the training text that was read).

    Duplicates are not removed. None if no representative sample of the text can be read.
    """
    try:
        shards = [shard for shard in input_shards(config.data, _SHARD_BYTES) if shard.key != "data.validation"]
    except InputError:  # the text may exist only on the machine that trains; `artel prepare` reports a missing file
        return None
    if not shards or any(shard.size == 0 for shard in shards):
        return None
    readable = [shard for shard in shards if shard.size <= _MAX_FILE_BYTES]
    if {shard.key for shard in readable} != {shard.key for shard in shards}:
        return None
    sampled_shards = readable[:: max(1, len(readable) // _NUM_SAMPLED_SHARDS)]
    documents = list(_read_training_documents(config, sampled_shards))
    fraction = sum(shard.size for shard in sampled_shards) / sum(shard.size for shard in shards)
    objective = _with_tokenizer(config, data.objective, documents)
    results = [result for result in objective.samples(documents) if isinstance(result, DocumentSamples)]
    counts = [len(sample.ids) for result in results for sample in result.samples]
    return (np.array(counts), fraction) if sum(counts) else None


def _read_training_documents(config: RunConfig, shards: list[InputShard]) -> Iterator[Document]:
    """Yield the training documents in some shards of the text."""
    for shard in shards:
        for cleaned in clean_shard(shard, config.data, Ledger()):
            if cleaned.document.split == "train":
                yield cleaned.document


def _with_tokenizer(config: RunConfig, objective: Objective, documents: list[Document]) -> Objective:
    """Return the objective with a tokenizer that counts like the run's. Train one on `documents` if it has none."""
    if local_tokenizer(config) is not None:
        return objective
    training = config.tokenizer.train or TokenizerTraining()
    texts = [document.record.text for document in documents]
    return build_objective(
        config, train_tokenizer(iter(texts), training, encoder=objective_type(config).adds_special_tokens)
    )


def disk_bytes(
    config: RunConfig,
    model: PreTrainedModel,
    multimodal: MultimodalModel | None,
    data: PlannedData,
    length: PlannedLength | None,
) -> dict[str, int]:
    """Return bytes on disk: `checkpoints` (the kept ones and the one being written), `model`, `store`, `teacher`.

    `teacher` are stored teacher outputs, as if every token were a target. If `model` is the language part of
    `multimodal`, it is saved inside the full model.
    """
    checkpoint_size = checkpoint_bytes(model, config.train, 1)
    num_checkpoints = config.checkpoint.keep + (config.checkpoint.best is not None) + 1
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters()) + _other_bytes(multimodal)
    sizes = {
        "checkpoints": checkpoint_size * num_checkpoints,
        "model": trained if config.model.lora is not None else model_bytes,
    }
    if data.store is not None:
        sizes["store"] = sum(file.stat().st_size for file in data.store.folder.rglob("*") if file.is_file())
    elif length is not None and length.epoch_tokens is not None:
        sizes["store"] = round(length.epoch_tokens) * np.dtype(id_dtype(data.tokenizer.vocabulary)).itemsize
    teacher = data.objective.teacher
    if teacher is not None and teacher.settings is not None:
        tokens = data.store.train.tokens + data.store.validation.tokens if data.store is not None else 0
        if not tokens and length is not None and length.epoch_tokens is not None:
            tokens = round(length.epoch_tokens)
        if tokens:
            sizes["teacher"] = tokens * teacher.bytes_per_target
    return sizes


def _other_bytes(multimodal: MultimodalModel | None) -> int:
    """Return the bytes of a multimodal model without its language part, in the dtype of its files."""
    if multimodal is None:
        return 0
    dtype = multimodal.config.dtype or torch.float32
    other_tensors = [
        tensor for name, tensor in multimodal.model.named_parameters() if multimodal.name_in_part(name) is None
    ]
    return sum(tensor.numel() * dtype.itemsize for tensor in [*other_tensors, *_saved_buffers(multimodal.model)])


def _saved_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers that are saved with the weights."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer
