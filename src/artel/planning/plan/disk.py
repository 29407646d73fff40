"""What a run writes to disks: checkpoints, the finished model, the token store."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.models.loading.language_part import MultimodalModel
from artel.planning.plan.batches import PlannedData
from artel.planning.plan.length import PlannedLength
from artel.tokens.store import token_type
from artel.training.checkpoint.retention import checkpoint_bytes


def disk_bytes(
    run: RunConfig,
    model: PreTrainedModel,
    whole: MultimodalModel | None,
    data: PlannedData,
    length: PlannedLength | None,
) -> dict[str, int]:
    """Bytes by what they are: `checkpoints` that are kept at a time with one being written, `model`, `store`; and what
    a `teacher` says, if that is kept, as if every token were a target.

    `model` is saved inside of `whole`, where it is the language part of that.
    """
    one = checkpoint_bytes(model, run.train, 1)
    kept = run.checkpoint.keep + (run.checkpoint.best is not None) + 1
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    all_of_it = sum(parameter.nbytes for parameter in model.parameters()) + _bytes_around(whole)
    sizes = {"checkpoints": one * kept, "model": trained if run.model.lora is not None else all_of_it}
    if data.store is not None:
        sizes["store"] = sum(file.stat().st_size for file in data.store.folder.rglob("*") if file.is_file())
    elif length is not None and length.epoch_tokens is not None:
        sizes["store"] = round(length.epoch_tokens) * np.dtype(token_type(data.tokenizer.vocabulary)).itemsize
    teacher = data.objective.teacher
    if teacher is not None and teacher.settings is not None:
        tokens = data.store.train.tokens + data.store.validation.tokens if data.store is not None else 0
        if not tokens and length is not None and length.epoch_tokens is not None:
            tokens = round(length.epoch_tokens)
        if tokens:
            sizes["teacher"] = tokens * teacher.bytes_per_target
    return sizes


def _bytes_around(whole: MultimodalModel | None) -> int:
    """Of what a multimodal model has beside its language part's weights, in the dtype that its files have."""
    if whole is None:
        return 0
    dtype = whole.config.dtype or torch.float32
    outside = [tensor for name, tensor in whole.model.named_parameters() if whole.name_in_part(name) is None]
    return sum(tensor.numel() * dtype.itemsize for tensor in [*outside, *_saved_buffers(whole.model)])


def _saved_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers that are saved with the weights."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer
