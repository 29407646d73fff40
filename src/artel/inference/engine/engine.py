"""Answers of several requests at once, token by token: transformers' continuous batching, or one after another.

The engine runs the model in a thread of its own, and delivers what it writes token by token.
"""

from __future__ import annotations

import queue
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from artel.errors import InputError
from artel.host import memory
from artel.models.generate import continue_ids
from artel.models.sampler import Sampler, Token
from artel.tokens import Tokenizer

FinishReason = Literal["stop", "length"]

_PAGE = 32
"""Tokens of a page of the cache."""
_BATCH_TOKENS = 512
"""Tokens of a forward pass at most: a long prompt is read in parts, so that other answers go on meanwhile."""
_CACHE_SHARE = 0.25
"""Of free memory, for the keys and values of all requests at most."""


_NO_END = -1
_TRIAL_SECONDS = 300.0
"""For the first token, on a busy machine."""


class EngineError(Exception):
    """The model failed on a request."""


Deliver = Callable[[Token | EngineError | None], object]


class Generation:
    """One answer that is being written."""

    def __init__(self, sampler: Sampler, new_tokens: int, stop: frozenset[int], deliver: Deliver) -> None:
        """`stop`: ids that end the answer, which are not among its tokens.

        `deliver` gets each token as it is chosen, and then None, or what the model failed with; it is called in the
        engine's thread.
        """
        self.name = uuid.uuid4().hex
        self.finish_reason: FinishReason = "length"
        self.sampler = sampler
        self.new_tokens = new_tokens
        self.stop = stop
        self.is_over = False
        self._count = 0
        self._deliver = deliver

    def choose(self, logits: torch.Tensor) -> int:
        """The next token by float32 logits (rows,); called in the engine's thread, which hands it on."""
        token = self.sampler.choose(logits)
        self._count += 1
        if token.id in self.stop:
            self.finish_reason = "stop"
            self.end()
            return token.id
        self._deliver(token)
        if self.sampler.is_over:
            self.finish_reason = "stop"
            self.end()
        elif self._count == self.new_tokens:
            self.end()
        return token.id

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._deliver(None)

    def fail(self, why: str) -> None:
        if not self.is_over:
            self.is_over = True
            self._deliver(EngineError(why))


class Engine(ABC):
    """A model that answers requests."""

    note: str
    """How it runs them, for people."""

    @abstractmethod
    def submit(self, prompt: list[int], generation: Generation) -> None:
        """Begin an answer. Raises EngineError."""

    @abstractmethod
    def cancel(self, generation: Generation) -> None:
        """Free the place of an answer, whether it is over or not."""

    @abstractmethod
    def close(self) -> None:
        """Answer what has begun, and end."""


def make_engine(
    model: PreTrainedModel, tokenizer: Tokenizer, requests: int, context: int, *, share_beginnings: bool = True
) -> Engine:
    """Several requests at once where transformers can batch the model, else one after another.

    `requests` are computed at once at most; each has at most `context` tokens of prompt and answer. Prompts that begin
    alike share what was computed of their beginning, unless the model changes meanwhile.
    """
    try:
        return BatchingEngine(model, requests, context, share_beginnings)
    except InputError:
        raise
    except Exception as error:  # transformers raises many kinds for what it cannot batch
        return SequentialEngine(model, tokenizer, f"one request after another: {str(error).splitlines()[0][:200]}")


# Several at once -----------------------------------------------------------------------


