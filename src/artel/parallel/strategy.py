"""What the training loop asks of a way to run a global batch on one process or many.

The loop hands a strategy micro-batches and never asks which strategy it is. Whatever the strategy, the gradient of a
step is that of the mean loss over all target tokens of the global batch (law 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """What steps a model: artel's `Optimizer`, or a strategy's own engine."""

    @property
    def loss_factor(self) -> torch.Tensor | None:
        """What the loss is multiplied by before the backward pass (fp16); None where it is not scaled here."""
        ...

    @property
    def saves_collectively(self) -> bool:
        """True when `weights` and `state` are gathered from all ranks: whole, and on the first rank alone."""
        ...

    def clip_and_step(
        self, rate: float, norm: torch.Tensor, *, guarded: bool = False, spike: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step at `rate` times the peak learning rate: (gradient norm, whether the step was good), on the device.

        `guarded`: a step that is not good changes nothing. `spike`: the step counts as not good.
        """
        ...

    def weights(self) -> dict[str, torch.Tensor]: ...

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None: ...

    def state(self) -> dict[str, torch.Tensor]: ...

    def load(self, state: dict[str, torch.Tensor]) -> None: ...


class ParallelStrategy(Protocol):
    """Runs global batches on a model that is spread over the processes of a run."""

    model: PreTrainedModel

    @property
    def dp_rank(self) -> int:
        """Which share of a global batch this rank takes, from 0 to `dp_degree` - 1."""
        ...

    @property
    def dp_degree(self) -> int:
        """How many shares a global batch is cut into."""
        ...

    @property
    def is_reporting_rank(self) -> bool:
        """True on the one rank of each data-parallel group whose token counts are reported."""
        ...

    @property
    def holds_full_model(self) -> bool:
        """True when this process has all of the trained weights for itself, in the precision they are trained in."""
        ...

    @property
    def stages(self) -> int:
        """How many groups of processes hold different layers of the model: 1 without a pipeline."""
        ...

    @property
    def can_run_full_model(self) -> bool:
        """True when `with_full_model` works now: not for stages of a pipeline, nor before the weights have come."""
        ...

    @property
    def can_generate(self) -> bool:
        """True when the model can write while it trains."""
        ...

    @property
    def can_probe_memory(self) -> bool:
        """True when `probe_memory` shows what memory a micro-batch takes."""
        ...

    def forget_failed_pass(self) -> None:
        """After an error within `run` or `probe_memory`: drop gradients, and what is remembered of the pass."""
        ...

    def all_reduce_sum(self, numbers: list[float]) -> list[float]:
        """The sum of each number over all ranks, on the host, without waiting for the device."""
        ...

    def all_reduce_min(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        ...

    def run(self, batches: list[Batch], targets: float, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward of this rank's micro-batches; `targets` counts those of the global batch.

        Returns this rank's sums, float32 (len(objective.sums),), on the device. Gradients are then complete on every
        rank, times `loss_scale` where one is given.
        """
        ...

    def probe_memory(self, batch: Batch) -> None:
        """Forward and backward of a micro-batch, thrown away; without other ranks where each has the whole model."""
        ...

    def take_parts(self, batches: list[Batch]) -> list[Batch]:
        """This rank's parts of micro-batches; from now on it takes such parts in place of whole ones."""
        ...

    def ask_no_other_rank(self) -> None:
        """Take this rank's own numbers for those of all: of a trace of its steps the other ranks know nothing."""
        ...

    def norm(self) -> torch.Tensor:
        """The norm of the gradients as they are, a scalar on the device."""
        ...

    def evaluate(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        """Evaluate validation batches of all ranks: (sums by name, outputs of the samples that have any, (count or
        `Objective.samples_with_outputs`, outputs)).

        These are float64, or float32 where there are many (`Objective.has_many_outputs`).
        With each batch come the sample indices of its first rows; rows beyond them are padding. All ranks give equally
        many batches.
        """
        ...

    def generating(self) -> AbstractContextManager[bool]:
        """The context in which the model writes; gives whether this rank must take part."""
        ...

    def with_full_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        """What `work` returns for the model. All ranks call it at the same time."""
        ...

    def check_split(self) -> None:
        """Raise InputError where the model, split, computes something else: tried on its weights, before it trains."""
        ...

    def own_optimizer(
        self, make: Callable[[], torch.optim.Optimizer], micro_batch: int, steps: int | None
    ) -> OptimizerProtocol | None:
        """The optimizer of a strategy that steps by itself; None where the loop's own steps.

        `make` makes PyTorch's optimizer of the run; `micro_batch` is in rows, `steps` is the length of the run.
        """
        ...


class ParallelPlan(Protocol):
    """What a run file says about parallelism, before there is a model."""

    @property
    def precision(self) -> str | None:
        """What layers compute in, where the strategy decides it."""
        ...

    @property
    def micro_batch(self) -> int | None:
        """Rows of a micro-batch, where the strategy's own file says so."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen or changed, a line each, for the log."""
        ...

    @property
    def not_compiled_because(self) -> str | None:
        """The key that keeps layers from being compiled, since the strategy takes hold of them; None otherwise."""
        ...

    @property
    def shards_weights(self) -> bool:
        """True when the model is built on the meta device, and each rank then loads what it holds."""
        ...

    @property
    def whole_matrices(self) -> bool:
        """True when each rank has every trained matrix whole."""
        ...

    @property
    def splits_layers(self) -> bool:
        """True when no rank can run the whole model: stages of a pipeline."""
        ...

    @property
    def splits_sequences(self) -> bool:
        """True when ranks share each sequence."""
        ...

    def problems(self, model: PreTrainedModel, *, block: int, objective: str, documents: bool) -> list[Problem]:
        """Why `model` cannot be split so, all reasons at once. The model may be on the meta device.

        `block` is in tokens; `objective` is its name in the run file; `documents`: documents do not see one another.
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
        tell: Callable[[str], None],
    ) -> ParallelStrategy:
        """Spread the model over the processes of `world`; all of them call it.

        A model on the meta device needs `load_weights`, which brings the weights of what is left of it.
        """
        ...
