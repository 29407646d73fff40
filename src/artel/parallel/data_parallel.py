"""Data parallelism: every process holds the full model, wrapped in DistributedDataParallel if there are several."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from artel.objectives import Objective
from artel.parallel.base import InForward, Strategy
from artel.parallel.mesh import ParallelDims
from artel.parallel.process_group import World


class DataParallel(Strategy):
    """Every process holds the full model and runs its fraction of each global batch."""

    def __init__(self, model: PreTrainedModel, objective: Objective, world: World, precision: str) -> None:
        super().__init__(
            model.to(world.device), objective, world, precision, ParallelDims("ddp", dp_replicate=world.size)
        )
        self.ddp: DistributedDataParallel | None = None
        if world.size > 1:
            module: nn.Module = InForward(model)
            # Every rank computes the same buffers (masks, rotary angles) and has read the frozen weights itself (with
            # LoRA, most of the model): do not broadcast either.
            ignored = [name for name, _ in module.named_buffers()]
            ignored += [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
            devices = [world.device] if world.device.type == "cuda" else None
            self.ddp = DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
            self._forward = self.ddp

    def skip_collectives(self) -> None:
        if self.ddp is not None:
            self.ddp.register_comm_hook(None, _keep_bucket)
            self.ddp.reducer = _LocalReducer(self.ddp.reducer)  # type: ignore[assignment]

    def _loss_multiplier(self, targets: float) -> float:
        return self._world.size / (targets or 1.0)  # DDP divides gradients by the number of processes

    def _gradient_sync(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or self.ddp is None else self.ddp.no_sync()


def _keep_bucket(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Communication hook that returns the bucket unchanged: the `fake` process group returns no gradients."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# PyTorch compares the hook's annotations, which are strings in this file.
_keep_bucket.__annotations__ = {
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": torch.futures.Future[torch.Tensor],
}


class _LocalReducer:
    """DistributedDataParallel's reducer without its reordering of buckets, which communicates with other ranks."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
