"""Writing with a model, token by token."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from artel.errors import InputError
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import TurnEnd

# A temperature below this counts as 0: divided by less, logits leave the range of float32.
_COLD = 1e-6
# What a model's forward calls the cache: all since transformers 5.24, most before it, and Mamba and its kin before it.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0 takes the likeliest."""

    new_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    """Of tokens that stand in the prompt or were written: positive logits are divided by it, negative multiplied."""


def write(
    model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, sampling: Sampling, window: int | None
) -> Iterator[str]:
    """Continue `prompt`; yields pieces of text as they become whole characters, until the end token or the limit.

    `window` is the longest input in tokens that the model takes; older tokens leave it on the left. An empty prompt
    starts from the end token, as a new document does. The state of PyTorch's random generators is left as it was.
    """
    ids = next(tokenizer.encode([prompt])).tolist() if prompt else []
    end = TurnEnd(frozenset({tokenizer.end_id}))
    return write_ids(model, tokenizer, ids or [tokenizer.end_id], sampling, window, end, special_tokens=True)


def write_ids(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    ids: list[int],
    sampling: Sampling,
    window: int | None,
    stop: TurnEnd,
    *,
    special_tokens: bool = False,
) -> Generator[str, None, bool]:
    """Continue `ids`; yields text as `write` does, and returns whether it came to an end within the limit.

    Neither the tokens nor the texts of `stop` are shown, nor parts of them: what may yet become a text that stops is
    held back. Special tokens are left out of the text unless asked for.
    """

    def decode(ids: list[int]) -> str:
        skip = not special_tokens
        return tokenizer.hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    written: list[int] = []
    told = 0
    text = ""
    finished = True
    with closing(write_tokens(model, tokenizer, ids, sampling, window, stop.ids)) as tokens:
        for token in tokens:
            written.append(token)
            text = decode(written)
            # A character whose bytes are not all there yet is decoded to U+FFFD; it waits for the rest of them.
            shown, stopped = _up_to_stop(text.rstrip("\ufffd"), stop.texts)
            if told < shown:
                yield text[told:shown]
                told = shown
            if stopped:
                return True
            finished = len(written) < sampling.new_tokens
    if told < len(text):
        yield text[told:]
    return finished


def write_tokens(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    ids: list[int],
    sampling: Sampling,
    window: int | None,
    stop: frozenset[int],
) -> Generator[int, None, None]:
    """The tokens that continue `ids`, until one of `stop` (which is not among them) or the limit."""
    device = next(model.parameters()).device
    _check_embedded(model, tokenizer, ids)
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    choose = _choices(sampling)
    ids = list(ids)
    start = seen = 0  # the first token in the window, and up to where the cache has read
    cache = DynamicCache(config=model.config)
    takes = inspect.signature(type(model).forward).parameters
    cache_name = next((name for name in _CACHE_NAMES if name in takes), None)  # RWKV and Reformer take none of the kind
    was_training = model.training
    model.eval()
    try:
        for _ in range(sampling.new_tokens):
            if window is not None and len(ids) - start > window:
                # The window is full: drop its older half and read the rest anew, once for many tokens.
                start = seen = len(ids) - max(1, window // 2)
                cache = DynamicCache(config=model.config)
            fresh = torch.tensor([ids[seen:]], device=device)
            # Inputs grow by a token each time: compiled layers would be compiled anew for each length.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                kept = {cache_name: cache} if cache_name else {}
                logits = model(input_ids=fresh, use_cache=bool(kept), **kept).logits[:, -1].float()
            seen = len(ids) if cache_name else start
            logits[:, tokenizer.vocabulary :] = -torch.inf  # rows that no token stands for
            if not math.isfinite(logits.max()):
                what = "its logits are NaN or infinite, so no token is likelier than another"
                raise InputError.at(model.name_or_path, what, "its weights are damaged, or too large")
            chosen = choose(torch.tensor([ids], device=device), logits, generator)
            if chosen in stop:
                return
            ids.append(chosen)
            yield chosen
    finally:
        model.train(was_training)


def _check_embedded(model: PreTrainedModel, tokenizer: Tokenizer, ids: list[int]) -> None:
    """Raise InputError for a token that the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    beyond = next((number for number in ids if number >= rows), None)
    if beyond is not None:
        what = f"the model has no embedding for {tokenizer.decode([beyond])!r} (id {beyond:,} of {rows:,})"
        raise InputError.at(model.name_or_path, what, "give the model with its own tokenizer and chat template")


def _up_to_stop(text: str, stops: tuple[str, ...]) -> tuple[int, bool]:
    """How many characters of `text` may be shown, and whether one of `stops` ends it there."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return min(found), True
    held = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return len(text) - max(held, default=0), False


def _choices(sampling: Sampling) -> Callable[[torch.Tensor, torch.Tensor, torch.Generator], int]:
    """From all ids (1, tokens), the last logits (1, vocabulary) and a generator to the next token.

    The order is that of transformers' `generate`: the penalty on the logits as they are, then temperature, k and p.
    """
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    likeliest = sampling.temperature < _COLD
    if not likeliest:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k > 0:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))

    def choose(ids: torch.Tensor, logits: torch.Tensor, generator: torch.Generator) -> int:
        scores = processors(ids, logits)
        if likeliest:
            return int(scores.argmax(dim=-1))
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator))

    return choose
