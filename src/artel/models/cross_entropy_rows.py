"""Softmax statistics and gradients of rows of logits: one interface, several implementations.

A `RowFunction` computes cross-entropy for each row by itself. `cross_entropy.py` turns its statistics into losses, also
for a vocabulary that is sharded over processes. Implementations: PyTorch's operators (`torch_rows`), C++ for CPUs
(cpu/cross_entropy.py), and Triton for GPUs (triton_cross_entropy.py).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch._C._profiler import _RecordFunctionFast

from artel.models import IGNORED


class Rows(NamedTuple):
    """Rows of logits, and what is computed from them."""

    logits: torch.Tensor
    """(count, width). The first `columns` belong to the ids from `first_id` on; the rest is padding of 0."""
    targets: torch.Tensor
    """Ids of the full vocabulary, int64 (count,), or `IGNORED`."""
    factors: torch.Tensor | None
    """float32 (count,): multiply the losses before they are summed; None for 1."""
    statistics: torch.Tensor
    """float32 (4, count): the maximum of each row; the sum of exp(d) with d = logit - maximum; the logit of the target,
    0 if another process has it, NaN if it is no id; the sum of d * exp(d)."""
    guesses: torch.Tensor
    """int64 (count,): the column of the maximum."""
    columns: int
    first_id: int
    num_ids: int
    """Size of the full vocabulary."""
    soft_cap: float
    """c of c * tanh(x / c), which bounds each logit x; 0 for none."""


class RowFunction(Protocol):
    """Computes cross-entropy of rows."""

    def __call__(self, rows: Rows, *, with_statistics: bool, with_grad: bool) -> None:
        """Fill `statistics` and `guesses`, replace the logits by the gradient of the loss, or both in this order.

        For the gradient alone, the first two statistics are inputs.
        """


def define_row_operators(name: str, compute: RowFunction) -> RowFunction:
    """Wrap `compute` in PyTorch operators, artel::`name` and two more. FakeTensors get their shapes from operators."""

    def run(
        logits: torch.Tensor,
        targets: torch.Tensor,
        factors: torch.Tensor | None,
        statistics: torch.Tensor,
        guesses: torch.Tensor,
        columns: int,
        first_id: int,
        num_ids: int,
        soft_cap: float,
        with_statistics: bool,
        with_grad: bool,
    ) -> None:
        rows = Rows(logits, targets, factors, statistics, guesses, columns, first_id, num_ids, soft_cap)
        compute(rows, with_statistics=with_statistics, with_grad=with_grad)

    operators = {}
    for suffix, with_statistics, with_grad in (("", True, True), ("_statistics", True, False), ("_grad", False, True)):
        mutated = ["logits"] * with_grad + ["statistics", "guesses"] * with_statistics
        operators[with_statistics, with_grad] = torch.library.custom_op(
            f"artel::{name}{suffix}", run, mutates_args=mutated
        )
        operators[with_statistics, with_grad].register_fake(lambda *_: None)

    def run_operator(rows: Rows, *, with_statistics: bool, with_grad: bool) -> None:
        # A profile of torch 2.14 does not show the names of custom operators.
        with _RecordFunctionFast(f"artel::{name}"):
            operators[with_statistics, with_grad](*rows, with_statistics, with_grad)

    return run_operator


def bound(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Return c * tanh(logits / c) for a `soft_cap` c, or the logits for 0."""
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


def torch_rows(rows: Rows, *, with_statistics: bool, with_grad: bool) -> None:
    """Compute rows with PyTorch's operators, on any device. They pass over memory about ten times."""
    logits, targets, factors, statistics, guesses, columns, first_id, num_ids, soft_cap = rows
    scores = bound(logits[:, :columns].float(), soft_cap)
    local = targets - first_id
    is_local = (local >= 0) & (local < columns)
    target_columns = local.clamp(0, columns - 1)[:, None]
    if with_statistics:
        maxima, guesses[:] = scores.max(dim=1)
        statistics[0] = maxima.clamp(min=torch.finfo(torch.float32).min)
        is_id = (targets == IGNORED) | ((targets >= 0) & (targets < num_ids))
        statistics[2] = scores.gather(1, target_columns)[:, 0].where(is_local, 0.0).where(is_id, torch.nan)
    distances = scores - statistics[0][:, None]
    exponentials = distances.exp()
    if with_statistics:
        statistics[1] = exponentials.sum(dim=1)
        # A logit of -inf must give 0, not NaN.
        statistics[3] = torch.linalg.vecdot(exponentials, distances.clamp_(min=-1e4))
    if with_grad:
        factors = (targets != IGNORED).float() if factors is None else factors.where(targets != IGNORED, 0.0)
        grad = exponentials.mul_((factors / statistics[1])[:, None])
        grad.scatter_add_(1, target_columns, -factors.where(is_local, 0.0)[:, None])
        if soft_cap:
            grad.mul_(1 - (scores / soft_cap).square_())
        logits[:, :columns] = grad.masked_fill_((targets == IGNORED)[:, None], 0.0)  # also if a logit is not finite
