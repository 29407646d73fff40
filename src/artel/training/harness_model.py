"""Adapts a model to lm-evaluation-harness. Import it only if the harness is installed."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from artel.parallel import World
from artel.tokens import Tokenizer
from artel.training.heartbeat import heartbeat


class HarnessModel(HFLM):
    """lm-evaluation-harness's interface to a model in training, on one process or several."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, batch: int, world: World | None) -> None:
        """`world`: processes that hold the full model and divide the questions."""
        # A copy, since the harness adds a padding token, but the run's tokenizer must stay unchanged.
        super().__init__(_ModelCalls(model), tokenizer=deepcopy(tokenizer.hf), batch_size=batch)
        self._processes = world or World(0, 1, 0, model.device)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._divide(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._divide(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._divide(super().generate_until, requests, disable_tqdm)

    def _divide(self, answer: Callable[..., list[Any]], requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Divide the requests among the processes. Return all answers on each; raise WorkError on all if one fails."""
        hides_progress = disable_tqdm or self._processes.size > 1
        return self._processes.map_over_ranks(
            lambda local_requests: answer(local_requests, disable_tqdm=hides_progress), requests
        )


class _ModelCalls:
    """The model as the harness may call it. Given the module itself, it would tie its weights again."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.device, self.config, self.dtype = model.device, model.config, model.dtype

    # Run compiled layers in eager mode: each question has another length, and would be compiled anew.

    def __call__(self, inputs: torch.Tensor) -> Any:
        heartbeat("questions of the harness")
        with torch.compiler.set_stance("force_eager"):
            return self._model(inputs)

    def generate(self, **settings: Any) -> torch.Tensor:
        heartbeat("a question of the harness")
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return self._model.generate(**settings)
