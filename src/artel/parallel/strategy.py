"""The interface between the training loop and a parallel strategy.

The loop hands a strategy micro-batches and never asks which strategy it is. With every strategy, a step
follows the gradient of the mean loss over all target tokens of the global batch (principle 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from artel.errors import Problem
from artel.models.loading.materialize import WeightLoader
from artel.objectives import Batch, Objective
from artel.parallel.process_group import World

T = TypeVar("T")


class OptimizerProtocol(Protocol):
    """An optimizer as the loop sees it: artel's `Optimizer`, or an engine such as DeepSpeed's."""

    @property
    def loss_factor(self) -> torch.Tensor | None:
        """Loss scale for fp16. None if the loss is not scaled, or is scaled elsewhere."""
        ...

    @property
    def saves_collectively(self) -> bool:
        """True if `weights` and `state` gather full tensors from all ranks, onto rank 0 only."""
        ...

    def clip_and_step(
        self, rate: float, norm: torch.Tensor, *, guarded: bool = False, spike: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip gradients and take one step. Return (gradient norm, True if the step was good), both on the device.

        `rate`: learning rate as a fraction of the peak. `guarded`: leave the weights unchanged if the step is bad.
        `spike`: treat the step as bad.
        """
        ...

    def weights(self) -> dict[str, torch.Tensor]: ...

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None: ...

    def state(self) -> dict[str, torch.Tensor]: ...

    def load(self, state: dict[str, torch.Tensor]) -> None: ...

    def averaged(self) -> AbstractContextManager[None]:
        """Inside the block the model has the averages of its weights (`train.ema`), if there are any."""
        ...


class ParallelStrategy(Protocol):
    """Runs global batches on a model that is split over processes."""

    model: PreTrainedModel

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank, from 0 to `dp_degree` - 1.

        It determines which samples of a global batch this rank runs.
        """
        ...

    @property
    def dp_degree(self) -> int:
        """Number of data-parallel ranks: each runs a fraction of every global batch."""
        ...

    @property
    def is_reporting_rank(self) -> bool:
        """True on the one rank of each data-parallel group that reports token counts."""
        ...

    @property
    def holds_full_model(self) -> bool:
        """True if this process holds all trained weights, in the precision they are trained in."""
        ...

    @property
    def stages(self) -> int:
        """Number of process groups that hold different layers: 1 without a pipeline."""
        ...

    @property
    def can_run_full_model(self) -> bool:
        """True if `with_full_model` works now: not with pipeline stages, and not before the weights are loaded."""
        ...

    @property
    def can_generate(self) -> bool:
        """True if the model can generate while it trains."""
        ...

    @property
    def can_probe_memory(self) -> bool:
        """True if `probe_memory` shows how much memory a micro-batch takes."""
        ...

    def forget_failed_pass(self) -> None:
        """Clean up after an error in `run` or `probe_memory`: drop gradients and the state of the failed pass."""
        ...

    def all_reduce_sum(self, numbers: list[float]) -> list[float]:
        """Sum each number over all ranks, on the host, without waiting for the device."""
        ...

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest value of all ranks."""
        ...

    def run(self, batches: list[Batch], targets: float, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Run forward and backward over this rank's micro-batches. `targets`: target tokens of the global batch.

        Return this rank's sums, float32 (len(objective.sums),), on the device. Afterwards every rank holds complete
        gradients, multiplied by `loss_scale` if there is one.
        """
        ...

    def probe_memory(self, batch: Batch) -> None:
        """Run forward and backward once and discard the gradients, to see whether the batch fits.

        Does not communicate if every rank holds the full model.
        """
        ...

    def shard_batches(self, batches: list[Batch]) -> list[Batch]:
        """Return this rank's shard of each micro-batch, and expect shards from now on."""
        ...

    def disable_autocast(self) -> None:
        """Compute in the precision of the weights themselves."""
        ...

    def skip_collectives(self) -> None:
        """Return local values in place of collectives. For tracing a step on one rank."""
        ...

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the norm of the full tensors, a scalar on the device. Collective: all ranks must call it.

        `tensors`: this rank's parameters, their gradients, or tensors split in the same way, by parameter name.
        """
        ...

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the current gradients, a scalar on the device. Collective."""
        ...

    def evaluate(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        """Evaluate the validation batches of all ranks. Return (sums by name, outputs of shape (samples, outputs)).

        `samples` is `count`, or `Objective.samples_with_outputs`. Outputs are float64, or float32 if there are many
        (`Objective.has_many_outputs`). Each batch comes with the sample indices of its first rows; the rows after them
        are padding. All ranks must pass the same number of batches.
        """
        ...

    def generating(self) -> AbstractContextManager[bool]:
        """Make the model able to generate inside the block. Yield True if this rank must take part."""
        ...

    def with_full_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        """Gather the full model, call `work` on it and return its result. Collective: all ranks must call it."""
        ...

    def infer(self, work: Callable[[PreTrainedModel], T]) -> T:
        """`with_full_model` as in an evaluation: without gradients and dropout, in the precision of training."""
        ...

    def check_split(self) -> None:
        """Raise InputError if the split model computes different outputs than the full one. Runs on real weights."""
        ...

    def own_optimizer(
        self, make: Callable[[], torch.optim.Optimizer], micro_batch: int, steps: int | None
    ) -> OptimizerProtocol | None:
        """Return the strategy's own optimizer, or None if the loop steps the default one.

        `make` creates the run's PyTorch optimizer; `micro_batch` is in rows, `steps` is the length of the run.
        """
        ...


class ParallelPlan(Protocol):
    """The `parallel` section of a run file, before a model exists."""

    @property
    def precision(self) -> str | None:
        """Precision of the layers, if the strategy decides it."""
        ...

    @property
    def micro_batch(self) -> int | None:
        """Rows of a micro-batch, if the strategy's own file sets it."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices and changes, a line each, for the log."""
        ...

    @property
    def reason_not_compiled(self) -> str | None:
        """The key that rules out compiled layers because its strategy wraps them, or None."""
        ...

    @property
    def shards_weights(self) -> bool:
        """True if the model is built on the meta device and each rank loads only its own weights."""
        ...

    @property
    def full_matrices(self) -> bool:
        """True if each rank holds every trained matrix in full."""
        ...

    @property
    def splits_layers(self) -> bool:
        """True if the model is split into pipeline stages: no rank can run it in full."""
        ...

    @property
    def splits_sequences(self) -> bool:
        """True if ranks share each sequence."""
        ...

    def problems(self, model: PreTrainedModel, *, block: int, objective: str, documents: bool) -> list[Problem]:
        """Return all reasons why `model` cannot be split this way. The model may be on the meta device.

        `block`: tokens. `objective`: its name in the run file. `documents`: True if documents are isolated.
        """
        ...

    def parallelize(
        self,
        model: PreTrainedModel,
        objective: Objective,
        world: World,
        precision: str,
        *,
        load_weights: WeightLoader | None,
    ) -> ParallelStrategy:
        """Split the model over the processes of `world`. Collective: all ranks must call it.

        A model on the meta device needs `load_weights`, which loads the weights that this rank keeps.
        """
        ...
