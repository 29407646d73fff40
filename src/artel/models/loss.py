"""Cross-entropy over a vocabulary, as sums, so that micro-batches and ranks add up to one mean.

The logits of all positions are the largest tensor of a training step (GPT-2, 32 blocks of 1,024: 6.6 GB in float32),
and transformers' own loss makes several tensors of that size. Here the model returns the hidden states before its
output head. The head, the loss and their gradients are then computed together for some thousand positions at a time,
without the positions that have no target.

How: the head's forward is replaced by the identity (`output_head` finds the head), so the model's "logits" are the
hidden states. That is right only where nothing after the head could not as well happen before it. So it is tested once
on each model. A model that bounds its logits (Gemma 2) fails the test and computes its logits as its authors wrote it.

A head that is sharded by vocabulary (a DTensor) stays sharded: each process computes the logits of its own ids.
Processes exchange three numbers a position and the gradient of the hidden states (Shoeybi et al. 2019, "Megatron-LM",
section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from artel.models.choice import Choice
from artel.models.compile import has_compiled_layers
from artel.models.cpu.cross_entropy import add_transposed_product, can_take, cpu_cross_entropy_with_grad
from artel.models.cross_entropy_grad import VocabularyShard, cross_entropy_with_grad
from artel.models.profiler_ranges import profiler_range
from artel.models.targets import IGNORED

# Bytes of float32 logits in memory at a time. A GPU needs products that are worth a kernel launch. On two CPU cores
# 128 MB took 1.5 s where 8 MB took 2.5 (2,048 positions, 384 wide, 16,384 ids).
_CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}
# On a GPU the head's rows are padded to a multiple of this where its matrix is copied to another precision anyway:
# with GPT-2's 50,257 rows the products would miss the tensor cores' fast path.
_ROW_MULTIPLE = 64

_HEADS: WeakKeyDictionary[PreTrainedModel, nn.Linear | None] = WeakKeyDictionary()
"""For each model that was tested its output head, or None where the test failed."""


def model_losses(
    model: PreTrainedModel, inputs: dict[str, Any], targets: torch.Tensor, places: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `model` with `inputs`: (summed loss in nats, float32, over the targets that are not `IGNORED`; guesses).

    targets int64 (rows, length). `places`, int64 (count,), are the positions in the flattened rows that have a target;
    None: most have. guesses int64: the likeliest id of each of `places`, (count,), or of all positions, (rows, length).
    """
    head = output_head(model)
    with nullcontext() if head is None else _forward_replaced(head, _identity):
        outputs = model(**inputs).logits
    with profiler_range("artel: loss"):
        outputs, labels = outputs.flatten(0, 1), targets.flatten()
        if places is not None:
            outputs, labels = outputs[places], labels[places]
        if head is None:
            logits = outputs.float()
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            guesses = logits.detach().argmax(dim=-1)
        else:
            compiled = has_compiled_layers(model)
            loss, guesses = linear_cross_entropy(outputs, head.weight, head.bias, labels, compiled=compiled)
    return loss, guesses if places is not None else guesses.view_as(targets)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    compiled: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed cross-entropy in nats, float32; likeliest ids, int64 (count,)) of `hidden` @ `weight`.T + `bias`.

    hidden (count, size), weight (vocabulary, size), bias (vocabulary,), targets int64 (count,), `IGNORED` where there
    is none. Products are computed in autocast's precision, the rest in float32. The forward pass computes the
    gradients, softmax - target, so that logits are neither kept nor computed twice (Hsu et al. 2024, "Liger Kernel").

    `weight` and `bias` may be DTensors sharded by id over a mesh on which hidden and targets are replicated. Then loss,
    guesses and the gradient of hidden are the same on all its processes.

    With `compiled`, on a CPU and without shards, one loop in C++ computes loss and gradient from the logits.

    `chunk_bytes` of logits are in memory at a time, and at least 128 positions; by default 128 MiB on a CPU, 512 on a
    GPU.
    """
    device = hidden.device.type
    chunk_bytes = chunk_bytes or _CHUNK_BYTES.get(device, 2**25)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    shard = None
    if isinstance(weight, DTensor):
        shard, weight = VocabularyShard.of(weight), weight.to_local()
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    if not torch.is_grad_enabled():  # needs_input_grad tells of requires_grad alone
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss, guesses = _LinearCrossEntropy.apply(hidden, weight, bias, targets, dtype, shard, compiled, chunk_bytes)
    return loss, guesses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
        shard: VocabularyShard | None,
        compiled: bool,
        chunk_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vocabulary = weight.shape[0]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_grad = any(ctx.needs_input_grad)
        cross_entropy: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
        add_product = _add_product
        if compiled and needs_grad and shard is None and can_take(hidden.device, dtype):
            cross_entropy = cpu_cross_entropy_with_grad
            if dtype == torch.bfloat16 and hidden.shape[1] <= vocabulary:
                add_product = add_transposed_product
        else:
            cross_entropy = partial(cross_entropy_with_grad, vocabulary=vocabulary, shard=shard, needs_grad=needs_grad)
        with torch.autocast(hidden.device.type, enabled=False):  # everything is in the right precision already
            matrix = _padded(weight, dtype)
            inputs = hidden.to(dtype)
            padded_bias = None if bias is None else F.pad(bias.to(dtype), (0, matrix.shape[0] - vocabulary))
            loss = torch.zeros((), device=hidden.device)
            guesses = torch.empty_like(targets)
            grad_hidden = torch.empty_like(inputs) if needs_hidden else None
            grad_weight = None
            grad_bias = torch.zeros(matrix.shape[0], device=hidden.device) if needs_bias else None
            # The same chunks on all processes of a sharded vocabulary, whose last one may have fewer ids.
            columns = matrix.shape[0] if shard is None else shard.max_ids
            size = max(128, chunk_bytes // (4 * columns))
            for start in range(0, len(targets), size):
                chunk = slice(start, start + size)
                logits = F.linear(inputs[chunk], matrix, padded_bias)
                chunk_loss, guesses[chunk], grad_logits = cross_entropy(logits, targets[chunk])
                loss += chunk_loss
                if grad_hidden is not None:
                    torch.mm(grad_logits, matrix, out=grad_hidden[chunk])
                if needs_weight:
                    grad_weight = add_product(grad_weight, grad_logits, inputs[chunk])
                if grad_bias is not None:
                    grad_bias += grad_logits.float().sum(dim=0)
            if grad_hidden is not None and shard is not None:
                dist.all_reduce(grad_hidden, group=shard.group)
        ctx.grad_hidden = grad_hidden if grad_hidden is None else grad_hidden.to(hidden.dtype)
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros(matrix.shape, device=hidden.device)  # there were no positions
        ctx.grad_weight = grad_weight if grad_weight is None else grad_weight[:vocabulary].to(weight.dtype)
        ctx.grad_bias = grad_bias if grad_bias is None else grad_bias[:vocabulary].to(weight.dtype)
        ctx.mark_non_differentiable(guesses)
        return loss, guesses

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        if ctx.grad_hidden is None and ctx.grad_weight is None and ctx.grad_bias is None:
            raise RuntimeError("the backward pass of this loss runs once only, and it has run")
        saved = (ctx.grad_hidden, ctx.grad_weight, ctx.grad_bias)
        grads = tuple(None if grad is None else grad.mul_(grad_output) for grad in saved)
        ctx.grad_hidden = ctx.grad_weight = ctx.grad_bias = None
        return *grads, None, None, None, None, None


def _add_product(total: torch.Tensor | None, grad_logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """`total` + grad_logits.T @ inputs, in float32. A `total` of None is 0."""
    if total is None:
        return (grad_logits.T @ inputs).float()
    if grad_logits.dtype == torch.float32:
        return total.addmm_(grad_logits.T, inputs)
    total += grad_logits.T @ inputs
    return total


def _padded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The head's matrix in `dtype`, padded with rows of zeros where it is copied on a GPU anyway."""
    if weight.dtype == dtype or weight.device.type != "cuda":
        return weight.to(dtype)
    missing = -weight.shape[0] % _ROW_MULTIPLE
    return F.pad(weight.to(dtype), (0, 0, 0, missing)) if missing else weight.to(dtype)


