"""Data parallelism: every process holds the whole model, alone or as PyTorch's DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from artel.objectives import Objective
from artel.parallel.base import InForward, Strategy
from artel.parallel.mesh import ParallelDims
from artel.parallel.process_group import World


class DataParallel(Strategy):
    """Every process holds the whole model and takes a share of each global batch."""

    def __init__(self, model: PreTrainedModel, objective: Objective, world: World, precision: str) -> None:
        super().__init__(
            model.to(world.device), objective, world, precision, ParallelDims("ddp", dp_replicate=world.size)
        )
        self.ddp: DistributedDataParallel | None = None
        if world.size > 1:
            module: nn.Module = InForward(model)
            # Buffers are computed alike on every rank (masks, rotary angles): nothing to send at each forward. Nor are
            # frozen weights, which every rank has read for itself, sent at the start: under LoRA that is all the model.
            alike = [name for name, _ in module.named_buffers()]
            alike += [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, alike)
            devices = [world.device] if world.device.type == "cuda" else None
            self.ddp = DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
            self._forward = self.ddp

    def _loss_multiplier(self, targets: float) -> float:
        return self._world.size / targets  # DDP divides gradients by the number of processes

    def _gradient_sync(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or self.ddp is None else self.ddp.no_sync()
