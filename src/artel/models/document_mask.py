"""Model inputs that keep the documents of a block, or the branches behind a shared prefix, from seeing one another.

transformers passes a four-dimensional mask unchanged to every attention layer of any architecture, so a mask and
positions are enough for attention. Layers with a recurrent state run one document at a time (`hybrid_state.py`). Before
training, every model is tested for whether it respects the mask.

Sequences with a shared prefix (a prompt and its answers) can be one row: the prefix is computed once, and each branch
sees it as if it came directly after it. vLLM's prefix caching does so for generation, "prefix sharing" (Wang and Hegde
2024, "Accelerating Direct Preference Optimization with Prefix Sharing") for training.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.errors import InputError, Problem
from artel.models import evaluation_mode
from artel.models.attention import MASKED_NAME, NAME, block_mask, query_positions
from artel.models.attention_masks import allow_block_masks, takes_block_masks, takes_branches, takes_document_numbers
from artel.models.half_base import hidden_dtype
from artel.models.hybrid_state import (
    NO_MIXER_LAYERS,
    SPLIT,
    STATE_LAYERS,
    document_split,
    enable_document_split,
    state_modules,
)
from artel.models.loading.heads import model_class
from artel.models.loading.model_folder import read_config
from artel.models.loading.structure import build_outline, position_limit

_WINDOW = "sliding_attention"
MASKED_LAYERS = {"full_attention", _WINDOW}
"""Layer types in which the mask alone decides which tokens see each other."""
_PREFIX, _BRANCH = 3, 2
"""Tokens of the shared prefix and of each branch in the test of a model."""
_FIX = "set data.document_mask: false, or use another architecture"


def document_inputs(
    model: PreTrainedModel, documents: torch.Tensor, positions: torch.Tensor, *, causal: bool
) -> dict[str, Any]:
    """Return inputs with which tokens see only their own document: `attention_mask`, `position_ids`, and a
    `DocumentSplit` for layers with a recurrent state.

    documents int64 (rows, length): each token's document number; the tokens of a document are adjacent. positions int64
    (rows, part): each token's position in its document, from 0; under context parallelism only for the tokens that this
    process holds. With `causal` a token sees no later ones. On a CPU the mask is the document numbers if `attention`
    takes them. Otherwise it takes rows x part x length bytes, or four times that if the model adds it to the scores.
    """
    queries = query_positions(positions.shape[1], documents.device)
    inputs = position_ids(model, positions)
    if causal and enable_document_split(model) and (split := document_split(documents)) is not None:
        inputs[SPLIT] = split
    if takes_block_masks(model):
        return inputs | {"attention_mask": block_mask(documents, queries, causal=causal)}
    if takes_document_numbers(model):
        return inputs | {"attention_mask": documents[:, None, None]}
    visible = documents[:, queries][:, None, :, None] == documents[:, None, None, :]
    if causal:
        visible &= queries[:, None] >= torch.arange(documents.shape[1], device=documents.device)
    return inputs | {"attention_mask": _masks(model, visible, causal)}


def position_ids(model: PreTrainedModel, positions: torch.Tensor) -> dict[str, Any]:
    """Return `position_ids` for positions from 0, if the model takes them."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": positions + first_position(model)}


def _masks(
    model: PreTrainedModel, visible: torch.Tensor, causal: bool
) -> torch.Tensor | dict[str, torch.Tensor | None]:
    """Convert `visible`, bool (rows, 1, length, length), to the form that the model's attention takes."""
    implementation = model.config._attn_implementation
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layers = set(getattr(config, "layer_types", None) or ())
    if implementation == NAME or window is None or (layers and _WINDOW not in layers):
        # No window, or artel's attention, which reads it from each layer.
        return _bool_or_additive(visible, model.dtype, implementation)
    # Here transformers' mask would include the window, so this one must. A causal window of n tokens includes the token
    # itself; a bidirectional one has n tokens on each side.
    positions = torch.arange(visible.shape[-1], device=visible.device)
    distance = (positions[:, None] - positions[None, :]).abs()
    in_window = distance < window if causal else distance <= window
    windowed = _bool_or_additive(visible & in_window, model.dtype, implementation)
    if not layers:
        return windowed
    masks = {"full_attention": _bool_or_additive(visible, model.dtype, implementation), _WINDOW: windowed}
    return dict.fromkeys(layers - MASKED_LAYERS) | masks


