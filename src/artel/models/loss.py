"""Cross-entropy over a vocabulary, as sums, so that micro-batches and ranks add up to one mean.

The logits of all positions are the largest tensor of a training step (GPT-2, 32 blocks of 1,024: 6.6 GB in float32),
and transformers' own loss makes several tensors of that size. Here the model returns the hidden states before its
output head. The head, the loss and their gradients are then computed together for a few thousand positions at a time,
skipping positions without a target.

`output_head.py` finds the head and tests whether the model can run without it.

A head sharded by vocabulary (a DTensor) stays sharded: each process computes the logits of its own ids. Processes
exchange five numbers per position and the gradient of the hidden states (Shoeybi et al. 2019, "Megatron-LM",
section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from artel.integers import ceil_div
from artel.models import IGNORED, Choice
from artel.models.cpu.cross_entropy import add_transposed_matmul, cpu_rows
from artel.models.cross_entropy import RowLosses, VocabularyShard, cross_entropy_, row_function
from artel.models.cross_entropy_rows import torch_rows
from artel.models.device import autocast_is_on, row_multiple
from artel.models.forward_pass import profiler_range
from artel.models.output_head import hidden_states_as_logits, output_head

# Bytes of logits in memory at a time. Each chunk adds to the gradient of the head, which moves 8 bytes a weight. On two
# CPU cores chunks of 128 MB took 1.5 s and chunks of 8 MB 2.5 s (float32, 2,048 positions, 384 wide, 16,384 ids). A
# frozen head has no gradient, and a quarter takes no longer (benchmarks/results.md).
_CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**30}
# On a GPU the head's rows are padded to a multiple of this if its matrix is copied to another precision anyway: with
# GPT-2's 50,257 rows the matmuls would miss the tensor cores' fast path.
_ROW_MULTIPLE = 64

_imitated_device: str | None = None


def model_losses(
    model: PreTrainedModel, inputs: dict[str, Any], targets: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `model` on `inputs`. Return (loss in nats, summed over targets that are not `IGNORED`, float32; guesses).

    targets int64 (rows, length). `positions`, int64 (count,): the flattened positions that have a target; None if most
    have one. guesses, int64: the most likely id at `positions` (count,), or everywhere (rows, length).
    """
    head = output_head(model)
    with hidden_states_as_logits(head):
        outputs = model(**inputs).logits
    with profiler_range("artel: loss"):
        outputs, labels = outputs.flatten(0, 1), targets.flatten()
        if positions is not None:
            outputs, labels = outputs.index_select(0, positions), labels[positions]
        if head is None:
            logits = outputs.float()
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            guesses = logits.detach().argmax(dim=-1)
        else:
            weight, bias = head.linear.weight, head.linear.bias
            loss, guesses = linear_cross_entropy(outputs, weight, bias, labels, soft_cap=head.soft_cap)
    return loss, guesses if positions is not None else guesses.view_as(targets)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    soft_cap: float = 0.0,
    chunk_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy of `hidden` @ `weight`.T + `bias`: (sum in nats, float32; most likely ids (count,)).

    hidden (count, size), weight (vocabulary, size), bias (vocabulary,), targets int64 (count,) with `IGNORED` for none.
    Matmuls are computed in autocast's precision, the rest in float32. The forward pass computes the gradients
    (softmax - target), so logits are neither saved nor computed twice (Hsu et al. 2024, "Liger Kernel").

    `weight` and `bias` may be DTensors sharded by id over a mesh on which hidden and targets are replicated. Then loss,
    ids and the gradient of hidden are the same on all processes of the mesh.

    `soft_cap` c replaces each logit x by c * tanh(x / c), unless it is 0. `chunk_bytes`: bytes of logits in memory at a
    time, for at least 128 positions. Default: 128 MiB on a CPU, 1 GiB on a GPU, a quarter of it with a frozen head.
    """
    arguments = head_arguments(hidden, weight, bias, targets, soft_cap, chunk_bytes)
    loss, guesses = _LinearCrossEntropy.apply(*arguments)
    return loss, guesses


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """The settings of the head's matmuls."""

    dtype: torch.dtype
    shard: VocabularyShard | None
    soft_cap: float
    chunk_bytes: int


