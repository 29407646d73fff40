"""Inputs with which several sequences that begin alike are one row: what they share, and then the rest of each.

What is shared is computed once, and each rest sees it as if it stood right behind it (as vLLM's prefix caching does
when it generates, and "prefix sharing" of Wang and Hegde 2024, "Accelerating Direct Preference Optimization with Prefix
Sharing", in training). Whether a model obeys is tested on the model itself, as for documents (`document_mask.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from artel.models.attention_masks import takes_block_masks, takes_branches
from artel.models.document_mask import position_ids
from artel.models.evaluating import evaluating
from artel.models.half_base import hidden_dtype

_SHARED, _REST = 3, 2  # tokens of the rows that a model is tested with


def shared_prefix_inputs(
    model: PreTrainedModel, documents: torch.Tensor, branches: torch.Tensor, positions: torch.Tensor
) -> dict[str, Any]:
    """Inputs of `model`: `attention_mask` and `position_ids`, for a causal model that `obeys_shared_prefixes`.

    All int64 (rows, length). documents: the number of each token's document, 0 for padding; branches: 0 for what the
    branches of a document share, which comes first, then 1, 2, … for the tokens of each, side by side; positions: of
    each token in its sequence, from 0.
    """
    if takes_block_masks(model):
        return {"attention_mask": _block_mask(documents, branches)} | position_ids(model, positions)
    return {"attention_mask": torch.stack([documents, branches], dim=1)[:, None]} | position_ids(model, positions)


def _block_mask(documents: torch.Tensor, branches: torch.Tensor) -> BlockMask:
    def visible(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_seen = (branches[row, key] == 0) | (branches[row, key] == branches[row, query])
        return (documents[row, query] == documents[row, key]) & is_seen & (query >= key)

    rows, length = documents.shape
    mask = create_block_mask(visible, rows, None, length, length, device=documents.device)
    mask.ndim = 4  # type: ignore[attr-defined]  # GPT-2 reads it to tell masks from padding
    return mask


def can_share_prefixes(model: PreTrainedModel, device: str | None = None) -> bool:
    """Whether attention computes no more of such rows than what is seen: FlexAttention, or `attention` on a CPU.

    `device` is the type of the device that the model will be on; by default, that it is on.
    """
    return takes_block_masks(model, device) or takes_branches(model, device)


def obeys_shared_prefixes(model: PreTrainedModel) -> bool:
    """Whether `model` gives two sequences in one row the logits that it gives each alone, tested on a few tokens.

    True only where it `can_share_prefixes`.
    """
    if not can_share_prefixes(model):
        return False
    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config().vocab_size
    ids = (vocabulary // 2 + torch.arange(_SHARED + 2 * _REST, device=device)) % vocabulary
    shared, one, other = ids.split([_SHARED, _REST, _REST])
    branches = torch.tensor([0] * _SHARED + [1] * _REST + [2] * _REST, device=device)[None]
    positions = torch.tensor([*range(_SHARED + _REST), *range(_SHARED, _SHARED + _REST)], device=device)[None]
    try:
        with evaluating(model):
            inputs = shared_prefix_inputs(model, torch.ones_like(branches), branches, positions)
            together = model(input_ids=ids[None], use_cache=False, **inputs).logits[0]
            alone = model(input_ids=torch.stack([torch.cat([shared, rest]) for rest in (one, other)]), use_cache=False)
    except Exception:  # an architecture that takes no such masks fails in its own way
        return False
    expected = torch.cat([alone.logits[0], alone.logits[1, _SHARED:]])
    difference = float((together - expected).float().abs().max() / expected.float().abs().max())
    # The bounds of `check_documents`, for the same reason.
    exact = hidden_dtype(model) == torch.float32 and not getattr(model, "is_quantized", False)
    return difference < (1e-4 if exact else 0.05)
