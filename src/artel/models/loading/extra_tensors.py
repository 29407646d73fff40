"""Tensors in a pretrained model's files that transformers does not load.

DeepSeek-V3, GLM-4.5 and Qwen3-Next have layers that predict several tokens ahead: transformers ignores them, vLLM uses
them. artel saves such tensors again bit for bit. During training it keeps only their names, and reads the values from
the source when it saves the model. If that is impossible, it removes the layers from config.json.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from artel.messages import logger
from artel.models.loading.safetensors_files import TensorFiles
from artel.printable import join_names

_LAYERS_AHEAD = re.compile(r"num_\w*(nextn|mtp)\w*_layers")
"""Configuration keys for the number of layers that predict further tokens."""
_COMPUTED_NAMES = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.inv_freq|position_ids|(?:attn|attention)\.(?:masked_bias|causal_mask))"
)
_MASK = re.compile(r"(?:.*\.)?(?:attn|attention)\.bias")
"""Buffers that earlier versions of transformers saved (GPT-2, GPT-J, GPT-NeoX, Llama, BERT) and later ones compute.
GPT-2's mask has four dimensions, a bias has one."""


@dataclass(frozen=True, slots=True)
class ExtraTensors:
    """Tensors that are saved with a model but are not part of it."""

    source: str
    names: tuple[str, ...]
    paths: tuple[Path, ...]
    """The files of the source."""


def get_extra_tensors(model: nn.Module) -> ExtraTensors | None:
    """Return the extra tensors that are saved with `model`, if any."""
    return getattr(model, "_artel_extra_tensors", None)


def remember_unused(
    model: PreTrainedModel, source: str, files: TensorFiles, unused: Collection[str], grown: Mapping[str, int]
) -> list[str]:
    """Remember the tensors in `files` that `model` does not use, to save them with it. Return notes for the user.

    They are left out if the model has another head than `source`, since they may belong to the old head. They are also
    left out if they have one row per token and the vocabulary grew (`grown`: old numbers of rows).
    """
    buffer_names = {name for name, _ in model.named_buffers()}
    candidates = sorted(name for name in {*unused} - buffer_names if not _COMPUTED_NAMES.fullmatch(name))
    rows = set(grown.values())
    with files if candidates else nullcontext():
        names = tuple(name for name in candidates if not (_MASK.fullmatch(name) and len(files.shape(name)) == 4))
        has_vocabulary = any(rows.intersection(files.shape(name)[:1]) for name in names)
    if not names:
        return []
    saved_class = (getattr(model.config, "architectures", None) or [type(model).__name__])[0]
    if saved_class == type(model).__name__ and not has_vocabulary:
        model._artel_extra_tensors = ExtraTensors(source, names, tuple(files.paths))
        return [note_saved_unchanged(source, names)]
    return note_left_out(model, source, names)


def note_saved_unchanged(source: str, names: Collection[str]) -> str:
    """Return the note for the user about tensors that are saved again."""
    return f"in {source} but not part of this model, so not trained; saved again unchanged: {join_names(names)}"


def note_left_out(model: PreTrainedModel, source: str, names: Iterable[str]) -> list[str]:
    """Set the number of layers that predict further tokens to 0 in the configuration. Return notes for the user."""
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    zeroed = [key for config in configs for key in _zero_layers_ahead(config)]
    changed = f"; {' and '.join(dict.fromkeys(zeroed))} becomes 0" if zeroed else ""
    return [f"in {source} but not in this model, so left out: {join_names(sorted(names))}{changed}"]


def _zero_layers_ahead(config: PreTrainedConfig) -> list[str]:
    """Set the number of layers ahead to 0. Return the changed keys."""
    keys = [key for key, value in vars(config).items() if _LAYERS_AHEAD.fullmatch(key) and value]
    for key in keys:
        setattr(config, key, 0)
    return keys


@contextmanager
def with_extra_tensors(
    model: PreTrainedModel, weights: dict[str, torch.Tensor] | None
) -> Iterator[dict[str, torch.Tensor] | None]:
    """Yield `weights`, or those of `model`, with the extra tensors, which are memory-mapped.

    If the source is gone, log a warning and leave the extra tensors out.
    """
    source_tensors = get_extra_tensors(model)
    if source_tensors is None:
        yield weights
        return
    files = TensorFiles(list(source_tensors.paths))
    try:
        with files:
            tensors = {name: files.read(name) for name in source_tensors.names}
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        (note,) = note_left_out(model, source_tensors.source, source_tensors.names)
        reason = " ".join(str(error).split())[:200]
        logger.warning("%s can no longer be read (%s). %s", source_tensors.source, reason, note)
        yield weights
        return
    yield {**(model.state_dict() if weights is None else weights), **tensors}
