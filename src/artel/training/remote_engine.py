"""Answers written by an inference server: vLLM's, or `artel serve --reload-from` (`policy.engine`).

Prompts and answers are exchanged as token ids. Before a round the server loads the weights, or the adapter, from
RUN/engine, so it must see that folder under the same path. Its probabilities differ from those of the model in
training, which computes with other kernels and in another precision: the difference is measured, and the loss corrects
for it.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from artel.config.schema.engine import EngineConfig
from artel.errors import InputError, WorkError
from artel.generation import GenerationPrompt
from artel.generation.answers import CONCURRENT_ANSWERS, AnswerBuilder, SampledAnswer
from artel.generation.generate import Sampling
from artel.messages import logger
from artel.models.loading.save import save_model
from artel.models.lora.adapters import is_adapted
from artel.parallel import ParallelStrategy, World
from artel.storage import TOO_MANY_REQUESTS, ApiFailure, request_json
from artel.tokens import Tokenizer

_KEY = "policy.engine"
_TIMEOUT_SECONDS = 3600.0
_UNAVAILABLE_SECONDS = 60.0
"""Time for which requests to an unavailable server are repeated. A server with too many requests is asked again without
a limit."""
_RETRY_SECONDS = 1.0
_REPORT_SECONDS = 60.0
"""Longest time between two reports of progress, without which the run counts as hanging."""
_NOT_FOUND = 404
_ALLOW = (
    "allow it: artel serve MODEL --reload-from FOLDER, or vLLM with VLLM_SERVER_DEV_MODE=1 and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
)
_RESUME = "start it again, then run the same command again: the round is written anew"


def check_engine(settings: EngineConfig) -> None:
    """Raise InputError if the server cannot be reached, or does not return token ids."""
    if settings.key and settings.key not in os.environ:
        what = f"there is no {settings.key} in the environment"
        raise InputError.at(f"{_KEY}.key", what, f"set it: export {settings.key}=…")
    logger.info("looking for the server at %s", settings.url)
    body = {"prompt": [0], "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
    try:
        choice = _post(settings, "/v1/completions", body)["choices"][0]
    except ApiFailure as error:
        if error.status is not None:
            fix = "see the server's log; policy.engine.key names the variable with its API key"
            raise InputError.at(_KEY, f"{settings.url} refuses a request: {error}", fix) from None
        fix = "start vLLM's server or artel serve --reload-from, or remove this key"
        raise InputError.at(_KEY, f"{settings.url} does not answer: {error}", fix) from None
    except (KeyError, IndexError, TypeError):
        choice = {}
    if not choice.get("token_ids") or not (choice.get("logprobs") or {}).get("token_logprobs"):
        what = f"{settings.url} returns no token ids and log-probabilities, without which nothing can be learned"
        raise InputError.at(_KEY, what, "use vLLM 0.10.2 or newer, or artel serve --reload-from")


def _post(settings: EngineConfig, path: str, body: Any, *, reads_reply: bool = True) -> Any:
    """Post a request, again and again while the server is busy. Raise ApiFailure."""
    end, is_logged = time.monotonic() + _UNAVAILABLE_SECONDS, False
    while True:
        try:
            return request_json(
                f"{settings.url}{path}", body, key=settings.key, timeout=_TIMEOUT_SECONDS, reads_reply=reads_reply
            )
        except ApiFailure as error:
            is_full = error.status == TOO_MANY_REQUESTS
            if not (is_full or (error.may_pass and time.monotonic() < end)):
                raise
            if not (is_full or is_logged):
                logger.info("the server at %s is unavailable (%s), trying again", settings.url, error)
                is_logged = True
        time.sleep(_RETRY_SECONDS)


@dataclass(slots=True)
class RemoteEngine:
    """A server that writes answers with the weights of the run."""

    settings: EngineConfig
    folder: Path
    """Folder from which the server loads the weights."""
    tokenizer: Tokenizer
    strategy: ParallelStrategy
    world: World
    _adapter: str = field(default="", init=False)
    """Name of the adapter that the server has loaded."""

    def load(self) -> None:
        """Let the server load the current weights. Collective. Raise WorkError if it fails."""
        weights = self._full_weights()
        self._adapter = self.world.call_on_first(lambda: self._load_on_first(weights))

    def sample(
        self,
        prompts: Sequence[GenerationPrompt],
        seeds: Sequence[int],
        limits: Sequence[int],
        sampling: Sampling,
        on_progress: Callable[[float], None],
    ) -> list[SampledAnswer]:
        """Return an answer to each prompt, of at most `limits` tokens. Raise WorkError if the server fails."""
        threads = ThreadPoolExecutor(CONCURRENT_ANSWERS)
        futures = [
            threads.submit(self._request_answer, prompt, seed, limit, sampling)
            for prompt, seed, limit in zip(prompts, seeds, limits, strict=True)
        ]
        unfinished = {*futures}
        try:
            while unfinished:
                finished, unfinished = wait(unfinished, _REPORT_SECONDS, FIRST_COMPLETED)
                for future in finished:
                    future.result()
                on_progress(1 - len(unfinished) / len(futures))
        except ApiFailure as error:
            raise WorkError.at(_KEY, f"{self.settings.url} failed: {error}", _RESUME) from None
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Unload the adapter, and delete the weights in `folder`."""
        if self.world.first:
            with suppress(ApiFailure):  # the server may have stopped
                self._unload(self._adapter)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _unload(self, adapter: str) -> None:
        """Let the server forget an adapter, if it has it."""
        if not adapter:
            return
        try:
            self._call("/v1/unload_lora_adapter", {"lora_name": adapter})
        except ApiFailure as error:
            if error.status != _NOT_FOUND:
                raise

    def _call(self, path: str, body: Any) -> None:
        _post(self.settings, path, body, reads_reply=False)  # vLLM replies with plain text, or nothing

    def _full_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the weights to be saved, gathered on every rank; None if this process holds the full model."""
        model = self.strategy.model
        if self.strategy.holds_full_model:
            return None
        adapted, weights = is_adapted(model), {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or not adapted:
                tensor = parameter.detach()
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self.world.first:
                    weights[name] = full.cpu()
        return weights

    def _load_on_first(self, weights: dict[str, torch.Tensor] | None) -> str:
        model = self.strategy.model
        save_model(model, self.tokenizer, self.folder, weights)
        path = str(self.folder.resolve())
        try:
            if not is_adapted(model):
                self._call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
                self._call("/reset_prefix_cache", {})
                return ""
            name = f"artel-{uuid.uuid4().hex[:12]}"  # a server does not load a name twice
            self._call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
            self._unload(self._adapter)
        except ApiFailure as error:
            kind = "adapter" if is_adapted(model) else "weights"
            fix = _RESUME if error.status is None else _ALLOW
            raise WorkError.at(_KEY, f"{self.settings.url} did not load the {kind} in {path}: {error}", fix) from None
        return name

    def _request_answer(self, prompt: GenerationPrompt, seed: int, limit: int, sampling: Sampling) -> SampledAnswer:
        body = {
            "prompt": prompt.ids, "max_tokens": limit, "seed": seed, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": list(prompt.end.texts),
            "stop_token_ids": sorted(prompt.end.ids), "skip_special_tokens": not prompt.special_tokens, "logprobs": 0,
            "return_token_ids": True,
        }  # fmt: skip
        if self._adapter:
            body["model"] = self._adapter
        reply = _post(self.settings, "/v1/completions", body)
        try:
            choice = reply["choices"][0]
            prompt_ids, ids = choice["prompt_token_ids"], choice["token_ids"]
            log_probs = choice["logprobs"]["token_logprobs"]
        except (KeyError, IndexError, TypeError):
            raise ApiFailure(f"its reply has no token ids: {str(reply)[:300]}") from None
        if prompt_ids != prompt.ids:
            raise ApiFailure("it has changed the ids of the prompt")
        if len(ids) != len(log_probs) or None in log_probs:
            raise ApiFailure("some tokens have no log-probability")
        builder = AnswerBuilder(self.tokenizer, prompt, limit)
        if not any(builder.add(*token) for token in zip(ids, log_probs, strict=True)):
            # By a time limit of the server, or by an end that only the server knows.
            builder.finish(cut_off=choice.get("finish_reason") != "stop")
        if not ids:
            raise ApiFailure("its reply is empty")
        return builder.answer
