"""Concurrent requests by transformers' continuous batching."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from artel.generation.base import BATCH_TOKENS, Engine, EngineError, Generation, key_value_bytes, tokens_in_memory
from artel.integers import ceil_div
from artel.models.device import release_helpers

_PAGE_TOKENS = 32
"""Tokens per page of the cache."""
_NO_END_ID = -1
_TRIAL_SECONDS = 300.0
"""Time for the first token, on a busy machine."""


class BatchingEngine(Engine):
    """Continuous batching: each forward pass computes a token of every answer, and a chunk of a new prompt."""

    def __init__(self, model: PreTrainedModel, requests: int, context: int, share_prefixes: bool = True) -> None:
        """Raise an error of any type if a trial shows that transformers cannot batch the model."""
        self.note = f"up to {requests} concurrent requests"
        self.requests = requests
        self._model = model.eval()
        self._generations: dict[str, Generation] = {}
        self._attention = model.config._attn_implementation
        if model.device.type == "cpu":
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        pages = _page_count(model, requests, context)
        config = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=pages,
            max_batch_tokens=BATCH_TOKENS,
            max_requests_per_batch=requests,
            allow_block_sharing=share_prefixes,
            use_async_batching=False,
            use_cuda_graph=False,
        )
        # `_SamplingProcessor` samples; the sampling settings of the model's generation_config are not used.
        greedy = GenerationConfig(do_sample=False, eos_token_id=_NO_END_ID, pad_token_id=0)
        self._manager = model.init_continuous_batching(greedy, config)
        processors = self._manager.logit_processor
        processors.logits_processor.append(_SamplingProcessor(self._generations))
        processors.tensors_required += 1
        processors.do_processing = True
        self._start()
        self._run_trial()

    def _start(self) -> None:
        """Start the manager in a daemon thread. Its threads inherit that: the process does not wait for them."""
        release_helpers()  # of this thread; the computing thread starts its own
        thread = threading.Thread(target=self._manager.start, daemon=True)
        thread.start()
        thread.join()

    def _run_trial(self) -> None:
        """Raise EngineError if the model fails in continuous batching."""
        self._manager.add_request([0], max_new_tokens=1, eos_token_id=[_NO_END_ID])
        result = self._manager.get_result(timeout=_TRIAL_SECONDS)
        error = self._manager.background_thread_status.fatal_error
        if result is None or result.error or error is not None:
            self._manager.stop(block=True, hard_stop=True)
            self._model.set_attn_implementation(self._attention)
            raise EngineError(str(error or (result and result.error) or "a trial gave no token"))

    def submit(self, prompt: list[int], generation: Generation) -> None:
        self._generations[generation.name] = generation
        if not self._manager.is_running():  # a forward pass failed, and all running answers with it
            self._start()

        def on_finish(output: Any) -> None:
            if output.error:
                generation.fail(output.error)

        self._manager.output_router.result_handlers[generation.name] = (on_finish, _DirectLoop())
        ends = sorted(generation.stop) or [_NO_END_ID]
        request_id = self._manager.add_request(
            prompt, generation.name, max_new_tokens=generation.new_tokens, eos_token_id=ends
        )
        if request_id is None:
            self.cancel(generation)
            raise EngineError("the engine is stopping")

    def cancel(self, generation: Generation) -> None:
        generation.end()
        self._manager.output_router.result_handlers.pop(generation.name, None)
        if self._generations.pop(generation.name, None) is not None:
            self._manager.cancel_request(generation.name)

    def close(self) -> None:
        self._manager.stop(block=True)
        self._model.set_attn_implementation(self._attention)


class _DirectLoop:
    """Replaces the event loop to which transformers passes results: callbacks run in the engine's thread."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: Any) -> None:
        callback(*arguments)


class _SamplingProcessor(ContinuousBatchingLogitsProcessor):
    """Chooses the token of each request with the request's sampler, by making its logit the highest."""

    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, generations: dict[str, Generation]) -> None:
        self._generations = generations
        self._request_ids: list[str] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._request_ids = [request.state.request_id for request in requests_with_new_token]
        return torch.zeros(len(self._request_ids), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for row, name in enumerate(self._request_ids):
            generation = self._generations.get(name)
            if generation is None or generation.is_over:
                continue
            try:
                token_id = generation.choose(scores[row].clone())
            except Exception as error:  # one request fails, the others continue
                generation.fail(str(error) or type(error).__name__)
                continue
            scores[row, token_id] = torch.inf
        return scores


def _page_count(model: PreTrainedModel, requests: int, context: int) -> int:
    """Return the number of pages of the cache. Raise InputError if one request does not fit in memory.

    The cache holds a quarter of the maximum of all requests, since few fill their context. If it is full, the batcher
    evicts a request and computes it again later.
    """
    request_pages = _request_pages(context)
    max_tokens = tokens_in_memory(model.device, key_value_bytes(model), request_pages * _PAGE_TOKENS)
    return paged_cache_tokens(requests, context, max_tokens) // _PAGE_TOKENS


def paged_cache_tokens(requests: int, context: int, max_tokens: int) -> int:
    """Return the tokens of the cache. `max_tokens`: tokens that fit in memory."""
    pages = max(_request_pages(context), requests * _request_pages(context) // 4)
    return min(pages, max_tokens // _PAGE_TOKENS) * _PAGE_TOKENS


def _request_pages(context: int) -> int:
    return ceil_div(context, _PAGE_TOKENS) + 1