class BatchingEngine(Engine):
    """Continuous batching: each forward pass computes a token of every answer, and a part of a new prompt."""

    def __init__(self, model: PreTrainedModel, requests: int, context: int, share_beginnings: bool = True) -> None:
        """Raises where transformers cannot batch the model: a trial shows it."""
        self.note = f"up to {requests} requests at once"
        self._model = model.eval()
        self._generations: dict[str, Generation] = {}
        self._attention = model.config._attn_implementation
        if model.device.type == "cpu":
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        pages = _pages(model, requests, context)
        config = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=pages,
            max_batch_tokens=_BATCH_TOKENS,
            max_requests_per_batch=requests,
            allow_block_sharing=share_beginnings,
            use_async_batching=False,
            use_cuda_graph=False,
        )
        # The choice is made in `_Choosing`; what the model's own generation_config says of sampling is not used.
        greedy = GenerationConfig(do_sample=False, eos_token_id=_NO_END, pad_token_id=0)
        self._manager = model.init_continuous_batching(greedy, config)
        processors = self._manager.logit_processor
        processors.logits_processor.append(_Choosing(self._generations))
        processors.tensors_required += 1
        processors.do_processing = True
        self._start()
        self._try()

    def _start(self) -> None:
        """Begin computing, in a daemon: threads are what the one is that starts them. A process never waits for it."""
        starter = threading.Thread(target=self._manager.start, daemon=True)
        starter.start()
        starter.join()

    def _try(self) -> None:
        """Raise what the model raises in continuous batching."""
        self._manager.add_request([0], max_new_tokens=1, eos_token_id=[_NO_END])
        result = self._manager.get_result(timeout=_TRIAL_SECONDS)
        error = self._manager.background_thread_status.fatal_error
        if result is None or result.error or error is not None:
            self._manager.stop(block=True, hard_stop=True)
            self._model.set_attn_implementation(self._attention)
            raise EngineError(str(error or (result and result.error) or "a trial gave no token"))

    def submit(self, prompt: list[int], generation: Generation) -> None:
        self._generations[generation.name] = generation
        if not self._manager.is_running():  # a forward pass failed, and with it all that was being answered
            self._start()

        def finished(output: Any) -> None:
            if output.error:
                generation.fail(output.error)

        self._manager.output_router.result_handlers[generation.name] = (finished, _AtOnce())
        ends = sorted(generation.stop) or [_NO_END]
        taken = self._manager.add_request(
            prompt, generation.name, max_new_tokens=generation.new_tokens, eos_token_id=ends
        )
        if taken is None:
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


class _AtOnce:
    """In place of the event loop that transformers hands results to: they are taken in the engine's thread."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: Any) -> None:
        callback(*arguments)


class _Choosing(ContinuousBatchingLogitsProcessor):
    """Chooses the token of each request by its own sampler: the others get logits below it."""

    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, generations: dict[str, Generation]) -> None:
        self._generations = generations
        self._rows: list[str] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = [request.state.request_id for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for row, name in enumerate(self._rows):
            generation = self._generations.get(name)
            if generation is None or generation.is_over:
                continue
            try:
                chosen = generation.choose(scores[row].clone())
            except Exception as error:  # whatever one request ends in, the others go on
                generation.fail(str(error) or type(error).__name__)
                continue
            scores[row, chosen] = torch.inf
        return scores


def _pages(model: PreTrainedModel, requests: int, context: int) -> int:
    """Pages of the cache, in a share of free memory. Raises InputError where there is no room for one request.

    There is room for a quarter of what all requests have at most: few fill their context. Where the cache is full, the
    batcher sets one aside and reads it again later.
    """
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    page = 2 * _PAGE * config.num_hidden_layers * heads * size * model.dtype.itemsize
    free = memory().free if model.device.type == "cpu" else torch.cuda.mem_get_info(model.device)[0]
    one = -(-context // _PAGE) + 1
    room = int(free * _CACHE_SHARE / page)
    if room < one:
        what = f"{context:,} tokens of context need {one * page / 2**30:.1f} GiB for keys and values"
        raise InputError.at("--context", what, f"write at most {max(1, (room - 1) * _PAGE)}")
    return min(max(one, requests * one // 4), room)


# One after another ---------------------------------------------------------------------


class SequentialEngine(Engine):
    """For models whose state cannot be paged: Mamba, RWKV and their kin."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, note: str) -> None:
        self.note = note
        self._model, self._tokenizer = model, tokenizer
        self._jobs: queue.Queue[tuple[list[int], Generation] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="artel-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], generation: Generation) -> None:
        self._jobs.put((prompt, generation))

    def cancel(self, generation: Generation) -> None:
        generation.end()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            prompt, generation = job
            try:
                self._answer(prompt, generation)
            except Exception as error:  # whatever one request ends in, the others go on
                generation.fail(str(error) or type(error).__name__)

    def _answer(self, prompt: list[int], generation: Generation) -> None:
        tokens = continue_ids(
            self._model, self._tokenizer, prompt, generation.choose, generation.new_tokens, None, generation.stop
        )
        with closing(tokens):
            while not generation.is_over and next(tokens, None) is not None:
                pass
