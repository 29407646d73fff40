"""Inputs with which the documents of a block do not see one another.

transformers passes a four-dimensional mask to every attention layer unchanged, whatever the architecture, so a mask and
positions are enough for attention. Layers with a state run each document by itself (`hybrid_state.py`). Each model is
tested for obeying before it is trained.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.errors import InputError, Problem
from artel.models.attention import MASKED_NAME, NAME, block_mask, query_positions
from artel.models.attention_masks import allow_block_masks, takes_block_masks, takes_document_numbers
from artel.models.evaluating import evaluating
from artel.models.half_base import hidden_dtype
from artel.models.hybrid_state import (
    NO_MIXER_LAYERS,
    SPLIT,
    STATE_LAYERS,
    document_split,
    runs_by_documents,
    state_modules,
)
from artel.models.loading.heads import model_class
from artel.models.loading.model_folder import read_config
from artel.models.loading.structure import outline, position_limit

_WINDOW = "sliding_attention"
MASKED = {"full_attention", _WINDOW}
"""Layer types in which the mask alone says which tokens see which."""
_FIX = "write data.document_mask: false, or take another architecture"


def document_inputs(
    model: PreTrainedModel, documents: torch.Tensor, positions: torch.Tensor, *, causal: bool
) -> dict[str, Any]:
    """Inputs of `model` with which tokens see only their own document: `attention_mask`, `position_ids`, and where it
    has layers with a state, the places of the documents.

    documents int64 (rows, length): the number of each token's document in its row; the tokens of a document are side by
    side. positions int64 (rows, part): the position of each token in its document, from 0, for all tokens or for the
    part that this process holds under context parallelism. With `causal` tokens see themselves and those before them.
    On a CPU the mask are the documents' numbers where `attention` takes them. Else it takes rows x part x length bytes,
    four times as many where a model adds it to the scores itself.
    """
    queries = query_positions(positions.shape[1], documents.device)
    others = position_ids(model, positions)
    if causal and runs_by_documents(model) and (split := document_split(documents)) is not None:
        others[SPLIT] = split
    if takes_block_masks(model):
        inputs: dict[str, Any] = {"attention_mask": block_mask(documents, queries, causal=causal)}
        return inputs | others
    if takes_document_numbers(model):
        return {"attention_mask": documents[:, None, None]} | others
    visible = documents[:, queries][:, None, :, None] == documents[:, None, None, :]
    if causal:
        visible &= queries[:, None] >= torch.arange(documents.shape[1], device=documents.device)
    return {"attention_mask": _masks(model, visible, causal)} | others


def position_ids(model: PreTrainedModel, positions: torch.Tensor) -> dict[str, Any]:
    """`position_ids` for positions from 0, where the model takes them."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": positions + first_position(model)}


def _masks(
    model: PreTrainedModel, visible: torch.Tensor, causal: bool
) -> torch.Tensor | dict[str, torch.Tensor | None]:
    """`visible`, bool (rows, 1, length, length), in the form that the model's attention takes."""
    implementation = model.config._attn_implementation
    config = model.config.get_text_config()
    window, layers = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    if implementation == NAME or window is None or (layers and _WINDOW not in layers):
        # No window, or artel's attention, which gets it from each layer.
        return _bool_or_additive(visible, model.dtype, implementation)
    # Otherwise transformers' mask would contain the window, so this one must. A causal window of n tokens includes the
    # token itself; another one has n tokens on each side.
    positions = torch.arange(visible.shape[-1], device=visible.device)
    distance = (positions[:, None] - positions[None, :]).abs()
    in_window = distance < window if causal else distance <= window
    windowed = _bool_or_additive(visible & in_window, model.dtype, implementation)
    if not layers:
        return windowed
    masks = {"full_attention": _bool_or_additive(visible, model.dtype, implementation), _WINDOW: windowed}
    return dict.fromkeys(layers - MASKED) | masks


def _bool_or_additive(visible: torch.Tensor, dtype: torch.dtype, implementation: str) -> torch.Tensor:
    """A bool mask for PyTorch's attention; a mask to be added to the scores for models that compute them themselves."""
    if implementation in (NAME, MASKED_NAME, "sdpa"):
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