def _bool_or_additive(visible: torch.Tensor, dtype: torch.dtype, implementation: str) -> torch.Tensor:
    """Return a bool mask for PyTorch's attention, an additive mask for a model that computes the scores itself."""
    if implementation in (NAME, MASKED_NAME, "sdpa"):
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


def first_position(model: PreTrainedModel) -> int:
    """Return the position id of the first token: 0, or pad_id + 1 in models like RoBERTa.

    These have a padding index in their position embedding.
    """
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else padding + 1


def document_problems(model: ModelConfig, auto_class: str) -> list[Problem]:
    """Return a problem if the configuration shows that an architecture cannot keep documents apart.

    This runs before any text is read. `check_documents` later tests the model itself.
    """
    config = _find_config(model)
    if config is None:
        return []
    try:
        stateful = model_class(config, auto_class, {}, runs_code=model.runs_code)._is_stateful
    except KeyError:  # the architecture has no such head
        return []
    state_layers = set(getattr(config.get_text_config(), "layer_types", None) or ()) - MASKED_LAYERS
    if auto_class == "AutoModelForCausalLM" and (stateful or state_layers & STATE_LAYERS):
        model_on_meta = build_outline(model, auto_class)
        if model_on_meta is not None and state_modules(model_on_meta):
            state_layers, stateful = state_layers - STATE_LAYERS - NO_MIXER_LAYERS, False
    obstacles = ["layers with a state"] if stateful else sorted(state_layers)
    if getattr(config, "attention_type", "") == "block_sparse":  # BigBird obeys a mask only where inputs are short
        obstacles = ["block_sparse attention"]
    if not obstacles:
        return []
    what = f"{config.model_type} has {', '.join(obstacles)}: no mask keeps documents apart there"
    return [Problem("data.document_mask", what, _FIX)]


def _find_config(model: ModelConfig) -> PreTrainedConfig | None:
    """Return the configuration from the run file or folder; None for the default model, a hub id or an invalid one."""
    if model.config is not None:
        values = dict(model.config)
        try:
            return CONFIG_MAPPING[values.pop("model_type")](**values)
        except Exception:  # configurations raise various errors; building the model reports them
            return None
    if model.from_ is None or not Path(model.from_).is_dir():
        return None
    try:
        return read_config(model.from_, runs_code=model.runs_code)[0]
    except InputError:
        return None


def check_documents(model: PreTrainedModel, *, causal: bool) -> None:
    """Raise InputError if a model does not respect `document_inputs` on its device.

    Two short documents of different lengths must get the same logits in one row as in two. A model that fails with
    block masks or document numbers is tested again with bool masks, and keeps those.
    """
    if takes_block_masks(model) or takes_document_numbers(model):
        try:
            _check_isolation(model, causal)
            return
        except InputError:
            allow_block_masks(model, False)
    _check_isolation(model, causal)


def _check_isolation(model: PreTrainedModel, causal: bool) -> None:
    limit = position_limit(model) or 0  # XLNet says -1 for none
    length = limit if 0 < limit < 6 else 6
    second = length - length // 4  # a different length, but modules with a state still run both in one batch
    vocabulary = model.config.get_text_config().vocab_size
    numbers = torch.arange(length + second, device=model.get_input_embeddings().weight.device)[None]
    ids = vocabulary // 2 + numbers  # from the middle of the vocabulary: no special tokens
    documents, positions = 1 + numbers // length, numbers % length
    try:
        with evaluation_mode(model):
            block_logits = model(input_ids=ids, **document_inputs(model, documents, positions, causal=causal)).logits
            document_ids = ids.split([length, second], dim=1)
            separate = torch.cat([model(input_ids=document).logits for document in document_ids], dim=1)
    except Exception as error:  # an architecture that rejects these masks may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{model.config.model_type} does not accept a mask of documents: {reason}"
        raise InputError.at("data.document_mask", what, _FIX) from None
    difference = _relative_difference(block_logits, separate)
    if not difference < _tolerance(model):
        what = (
            f"{model.config.model_type} does not keep documents apart: logits differ by {difference:.0e} of the largest"
        )
        raise InputError.at("data.document_mask", what, _FIX)