def loss_choice(model: PreTrainedModel) -> Choice:
    """How the loss is computed, and why. Runs the model, which must have its weights."""
    if output_head(model) is None:
        return Choice("cross-entropy of all logits", f"{model.config.model_type} has no plain output head")
    return Choice("head and cross-entropy in one", "logits are held for some thousand positions at a time")


def output_head(model: PreTrainedModel) -> nn.Linear | None:
    """The model's output head, if the logits are its output and nothing else. Each model is tested once."""
    if model not in _HEADS:
        _HEADS[model] = _tested_head(model)
    return _HEADS[model]


def trust_output_head(model: PreTrainedModel) -> None:
    """Take the model's output head without a test: a model that is traced for a plan has no numbers to test with."""
    head = model.get_output_embeddings()
    _HEADS[model] = head if type(head) is nn.Linear else None


@contextmanager
def logits_held_as_on(device: str) -> Iterator[None]:
    """Within the block a CPU holds as many logits at a time as a device of that type: a plan for it is traced here."""
    here = _CHUNK_BYTES["cpu"]
    _CHUNK_BYTES["cpu"] = _CHUNK_BYTES[device]
    try:
        yield
    finally:
        _CHUNK_BYTES["cpu"] = here


def _tested_head(model: PreTrainedModel) -> nn.Linear | None:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:  # quantized, adapted, or of the model's own making
        return None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            # Large values too: a bound (Gemma 2's tanh) changes little in the small logits of an untrained model.
            largest = 1e3 if head.weight.dtype == torch.float16 else 1e4  # float16 ends at 65,504
            return head if all(_is_linear_after(model, head, factor) for factor in (1.0, largest)) else None
    except Exception:  # an architecture that needs other inputs, or looks at the logits' shape
        return None
    finally:
        model.train(was_training)