def first_position(model: PreTrainedModel) -> int:
    """The position id of the first token: 0, or pad_id + 1 in RoBERTa and its kin.

    The padding index of their position embedding shows it.
    """
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else padding + 1


def document_problems(model: ModelConfig, auto_class: str) -> list[Problem]:
    """Why an architecture cannot keep documents apart, as far as its configuration shows, before any text is read.

    Other problems of the configuration are not reported here. `check_documents` later tests the model itself.
    """
    config = _configuration(model)
    if config is None:
        return []
    try:
        stateful = model_class(config, auto_class, {}, runs_code=model.runs_code)._is_stateful
    except KeyError:  # it has no such head
        return []
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - MASKED
    if auto_class == "AutoModelForCausalLM" and (stateful or kinds & STATE_LAYERS):
        model_on_meta = outline(model, auto_class)
        if model_on_meta is not None and state_modules(model_on_meta):
            kinds, stateful = kinds - STATE_LAYERS - NO_MIXER_LAYERS, False
    obstacles = ["layers with a state"] if stateful else sorted(kinds)
    if getattr(config, "attention_type", "") == "block_sparse":  # BigBird obeys a mask only where inputs are short
        obstacles = ["block_sparse attention"]
    if not obstacles:
        return []
    what = f"{config.model_type} has {', '.join(obstacles)}: no mask keeps documents apart there"
    return [Problem("data.document_mask", what, _FIX)]


def _configuration(model: ModelConfig) -> PreTrainedConfig | None:
    """The configuration in the run file or a folder; None for the default model, a hub id, or a wrong configuration."""
    if model.config is not None:
        values = dict(model.config)
        try:
            return CONFIG_MAPPING[values.pop("model_type")](**values)
        except Exception:  # each configuration checks in its own way; building the model reports it
            return None
    if model.from_ is None or not Path(model.from_).is_dir():
        return None
    try:
        return read_config(model.from_, runs_code=model.runs_code)[0]
    except InputError:
        return None


def check_documents(model: PreTrainedModel, *, causal: bool) -> None:
    """Raise InputError when a model does not obey `document_inputs` on its device.

    Two documents of a few tokens, of unequal length, must give the same logits side by side as each by itself. A model
    that does not obey block masks, or numbers of documents, is tested with masks of bool, and gets those from then on.
    """
    if takes_block_masks(model) or takes_document_numbers(model):
        try:
            _check_apart(model, causal)
            return
        except InputError:
            allow_block_masks(model, False)
    _check_apart(model, causal)


def _check_apart(model: PreTrainedModel, causal: bool) -> None:
    limit = position_limit(model) or 0  # XLNet says -1 for none
    length = limit if 0 < limit < 6 else 6
    second = length - length // 4  # another length: modules with a state run both side by side
    vocabulary = model.config.get_text_config().vocab_size
    numbers = torch.arange(length + second, device=model.get_input_embeddings().weight.device)[None]
    ids = vocabulary // 2 + numbers  # from the middle, where no special tokens are
    documents, positions = 1 + numbers // length, numbers % length
    try:
        with evaluating(model):
            together = model(input_ids=ids, **document_inputs(model, documents, positions, causal=causal)).logits
            each = ids.split([length, second], dim=1)
            alone = torch.cat([model(input_ids=document).logits for document in each], dim=1)
    except Exception as error:  # an architecture without such masks fails in its own way
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{model.config.model_type} takes no mask of documents: {first}"
        raise InputError.at("data.document_mask", what, _FIX) from None
    difference = float((together - alone).float().abs().max() / alone.float().abs().max())
    # Rounding gives 1e-6 in float32 and 1e-2 in bfloat16 or quantized; a document that is seen changes logits by more.
    exact = hidden_dtype(model) == torch.float32 and not getattr(model, "is_quantized", False)
    if not difference < (1e-4 if exact else 0.05):
        what = (
            f"{model.config.model_type} does not keep documents apart: logits differ by {difference:.0e} of the largest"
        )
        raise InputError.at("data.document_mask", what, _FIX)
