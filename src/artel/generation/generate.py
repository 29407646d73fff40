"""Text generation with a model, token by token."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from artel.errors import InputError
from artel.generation.sampler import Sampler, SamplingOptions
from artel.generation.text_stream import TextStream
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import TurnEnd

# The name of the cache in forward: since transformers 5.24; before that; before that in models like Mamba.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. Temperature 0 takes the most likely token."""

    new_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies negative ones, for tokens in the prompt or the text so far."""
    beams: int | None = None
    """Beams at temperature 0, for models with beam search; None: from the model's generation_config."""

    @property
    def options(self) -> SamplingOptions:
        """These settings for a `Sampler`, which does not count tokens."""
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )


def generate_text(
    model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, sampling: Sampling, window: int | None
) -> Iterator[str]:
    """Continue `prompt`. Yield text as soon as its characters are complete, until the end token or the limit.

    `window`: the model's longest input in tokens; older tokens are dropped. An empty prompt starts a new document. The
    state of PyTorch's random generators does not change.
    """
    ids = tokenizer.prompt(prompt)
    return generate_from_ids(model, tokenizer, ids, sampling, window, text_end(model, tokenizer), special_tokens=True)


def text_end(model: PreTrainedModel, tokenizer: Tokenizer) -> TurnEnd:
    """Return the end of a text: the tokenizer's end token and those in the model's generation_config.json."""
    return TurnEnd(frozenset({tokenizer.end_id, *end_ids(model)}))


def generate_from_ids(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    ids: list[int],
    sampling: Sampling,
    window: int | None,
    end: TurnEnd,
    *,
    special_tokens: bool = False,
) -> Generator[str, None, bool]:
    """Continue `ids`. Yield text like `write`, and return True if it ended within the limit.

    Never yields the tokens and texts of `end`: text that may become a stop text is held back. Special tokens are left
    out of the text unless `special_tokens`.
    """
    stream = TextStream(tokenizer, ids, end.texts, special_tokens=special_tokens)
    num_tokens, finished = 0, True
    with closing(generate_tokens(model, tokenizer, ids, sampling, window, end.ids)) as tokens:
        for token in tokens:
            num_tokens += 1
            chunk = stream.add(token)
            if chunk.text:
                yield chunk.text
            if chunk.stopped:
                return True
            finished = num_tokens < sampling.new_tokens
    if held_back := stream.flush():
        yield held_back
    return finished


def generate_tokens(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    ids: list[int],
    sampling: Sampling,
    window: int | None,
    stop_ids: frozenset[int],
) -> Generator[int, None, None]:
    """Yield tokens that continue `ids`, until one of `stop_ids` (not yielded) or the limit. See `continue_ids`."""
    sampler = Sampler(sampling.options, ids, tokenizer.vocabulary)

    return continue_ids(
        model, tokenizer, ids, lambda logits: sampler.choose(logits).id, sampling.new_tokens, window, stop_ids
    )


def continue_ids(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    ids: list[int],
    choose: Callable[[torch.Tensor], int],
    new_tokens: int,
    window: int | None,
    stop_ids: frozenset[int],
) -> Generator[int, None, None]:
    """Yield tokens that continue `ids`, until one of `stop_ids` (not yielded) or `new_tokens`.

    `choose` maps the last logits, float32 (rows,), to the next id. Rows from `tokenizer.vocabulary` on have no token.
    Raise InputError for NaN or ids without embedding.
    """
    device = next(model.parameters()).device
    check_embedded(model, tokenizer, ids)
    ids = list(ids)
    vocabulary = tokenizer.vocabulary
    start = num_cached = 0  # the window's first token; the number of tokens already in the cache
    cache = DynamicCache(config=model.config)
    parameters = inspect.signature(type(model).forward).parameters
    cache_name = next((name for name in _CACHE_NAMES if name in parameters), None)  # None for RWKV and Reformer
    was_training = model.training
    model.eval()
    try:
        for _ in range(new_tokens):
            if window is not None and len(ids) - start > window:
                # The window is full: drop its older half and read the newer half again. That is rare.
                start = num_cached = len(ids) - max(1, window // 2)
                cache = DynamicCache(config=model.config)
            new_ids = torch.tensor([ids[num_cached:]], device=device)
            # Lengths grow with every token: compiled layers would be compiled again for each.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                caches = {cache_name: cache} if cache_name else {}
                logits = model(input_ids=new_ids, use_cache=bool(caches), **caches).logits[:, -1].float()
            num_cached = len(ids) if cache_name else start
            if not math.isfinite(logits[:, :vocabulary].max()):  # the other rows have no token
                what = "its logits are NaN or infinite, so no token can be chosen"
                raise InputError.at(model.name_or_path, what, "its weights are damaged or too large")
            token_id = choose(logits[0])
            if token_id in stop_ids:
                return
            ids.append(token_id)
            yield token_id
    finally:
        model.train(was_training)


def check_embedded(model: PreTrainedModel, tokenizer: Tokenizer, ids: list[int]) -> None:
    """Raise InputError for a token without an embedding."""
    rows = model.get_input_embeddings().weight.shape[0]
    unknown_id = next((token_id for token_id in ids if token_id >= rows), None)
    if unknown_id is not None:
        what = f"the model has no embedding for {tokenizer.decode([unknown_id])!r} (id {unknown_id:,} of {rows:,})"
        raise InputError.at(model.name_or_path, what, "use the model with its own tokenizer and chat template")


def end_ids(model: PreTrainedModel) -> set[int]:
    """Return the end tokens in a model's generation_config.json. Llama 3 has several."""
    end = getattr(model.generation_config, "eos_token_id", None)
    token_ids = end if isinstance(end, list) else [] if end is None else [end]
    if not all(isinstance(token_id, int) for token_id in token_ids):
        what = f"its generation_config.json has eos_token_id {str(end)[:100]}, which is not a token id"
        raise InputError.at(model.name_or_path, what, "write eos_token_id as a number, or numbers in a list")
    return set(token_ids)
