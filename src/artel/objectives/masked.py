"""Masked language modelling: predicts hidden tokens from both sides (Devlin et al. 2019; Liu et al. 2019, RoBERTa).

Texts, each with an end token, are concatenated and cut into blocks framed by special tokens (RoBERTa's
FULL-SENTENCES), or packed whole into such blocks. Which tokens are hidden depends on (seed, epoch, sample): different
in each epoch, the same after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models import IGNORED, evaluation_mode
from artel.objectives.base import Objective, directions
from artel.objectives.collate import Texts, document_tensors, target_tensors
from artel.objectives.decoding import Decoding, python_literal
from artel.objectives.length_groups import as_tensors
from artel.objectives.per_token import SUMS, inputs_of, token_metrics, token_sums
from artel.objectives.types import Batch, Presentation, Reply, TokenView
from artel.tokens import Rows, Samples, StoreSplit, TokenBlocks, Tokenizer
from artel.tokens.packing import document_numbers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.generation.generate import Sampling


class Masked(Texts, Decoding):
    auto_class = "AutoModelForMaskedLM"
    learns_from = ("text", "pairs")
    presentation = Presentation("guesses hidden words, or fills in what is missing", "fill-in", "fill-mask")
    section = "masked"
    causal = False
    continues = False
    adds_special_tokens = True
    sums: ClassVar[tuple[str, ...]] = SUMS
    metric_directions = directions(lower=["loss", "perplexity"], higher=["accuracy"])

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._frame = tokenizer.frame()
        self._mask = tokenizer.mask_id
        self._special = np.zeros(tokenizer.vocabulary, dtype=bool)
        self._special[tokenizer.special_ids] = True
        self._regular_ids = np.flatnonzero(~self._special)
        self._word_starts = tokenizer.word_starts() if config.masked.whole_words else None
        self._most_common: dict[StoreSplit, float] = {}

    @classmethod
    def for_run(cls, config: RunConfig) -> type[Objective]:
        """Return InsertionTagging for pairs: it restores tokens that the inputs lack."""
        from artel.objectives.insertion_tagging import InsertionTagging

        return InsertionTagging if any(source.yields == "pairs" for source in config.data.sources) else cls

    @classmethod
    def small_run(cls, block: int) -> dict[str, Any]:
        return {"objective": "masked", **super().small_run(block)}

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        problems = super().problems(config)
        if config.data.block < 8:
            what = f"{config.data.block} leaves no room between the special tokens"
            problems.append(Problem("data.block", what, "write 8 or more"))
        return problems

    def example_prompt(self, samples: Samples | None) -> str:
        prompt = super().example_prompt(samples)
        mask = self.tokenizer.hf.mask_token
        return prompt if mask in prompt else f"{prompt} {mask}"

    def model_card_code(self) -> str:
        return cleandoc(f"""
            inputs = tokenizer({python_literal(self.example_prompt(None))}, return_tensors="pt")
            with torch.no_grad():
                logits = model(**inputs).logits[0]
            for position in (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[:, 0]:
                likeliest = logits[position].softmax(dim=-1).topk(5)
                for token, probability in zip(likeliest.indices, likeliest.values):
                    print(f"{{tokenizer.decode([token])!r}} {{probability:.3f}}")
        """)

    def dataset(self, split: StoreSplit) -> TokenBlocks:
        return self.blocks(split, self.config.data.block - self._frame.size, lookahead=0)

    def batch(self, rows: Rows) -> Batch:
        before, after = self._frame.before, self._frame.after
        num_rows, length = rows.ids.shape
        ids = np.full((num_rows, length + self._frame.size), self.tokenizer.pad_id, dtype=np.int64)
        targets, numbers = np.full_like(ids, IGNORED), np.zeros_like(ids)
        packed = np.ones_like(rows.ids) if rows.flags is None else document_numbers(rows.flags)
        for row in range(num_rows):
            documents = packed[row][packed[row] > 0]  # padding is at the end
            visible, labels = self.mask_tokens(
                rows.ids[row, : len(documents)], int(rows.epochs[row]), int(rows.indices[row])
            )
            end = len(documents) + self._frame.size
            ids[row, :end] = np.concatenate([before, visible, after])
            # The frame's special tokens belong to the first and the last document.
            numbers[row, :end] = np.pad(documents, (len(before), len(after)), mode="edge")
            if rows.valid[row]:
                targets[row, len(before) : len(before) + len(documents)] = labels
        tensors = as_tensors({"input_ids": ids}) | target_tensors(targets)
        if rows.flags is not None:
            tensors |= document_tensors(numbers if self.isolated_documents else np.minimum(numbers, 1))
        return Batch(tensors, int((targets != IGNORED).sum()), int(np.count_nonzero(numbers[rows.valid])))

    def token_views(self, rows: Rows) -> list[TokenView]:
        tensors = self.batch(rows).tensors
        text_tokens = len(rows.ids[0]) if rows.flags is None else int(np.count_nonzero(document_numbers(rows.flags[0])))
        without_padding = slice(text_tokens + self._frame.size)
        ids, targets = (tensors[name][0, without_padding].numpy() for name in ("input_ids", "targets"))
        return [TokenView(ids, targets)]

    def mask_tokens(self, ids: np.ndarray, epoch: int, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids that the model sees, targets). Depends only on the run's seed, the epoch and the sample.

        Chooses round(rate x tokens), at least one, without replacement. 80 % of them become the mask token, 10 % a
        random token, and 10 % stay (Devlin et al. 2019, section 3.1). Special tokens are never chosen.
        """
        masked = self.config.masked
        key = xxhash.xxh3_64_intdigest(f"mask:{self.config.seed}:{epoch}:{sample}".encode())
        random = np.random.Generator(np.random.Philox(key))
        positions = self._choose_positions(ids, random)
        visible, targets = ids.copy(), np.full_like(ids, IGNORED)
        targets[positions] = ids[positions]
        draws = random.random(len(positions))
        random_ids = self._regular_ids[random.integers(len(self._regular_ids), size=len(positions))]
        visible[positions[draws < masked.mask]] = self._mask
        is_random = (draws >= masked.mask) & (draws < masked.mask + masked.random)
        visible[positions[is_random]] = random_ids[is_random]
        return visible, targets

    def _choose_positions(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        candidates = np.flatnonzero(~self._special[ids])
        count = min(len(candidates), max(1, round(self.config.masked.rate * len(candidates))))
        if self._word_starts is None or count == 0:
            return random.permutation(candidates)[:count]
        # Whole words in random order, as many as fit into the count. The first word is chosen at any length.
        words = np.cumsum(self._word_starts[ids])[candidates]
        word_numbers, word_lengths = np.unique(words, return_counts=True)
        shuffled = random.permutation(len(word_numbers))
        chosen_words = shuffled[np.cumsum(word_lengths[shuffled]) <= count]
        return candidates[np.isin(words, word_numbers[chosen_words if len(chosen_words) else shuffled[:1]])]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        return token_sums(model, inputs_of(model, batch, causal=False), batch)

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return `token_metrics` of the masked tokens, and the accuracy of always guessing the most common token."""
        if split not in self._most_common:
            ids = split.read(0, min(split.tokens, 10_000_000))
            counts = np.bincount(ids[~self._special[ids]])
            self._most_common[split] = float(counts.max() / counts.sum()) if len(counts) else 0.0
        return token_metrics(totals) | {"commonest_token": self._most_common[split]}

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        filled = fill_masks(model, self.tokenizer, prompt)
        lines = (
            "  ".join(f"{token.strip() or repr(token)} {chance:.3f}" for token, chance in mask)
            for mask in filled.candidates
        )
        notes = (f"candidates: {line}" for line in lines)  # white space is quoted
        masks = [[{"token": token, "probability": chance} for token, chance in mask] for mask in filled.candidates]
        return Reply([filled.text], tuple(notes), {"prompt": prompt, "text": filled.text, "masks": masks})


@dataclass(frozen=True, slots=True)
class FilledText:
    """A text with its masks filled by the likeliest tokens, and the candidates for each mask with probabilities."""

    text: str
    candidates: list[list[tuple[str, float]]]


def fill_masks(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, num_candidates: int = 5) -> FilledText:
    """Fill each mask independently. Raise InputError if the text has no mask, or is too long for the model."""
    import torch

    from artel.models.loading.structure import position_limit

    mask = tokenizer.hf.mask_token
    ids = torch.tensor([tokenizer.hf(prompt)["input_ids"]], device=model.device)
    positions = (ids[0] == tokenizer.mask_id).nonzero().flatten()
    if len(positions) == 0:
        raise InputError.at("--prompt", f"holds no {mask}", f"write {mask} in place of a word to predict")
    limit = position_limit(model)
    if limit is not None and ids.shape[1] > limit:
        raise InputError.at("--prompt", f"{ids.shape[1]} tokens are more than the model's {limit}", "shorten it")
    with evaluation_mode(model):
        logits = model(input_ids=ids).logits[0, positions].float()
    probabilities = logits.softmax(dim=-1)
    probabilities[:, tokenizer.special_ids] = 0  # not renormalized, as in transformers' pipeline
    probabilities[:, tokenizer.vocabulary :] = 0  # embedding rows without a token
    best = probabilities.topk(num_candidates)
    candidates = [
        [(tokenizer.decode([token]), chance) for token, chance in zip(tokens, chances, strict=True)]
        for tokens, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    ids[0, positions] = best.indices[:, 0]
    return FilledText(tokenizer.hf.decode(ids[0], skip_special_tokens=True), candidates)
