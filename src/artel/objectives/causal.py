"""Causal language modelling: each token predicted from those before it (Radford et al. 2019)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from artel.generation import GenerationPrompt
from artel.objectives.base import directions
from artel.objectives.collate import NextTokenTexts
from artel.objectives.decoding import Decoding, generation_code, python_literal
from artel.objectives.per_token import BALANCED_SUMS, balanced_token_sums, inputs_of, token_metrics
from artel.objectives.types import Batch, Presentation, Reply
from artel.tokens import StoreSplit, TokenBlocks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.generation.generate import Sampling


class Causal(NextTokenTexts, Decoding):
    auto_class = "AutoModelForCausalLM"
    learns_from: ClassVar[tuple[str, ...]] = ("text",)
    presentation = Presentation("continues a text, one token after another", "write", "text-generation")
    generates = True
    causal = True
    sums: ClassVar[tuple[str, ...]] = BALANCED_SUMS
    metric_directions = directions(lower=["loss", "perplexity", "bits_per_byte"], higher=["accuracy"])

    def model_card_code(self) -> str:
        block = self.config.data.block
        words = self.example_prompt(None).split(" ")
        while self._count_tokens(words) > block // 2 and len(words) > 1:  # models with absolute positions take no more
            words.pop()
        inputs = f'inputs = tokenizer({python_literal(" ".join(words))}, return_tensors="pt")'
        return "\n".join([inputs, *generation_code(block - self._count_tokens(words))])

    def _count_tokens(self, words: list[str]) -> int:
        return len(self.tokenizer.hf(" ".join(words))["input_ids"])

    def dataset(self, split: StoreSplit) -> TokenBlocks:
        return self.blocks(split, self.config.data.block, lookahead=1)

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        return balanced_token_sums(model, inputs_of(model, batch, causal=True) | {"use_cache": False}, batch)

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        """Return loss, perplexity and accuracy per token, and bits per byte, which is comparable across tokenizers.

        Bits per byte = mean loss in nats x tokens per byte of the split / ln 2 (Gao et al. 2020, "The Pile", section
        3.1). End tokens count as tokens but add no bytes. No block predicts the first token of the split, or the first
        token of a packed block: these are assumed to cost the mean.
        """
        metrics = token_metrics(totals)
        return metrics | {"bits_per_byte": metrics["loss"] * split.tokens / split.bytes / math.log(2)}

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        from artel.generation.generate import generate_text
        from artel.models.loading.structure import position_limit

        return Reply(generate_text(model, self.tokenizer, prompt, sampling, position_limit(model)))

    def generation_prompt(self, model: PreTrainedModel, prompt: str) -> GenerationPrompt:
        from artel.generation.generate import text_end

        return GenerationPrompt(self.tokenizer.prompt(prompt), text_end(model, self.tokenizer), special_tokens=True)