def head_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    soft_cap: float,
    chunk_bytes: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, HeadSettings]:
    """Prepare the arguments of `ChunkedHead` and its autograd functions. DTensors become their local shards."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if autocast_is_on(device) else hidden.dtype
    shard = None
    if isinstance(weight, DTensor):
        shard, weight = VocabularyShard.from_weight(weight), weight.to_local()
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    if not torch.is_grad_enabled():  # needs_input_grad only reflects requires_grad
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    default_bytes = _CHUNK_BYTES.get(effective_device(hidden), 2**27) // (1 if weight.requires_grad else 4)
    settings = HeadSettings(dtype, shard, soft_cap, chunk_bytes or default_bytes)
    return hidden, weight, bias, targets, settings


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        settings: HeadSettings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = torch.zeros((), device=hidden.device)
        guesses = torch.empty_like(targets)
        with torch.autocast(hidden.device.type, enabled=False):  # everything already has the right precision
            head = ChunkedHead(hidden, weight, bias, settings, ctx.needs_input_grad[:3])
            for chunk in head.chunks():
                result, grad_logits = head.losses(chunk, targets[chunk])
                guesses[chunk] = result.guesses
                loss += result.losses.sum()
                head.add(chunk, grad_logits)
                del grad_logits  # free it before the next chunk
            ctx.grads = head.gradients()
        ctx.mark_non_differentiable(guesses)
        return loss, guesses

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the backward pass of this loss can run only once")
        grads, ctx.grads = ctx.grads, None
        return *(None if grad is None else grad.mul_(grad_output) for grad in grads), None, None


class ChunkedHead:
    """Computes the head's matmuls one chunk of positions at a time, and accumulates its gradients.

    `head_arguments` prepares the arguments.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: HeadSettings,
        needs: Sequence[bool],
    ) -> None:
        """`needs`: which gradients `add` computes (hidden, weight, bias)."""
        self.needs_grad = any(needs)
        device, device_type = hidden.device, effective_device(hidden)
        self._num_positions, self._row_multiple = len(hidden), row_multiple(device_type, settings.dtype)
        self._vocabulary, self._shard, self._soft_cap = weight.shape[0], settings.shard, settings.soft_cap
        self._needs_hidden, self._needs_weight, self._needs_bias = needs
        self._dtypes = hidden.dtype, weight.dtype
        self._matrix = _pad_rows(weight, settings.dtype, device_type)
        self._inputs = hidden.to(settings.dtype)
        if padding := -self._num_positions % self._row_multiple:
            self._inputs = F.pad(self._inputs, (0, 0, 0, padding))
        rows = self._matrix.shape[0]
        self._bias = None if bias is None else F.pad(bias.to(settings.dtype), (0, rows - self._vocabulary))
        self._grad_hidden = torch.empty_like(self._inputs) if self._needs_hidden else None
        self._grad_weight: torch.Tensor | None = None
        self._grad_bias = torch.zeros(rows, device=device) if self._needs_bias else None
        # All processes of a sharded vocabulary need the same chunks, and the last one may have fewer ids.
        columns = rows if self._shard is None else self._shard.max_ids
        self._row_function = row_function(device_type, settings.dtype)
        row_bytes = settings.dtype.itemsize * columns
        if self._row_function is torch_rows:  # its copies take several times as much as the logits
            row_bytes *= 4
        self._chunk_length = max(128, settings.chunk_bytes // row_bytes // self._row_multiple * self._row_multiple)
        self._add_matmul = _add_matmul
        if device_type == "cuda" and settings.dtype != torch.float32:
            self._add_matmul = _add_float32_matmul
        elif (
            settings.dtype == torch.bfloat16 and self._row_function is cpu_rows and hidden.shape[1] <= self._vocabulary
        ):
            self._add_matmul = add_transposed_matmul

    def chunks(self) -> Iterator[slice]:
        starts = range(0, self._num_positions, self._chunk_length)
        return (slice(start, min(start + self._chunk_length, self._num_positions)) for start in starts)

    def _padded_chunk(self, chunk: slice) -> slice:
        """Return the chunk including its padding positions."""
        return slice(chunk.start, ceil_div(chunk.stop, self._row_multiple) * self._row_multiple)

    def losses(
        self, chunk: slice, targets: torch.Tensor, factors: torch.Tensor | None = None
    ) -> tuple[RowLosses, torch.Tensor]:
        """Return the losses of a chunk, and the gradient of the sum of factor * loss w.r.t. the logits.

        targets int64 (count,). factors float32 (count,); None for 1. The gradient also has rows for padding positions,
        which are zero. It is undefined if no gradient is needed.
        """
        inputs, count = self._inputs[self._padded_chunk(chunk)], len(targets)
        if padding := len(inputs) - count:
            targets = F.pad(targets, (0, padding), value=IGNORED)
            factors = None if factors is None else F.pad(factors, (0, padding))
        logits = F.linear(inputs, self._matrix, self._bias)
        losses = cross_entropy_(
            logits,
            targets,
            compute=self._row_function,
            vocabulary=self._vocabulary,
            shard=self._shard,
            factors=factors,
            soft_cap=self._soft_cap,
            needs_grad=self.needs_grad,
        )
        return RowLosses(*(values[:count] for values in losses)), logits

    def logits(self, chunk: slice) -> torch.Tensor:
        """Return a chunk's logits, float32 (count, vocabulary): of all ids, also with a sharded vocabulary.

        They are not bounded by `soft_cap` yet.
        """
        padded = F.linear(self._inputs[self._padded_chunk(chunk)], self._matrix, self._bias)
        local = padded[: chunk.stop - chunk.start, : self._vocabulary].float()
        return local if self._shard is None else self._shard.all_gather(local)

    def add_full(self, chunk: slice, grad_logits: torch.Tensor) -> None:
        """Like `add`, for the gradient of the tensor that `logits` returns."""
        if self._shard is not None:
            grad_logits = grad_logits[:, self._shard.first_id :][:, : self._vocabulary]
        rows = self._matrix.shape[0]
        padding = self._padded_chunk(chunk).stop - chunk.stop
        self.add(chunk, F.pad(grad_logits, (0, rows - self._vocabulary, 0, padding)).to(self._inputs.dtype))

    def add(self, chunk: slice, grad_logits: torch.Tensor) -> None:
        """Accumulate the needed gradients, given the gradient of a chunk's logits as `losses` returns it."""
        padded = self._padded_chunk(chunk)
        if self._grad_hidden is not None:
            torch.mm(grad_logits, self._matrix, out=self._grad_hidden[padded])
        if self._needs_weight:
            self._grad_weight = self._add_matmul(self._grad_weight, grad_logits, self._inputs[padded])
        if self._grad_bias is not None:
            self._grad_bias += grad_logits.float().sum(dim=0)

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of hidden, weight and bias, after all chunks were added."""
        grad_hidden, grad_weight, grad_bias = self._grad_hidden, self._grad_weight, self._grad_bias
        if grad_hidden is not None and self._shard is not None:
            dist.all_reduce(grad_hidden, group=self._shard.group)
        if self._needs_weight and grad_weight is None:  # no positions
            grad_weight = torch.zeros(self._matrix.shape, device=self._matrix.device)
        hidden_dtype, weight_dtype = self._dtypes
        return (
            None if grad_hidden is None else grad_hidden[: self._num_positions].to(hidden_dtype),
            None if grad_weight is None else grad_weight[: self._vocabulary].to(weight_dtype),
            None if grad_bias is None else grad_bias[: self._vocabulary].to(weight_dtype),
        )


def _add_matmul(grad: torch.Tensor | None, grad_logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return `grad` + grad_logits.T @ inputs, in float32. `grad` may be None for 0."""
    if grad is None:
        return (grad_logits.T @ inputs).float()
    if grad_logits.dtype == torch.float32:
        return grad.addmm_(grad_logits.T, inputs)
    grad += grad_logits.T @ inputs
    return grad


def _add_float32_matmul(grad: torch.Tensor | None, grad_logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Like `_add_matmul`, for bf16 and fp16 on a GPU, whose matmuls can add to a float32 matrix."""
    if grad is None:
        return torch.mm(grad_logits.T, inputs, out_dtype=torch.float32)
    return torch.addmm(grad, grad_logits.T, inputs, out_dtype=torch.float32, out=grad)


def _pad_rows(weight: torch.Tensor, dtype: torch.dtype, device_type: str) -> torch.Tensor:
    """Return the head's matrix in `dtype`, padded with rows of zeros if it has to be copied on a GPU anyway."""
    if weight.dtype == dtype or device_type != "cuda":
        return weight.to(dtype)
    padding = -weight.shape[0] % _ROW_MULTIPLE
    return F.pad(weight.to(dtype), (0, 0, 0, padding)) if padding else weight.to(dtype)


def loss_choice(model: PreTrainedModel) -> Choice:
    """Choose how the loss is computed, with the reason. Runs the model, which must have its weights."""
    if output_head(model) is None:
        return Choice("cross-entropy of all logits", f"{model.config.model_type} has no plain output head")
    return Choice("head and cross-entropy in one", "logits are held for some thousand positions at a time")


def effective_device(tensor: torch.Tensor) -> str:
    """Return the type of the tensor's device, or the imitated one."""
    return _imitated_device or tensor.device.type


@contextmanager
def imitate_device(device_type: str) -> Iterator[None]:
    """Compute the loss as on this type of device inside the block, to trace a plan for it with FakeTensors."""
    global _imitated_device
    _imitated_device = device_type
    try:
        yield
    finally:
        _imitated_device = None