def _relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).float().abs().max() / expected.float().abs().max())


def _tolerance(model: PreTrainedModel) -> float:
    """Return the largest relative difference that is only rounding.

    Rounding gives 1e-6 in float32, and 1e-2 in bfloat16 or quantized. A visible document changes logits by more."""
    exact = hidden_dtype(model) == torch.float32 and not getattr(model, "is_quantized", False)
    return 1e-4 if exact else 0.05


def shared_prefix_inputs(
    model: PreTrainedModel, documents: torch.Tensor, branches: torch.Tensor, positions: torch.Tensor
) -> dict[str, Any]:
    """Return `attention_mask` and `position_ids` for a causal model that `obeys_shared_prefixes`.

    All tensors are int64 (rows, length). documents: each token's document number, 0 for padding. branches: 0 for the
    shared prefix, which comes first, then 1, 2, … for the branches, the tokens of each adjacent. positions: each
    token's position in its sequence, from 0.
    """
    if takes_block_masks(model):
        mask: Any = _prefix_block_mask(documents, branches)
    else:
        mask = torch.stack([documents, branches], dim=1)[:, None]
    return {"attention_mask": mask} | position_ids(model, positions)


def _prefix_block_mask(documents: torch.Tensor, branches: torch.Tensor) -> BlockMask:
    def visible(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        in_branch = (branches[row, key] == 0) | (branches[row, key] == branches[row, query])
        return (documents[row, query] == documents[row, key]) & in_branch & (query >= key)

    rows, length = documents.shape
    mask = create_block_mask(visible, rows, None, length, length, device=documents.device)
    mask.ndim = 4  # type: ignore[attr-defined]  # GPT-2 reads it to tell masks from padding
    return mask


def can_share_prefixes(model: PreTrainedModel, device: str | None = None) -> bool:
    """True if attention skips what a branch does not see: with FlexAttention, or with artel's attention on a CPU.

    `device`: the type of device the model will run on (default: its own).
    """
    return takes_block_masks(model, device) or takes_branches(model, device)


def obeys_shared_prefixes(model: PreTrainedModel) -> bool:
    """True if two sequences get the same logits in one row with a shared prefix as in two rows. Runs a few tokens.

    Always False unless the model `can_share_prefixes`.
    """
    if not can_share_prefixes(model):
        return False
    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config().vocab_size
    ids = (vocabulary // 2 + torch.arange(_PREFIX + 2 * _BRANCH, device=device)) % vocabulary
    prefix, *suffixes = ids.split([_PREFIX, _BRANCH, _BRANCH])
    branches = torch.tensor([0] * _PREFIX + [1] * _BRANCH + [2] * _BRANCH, device=device)[None]
    positions = torch.tensor([*range(_PREFIX + _BRANCH), *range(_PREFIX, _PREFIX + _BRANCH)], device=device)[None]
    try:
        with evaluation_mode(model):
            inputs = shared_prefix_inputs(model, torch.ones_like(branches), branches, positions)
            block_logits = model(input_ids=ids[None], use_cache=False, **inputs).logits[0]
            sequences = torch.stack([torch.cat([prefix, branch]) for branch in suffixes])
            separate = model(input_ids=sequences, use_cache=False).logits
    except Exception:  # an architecture that rejects these masks may raise anything
        return False
    return _relative_difference(block_logits, torch.cat([separate[0], separate[1, _PREFIX:]])) < _tolerance(model)
