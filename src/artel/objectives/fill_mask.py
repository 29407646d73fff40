"""Filling the masks of a text with a masked language model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.models.evaluating import evaluating
from artel.models.loading.structure import position_limit
from artel.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class Filled:
    """The text with the likeliest token for each mask, and the candidates for each mask with their probabilities."""

    text: str
    candidates: list[list[tuple[str, float]]]


def fill_masks(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, count: int = 5) -> Filled:
    """Fill each mask by itself. Raises InputError if the text has none, or is longer than the model takes."""
    mask = tokenizer.hf.mask_token
    ids = torch.tensor([tokenizer.hf(prompt)["input_ids"]], device=model.device)
    positions = (ids[0] == tokenizer.mask_id).nonzero().flatten()
    if len(positions) == 0:
        raise InputError.at("--prompt", f"holds no {mask}", f"write {mask} where a word is to be guessed")
    limit = position_limit(model)
    if limit is not None and ids.shape[1] > limit:
        raise InputError.at("--prompt", f"{ids.shape[1]} tokens are more than the model's {limit}", "shorten it")
    with evaluating(model):
        logits = model(input_ids=ids).logits[0, positions].float()
    probabilities = logits.softmax(dim=-1)
    probabilities[:, tokenizer.special_ids] = 0  # no answer; they keep their share, as in transformers' pipeline
    probabilities[:, tokenizer.vocabulary :] = 0  # rows that no token stands for
    best = probabilities.topk(count)
    candidates = [
        [(tokenizer.decode([token]), share) for token, share in zip(tokens, shares, strict=True)]
        for tokens, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    ids[0, positions] = best.indices[:, 0]
    return Filled(tokenizer.hf.decode(ids[0], skip_special_tokens=True), candidates)
