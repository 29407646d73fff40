"""Writing with a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from artel.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0 takes the likeliest."""

    new_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0


def write(
    model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, sampling: Sampling, window: int | None
) -> Iterator[str]:
    """Continue `prompt`; yields pieces of text as they become whole characters, until the end token or the limit.

    `window` is the longest input in tokens that the model takes; older tokens leave it on the left. An empty prompt
    starts from the end token, as a new document does. The state of PyTorch's random generators is left as it was.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    choose = _choices(sampling)
    ids = next(tokenizer.encode([prompt])).tolist() if prompt else []
    ids = ids or [tokenizer.end_id]
    written: list[int] = []
    told = 0
    cache, seen = DynamicCache(config=model.config), 0
    was_training = model.training
    model.eval()
    try:
        for _ in range(sampling.new_tokens):
            if window is not None and len(ids) > window:
                # The window is full: drop its older half and read the rest anew, once for many tokens.
                ids = ids[-(window // 2) :]
                cache, seen = DynamicCache(config=model.config), 0
            fresh = torch.tensor([ids[seen:]], device=device)
            # Inputs grow by a token each time: compiled layers would be compiled anew for each length.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                logits = model(input_ids=fresh, past_key_values=cache, use_cache=True).logits[:, -1].float()
            seen = len(ids)
            logits[:, tokenizer.vocabulary :] = -torch.inf  # rows that no token stands for
            chosen = choose(torch.tensor([ids], device=device), logits, generator)
            if chosen == tokenizer.end_id:
                break
            ids.append(chosen)
            written.append(chosen)
            text = tokenizer.decode(written)
            if not text.endswith("\ufffd"):  # else a character's bytes are not all there yet
                yield text[told:]
                told = len(text)
        text = tokenizer.decode(written)
        if told < len(text):
            yield text[told:]
    finally:
        model.train(was_training)


def _choices(sampling: Sampling):  # type: ignore[no-untyped-def]
    warpers = LogitsProcessorList()
    if sampling.temperature > 0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))

    def choose(ids: torch.Tensor, logits: torch.Tensor, generator: torch.Generator) -> int:
        if sampling.temperature == 0:
            return int(logits.argmax(dim=-1))
        probabilities = warpers(ids, logits).softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    return choose
