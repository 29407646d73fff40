"""Documents that stand together in a block, and see nothing of one another: what a model must be given for it.

transformers hands a mask of four dimensions to every attention layer as it is, whatever the architecture, so a mask
and positions are all that is needed. Whether a model obeys them is tried on the model itself before it is trained.
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
from artel.models.attention import MASKED_NAME, NAME, allow_block_masks, block_mask, query_places, takes_block_masks
from artel.models.loading.heads import model_class
from artel.models.loading.model_folder import read_config
from artel.models.loading.structure import position_limit

_WINDOW = "sliding_attention"
MASKED = {"full_attention", _WINDOW}
"""Layer types that a mask says everything to: who sees whom."""
_FIX = "write data.document_mask: false, or take another architecture"


def document_inputs(
    model: PreTrainedModel, documents: torch.Tensor, positions: torch.Tensor, *, causal: bool
) -> dict[str, Any]:
    """What to call `model` with so that tokens see only their own document: `attention_mask` and `position_ids`.

    documents int64 (rows, length): the number of each token's document in its row, those of one document side by side;
    positions int64 (rows, part): the place of each token in its document, from 0, of all tokens or of the part that
    this process holds where an exchange is in force. With `causal` tokens see those before them and themselves. The
    mask takes rows x part x length bytes, four times as many where a model adds it itself.
    """
    places = query_places(positions.shape[1], documents.device)
    if takes_block_masks(model):
        inputs: dict[str, Any] = {"attention_mask": block_mask(documents, places, causal=causal)}
        return inputs | _positions(model, positions)
    seen = documents[:, places][:, None, :, None] == documents[:, None, None, :]
    if causal:
        seen &= places[:, None] >= torch.arange(documents.shape[1], device=documents.device)
    return {"attention_mask": _masks(model, seen, causal)} | _positions(model, positions)


def _positions(model: PreTrainedModel, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": positions + first_position(model)}


def _masks(model: PreTrainedModel, seen: torch.Tensor, causal: bool) -> torch.Tensor | dict[str, torch.Tensor]:
    """`seen`, bool (rows, 1, length, length), in the form that the model's attention takes."""
    implementation = model.config._attn_implementation
    config = model.config.get_text_config()
    window, layers = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    if implementation == NAME or window is None or (layers and _WINDOW not in layers):
        # No window, or attention that is told it by each layer.
        return _form(seen, model.dtype, implementation)
    # Elsewhere windows are part of the mask that transformers would make, so they must be part of this one. It counts
    # them with the token itself where causal, and without it, to both sides, where not.
    places = torch.arange(seen.shape[-1], device=seen.device)
    distance = (places[:, None] - places[None, :]).abs()
    near = _form(seen & (distance < window if causal else distance <= window), model.dtype, implementation)
    if not layers:
        return near
    return {"full_attention": _form(seen, model.dtype, implementation), _WINDOW: near}


def _form(seen: torch.Tensor, dtype: torch.dtype, implementation: str) -> torch.Tensor:
    """True and False for PyTorch's attention; what is added to the scores for models that compute them themselves."""
    if implementation in (NAME, MASKED_NAME, "sdpa"):
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def first_position(model: PreTrainedModel) -> int:
    """What a model calls the position of the first token.

    RoBERTa and its kin count positions from pad_id + 1: the padding index of their position embedding shows it.
    """
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else padding + 1


def document_problems(wanted: ModelConfig, auto_class: str) -> list[Problem]:
    """Why an architecture cannot keep documents apart, as far as its configuration shows it, before any text is read.

    What else is wrong with the configuration is not told here. `check_documents` then tries the model itself.
    """
    config = _configuration(wanted)
    if config is None:
        return []
    try:
        stateful = model_class(config, auto_class, {}, runs_code=wanted.runs_code)._is_stateful
    except KeyError:  # it has no such head
        return []
    hindered = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - MASKED)
    if stateful:
        hindered = ["layers with a state"]
    if getattr(config, "attention_type", "") == "block_sparse":  # BigBird takes a mask only where inputs are short
        hindered = ["block_sparse attention"]
    if not hindered:
        return []
    what = f"{config.model_type} has {', '.join(hindered)}: no mask keeps documents apart there"
    return [Problem("data.document_mask", what, _FIX)]


def _configuration(wanted: ModelConfig) -> PreTrainedConfig | None:
    """As written or in a local folder; None for the default model, a hub id, or what is refused elsewhere."""
    if wanted.config is not None:
        values = dict(wanted.config)
        try:
            return CONFIG_MAPPING[values.pop("model_type")](**values)
        except Exception:  # each configuration checks its own way; it is told when the model is built
            return None
    if wanted.from_ is None or not Path(wanted.from_).is_dir():
        return None
    try:
        return read_config(wanted.from_, runs_code=wanted.runs_code)[0]
    except InputError:
        return None


def check_documents(model: PreTrainedModel, *, causal: bool) -> None:
    """Raise InputError when a model does not obey `document_inputs`, on the device that it is on.

    Two documents of a few tokens must give the same logits side by side as each by itself. A model that does not obey
    block masks is tried with tensors, and then given those.
    """
    if takes_block_masks(model):
        try:
            _check_as_given(model, causal)
            return
        except InputError:
            allow_block_masks(model, False)
    _check_as_given(model, causal)


def _check_as_given(model: PreTrainedModel, causal: bool) -> None:
    limit = position_limit(model) or 0  # XLNet says -1 for none
    length = limit if 0 < limit < 6 else 6
    vocabulary = model.config.get_text_config().vocab_size
    places = torch.arange(2 * length, device=model.get_input_embeddings().weight.device)[None]
    ids = vocabulary // 2 + places  # from the middle: no special token is there
    documents, positions = 1 + places // length, places % length
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            together = model(input_ids=ids, **document_inputs(model, documents, positions, causal=causal)).logits
            alone = torch.cat([model(input_ids=piece).logits for piece in ids.split(length, dim=1)], dim=1)
    except Exception as error:  # an architecture that knows no such mask fails in its own way
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{model.config.model_type} takes no mask of documents: {first}"
        raise InputError.at("data.document_mask", what, _FIX) from None
    finally:
        model.train(was_training)
    difference = float((together - alone).float().abs().max() / alone.float().abs().max())
    # Rounding gives 1e-6 in float32 and 1e-2 in bfloat16 or quantized; a document that is seen changes logits by more.
    exact = model.dtype == torch.float32 and not getattr(model, "is_quantized", False)
    if not difference < (1e-4 if exact else 0.05):
        what = f"{model.config.model_type} does not keep documents apart: logits differ by a share of {difference:.0e}"
        raise InputError.at("data.document_mask", what, _FIX)