def _is_linear_after(model: PreTrainedModel, head: nn.Linear, factor: float) -> bool:
    """Whether the head may be applied after what follows it in the model, for hidden states scaled by `factor`.

    A scale after the head (Granite, Cohere) may move before it, unless the head has a bias, which it scales as well.
    """
    ids = torch.arange(3, 6, device=head.weight.device)[None] % head.weight.shape[0]
    inputs: list[torch.Tensor] = []

    def scaled_head(hidden: torch.Tensor) -> torch.Tensor:
        inputs.append(hidden * factor)
        return F.linear(inputs[-1], head.weight, head.bias)  # with DTensors, where the head is sharded

    with _forward_replaced(head, scaled_head):
        logits = model(input_ids=ids).logits
    with _forward_replaced(head, lambda hidden: hidden * factor):
        hidden = model(input_ids=ids).logits
    if hidden.shape != (*ids.shape, head.weight.shape[1]) or (
        head.bias is not None and not hidden.equal(_full_tensor(inputs[0]))
    ):
        return False
    expected = _apply_head(head, hidden.to(head.weight.dtype)).to(logits.dtype)
    # A scale before the head is rounded once more than one after it.
    relative, absolute = (1e-5, 1e-6) if logits.dtype == torch.float32 else (0.0, 4 * torch.finfo(logits.dtype).eps)
    return torch.allclose(expected, logits, rtol=relative, atol=absolute * float(logits.abs().max()))


def _apply_head(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """The head's output for `hidden`, which is replicated where the head is sharded."""
    if isinstance(head.weight, DTensor):
        hidden = DTensor.from_local(hidden, head.weight.device_mesh, [Replicate()], run_check=False)
    return _full_tensor(F.linear(hidden, head.weight, head.bias))


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _forward_replaced(head: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    head.forward = forward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del head.forward


def _identity(hidden: torch.Tensor) -> torch.Tensor:
    return hidden
