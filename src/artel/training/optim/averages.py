"""Moving averages of the weights (`train.ema`), which are validated and exported in place of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from artel.training.optim.local_shards import LocalShard, Shapes

AVERAGE, STEPS = "ema", "ema_steps"
"""Names of a parameter's average and of the number of good steps, after the parameter's name and `|`."""


class WeightAverages:
    """Exponential moving averages of the trained parameters, sharded like them.

    In good step s the decay is (s - 1) / (s + 8), at most `decay`. So an average starts at the weights after the first
    good step, and in a short run the first steps do not dominate it.
    """

    def __init__(self, model: PreTrainedModel, shards: list[LocalShard], decay: float) -> None:
        self._model, self._shards, self._decay = model, shards, decay
        self._averages: dict[str, torch.Tensor] = {}
        self._good_steps = torch.zeros((), device=next(model.parameters()).device)

    @torch.no_grad()
    def update(self, found_inf: torch.Tensor | None) -> None:
        """Move the averages towards the weights, unless `found_inf` is 1.0. Call it before gradients are cleared."""
        steps = self._good_steps
        is_good = 1.0 if found_inf is None else 1 - found_inf.to(steps.device)
        steps += is_good
        fraction = (1 - ((steps - 1) / (steps + 8)).clamp(max=self._decay)) * is_good
        for shard in self._shards:
            weight = shard.stepped.detach()
            if shard.stepped.grad is not None and shard.name not in self._averages:
                self._averages[shard.name] = weight.clone()
            if (average := self._averages.get(shard.name)) is not None:
                if isinstance(average, DTensor) and isinstance(weight, DTensor):
                    average, weight = average.to_local(), weight.to_local()
                average.lerp_(weight, fraction)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Give the model the averages in place of its weights inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # gathered weights are out of date now
        for shard in self._shards:
            shard.refresh()
            if (average := self._averages.get(shard.name)) is not None:
                weight = shard.stepped.clone()
                shard.stepped.copy_(average)
                average.copy_(weight)

    def state(self) -> dict[str, torch.Tensor]:
        state = {}
        for shard in self._shards:
            if (average := self._averages.get(shard.name)) is not None:
                state[f"{shard.name}|{AVERAGE}"] = shard.to_global(average)
                # A copy for each parameter: safetensors refuses memory that several names share.
                state[f"{shard.name}|{STEPS}"] = self._good_steps.clone()
        return state

    def allocate(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Return memory for this rank's shards of a saved state, to be filled and given to `load`."""
        shards = {shard.name: shard for shard in self._shards}
        named = {name: (name.rpartition("|")[0], stored) for name, stored in shapes.items()}
        return {name: shards[owner].allocate(*stored) for name, (owner, stored) in named.items() if owner in shards}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `state`. Averages that it does not have start over."""
        self._averages.clear()
        self._good_steps.zero_()
        for shard in self._shards:
            if (saved := state.get(f"{shard.name}|{AVERAGE}")) is not None:
                self._averages[shard.name] = shard.to_local_value(saved).to(shard.stepped.device)
                self._good_steps.copy_(state[f"{shard.name}|{STEPS}"])
