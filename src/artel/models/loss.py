"""Cross-entropy over a vocabulary, as sums, so that micro-batches and ranks add up to one mean.

The logits of all positions are the largest tensor of a training step (GPT-2, 32 blocks of 1,024: 6.6 GB in float32),
and transformers' own loss makes several of that size. Here the model stops short of its output head, and head, loss and
their gradients are computed together for some thousand positions at a time; positions without a target are left out.

How: while the head is open (`open_head`), the model's "logits" are what goes into the head. That is right only where
nothing happens to logits behind the head that could not happen before it; so it is tried on each model before it is
relied on, and a model that bounds its logits (Gemma 2) computes them as its authors wrote it.

A head that is split over processes by vocabulary (a DTensor) stays split: each process computes the logits of its own
ids, and what is put together is three numbers a position, and the gradient of what goes into the head (Shoeybi et al.
2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from artel.models.cpu.cross_entropy import can_take, cpu_slopes, sum_with_product
from artel.models.cross_entropy_grad import Share, slopes
from artel.models.profiler_ranges import marked
from artel.models.targets import IGNORED

# Bytes of logits in float32 that are held at a time: a GPU needs products that are large enough to be worth starting,
# and on two CPU cores 128 MB took 1.5 s where 8 MB took 2.5 (2,048 positions, 384 wide, 16,384 ids).
_AT_A_TIME = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}
# Rows of the head are filled up to a multiple of this on a GPU, where its matrix is copied to another precision anyway:
# GPT-2's 50,257 would keep the products off the tensor cores' fast path.
_MULTIPLE = 64

_HEADS: WeakKeyDictionary[PreTrainedModel, nn.Linear | None] = WeakKeyDictionary()
"""For each model that was tried the output head that can be opened, or None."""


def model_losses(
    model: PreTrainedModel, inputs: dict[str, Any], targets: torch.Tensor, places: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `model` with `inputs`: (summed loss in nats, float32, over the targets that are not `IGNORED`; guesses).

    targets int64 (rows, length). `places`, int64 (count,), are the positions in the flattened rows that have a target;
    None: most have. guesses int64: the likeliest id of each of `places`, (count,), or of all positions, (rows, length).
    """
    head = open_head(model)
    if head is None:
        found = model(**inputs).logits
    else:
        with _replaced(head, _as_it_is):
            found = model(**inputs).logits
    with marked("artel: loss"):
        found, wanted = found.flatten(0, 1), targets.flatten()
        if places is not None:
            found, wanted = found[places], wanted[places]
        if head is None:
            loss, guesses = _of_logits(found.float(), wanted)
        else:
            compiled = has_compiled_layers(model)
            loss, guesses = linear_cross_entropy(found, head.weight, head.bias, wanted, compiled=compiled)
    return loss, guesses if places is not None else guesses.view_as(targets)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    compiled: bool = False,
    held_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed cross-entropy in nats, float32; likeliest ids, int64 (count,)) of `hidden` @ `weight`.T + `bias`.

    hidden (count, size), weight (vocabulary, size), bias (vocabulary,), targets int64 (count,), `IGNORED` where there
    is none. Products are computed in autocast's precision, the rest in float32. Gradients, softmax - target, are
    computed in the forward pass, so that logits are neither kept nor computed again (Hsu et al. 2024, "Liger Kernel").

    `weight` and `bias` may be DTensors in shards of ids over the processes of a mesh, on which hidden and targets are
    the same; then loss, guesses and the gradient of hidden are the same on all of them.

    With `compiled`, on a CPU, what is done to logits is one loop in C++, where this process has them all.
    `held_bytes` of logits are held at a time, and at least 128 positions; by default 128 MiB on a CPU, 512 on a GPU.
    """
    device = hidden.device.type
    held_bytes = held_bytes or _AT_A_TIME.get(device, 2**25)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    share = None
    if isinstance(weight, DTensor):
        share, weight = Share.of(weight), weight.to_local()
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    if not torch.is_grad_enabled():  # a function is told whether its inputs want gradients, not whether any are taken
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss, guesses = _LinearCrossEntropy.apply(hidden, weight, bias, targets, dtype, share, compiled, held_bytes)
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
        share: Share | None,
        compiled: bool,
        held_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vocabulary = weight.shape[0]
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wanted = any(ctx.needs_input_grad)
        find: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
        add = _sum_with_product
        if compiled and wanted and share is None and can_take(hidden.device, dtype):
            find = cpu_slopes
            if dtype == torch.bfloat16 and hidden.shape[1] <= vocabulary:
                add = sum_with_product
        else:
            find = partial(slopes, vocabulary=vocabulary, share=share, wanted=wanted)
        # What the next lines compute is in the chosen precision already.
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = _filled_up(weight, dtype)
            inputs = hidden.to(dtype)
            shift = None if bias is None else F.pad(bias.to(dtype), (0, matrix.shape[0] - vocabulary))
            loss = torch.zeros((), device=hidden.device)
            guesses = torch.empty_like(targets)
            grad_hidden = torch.empty_like(inputs) if wants_hidden else None
            grad_weight = None
            grad_bias = torch.zeros(matrix.shape[0], device=hidden.device) if wants_bias else None
            # The same on all processes that share a vocabulary, of which the last may have fewer ids.
            columns = matrix.shape[0] if share is None else share.most
            size = max(128, held_bytes // (4 * columns))
            for start in range(0, len(targets), size):
                piece = slice(start, start + size)
                logits = F.linear(inputs[piece], matrix, shift)
                found, guesses[piece], grad_logits = find(logits, targets[piece])
                loss += found
                if grad_hidden is not None:
                    torch.mm(grad_logits, matrix, out=grad_hidden[piece])
                if wants_weight:
                    grad_weight = add(grad_weight, grad_logits, inputs[piece])
                if grad_bias is not None:
                    grad_bias += grad_logits.float().sum(dim=0)
            if grad_hidden is not None and share is not None:
                dist.all_reduce(grad_hidden, group=share.group)
        ctx.grad_hidden = grad_hidden if grad_hidden is None else grad_hidden.to(hidden.dtype)
        if wants_weight and grad_weight is None:
            grad_weight = torch.zeros(matrix.shape, device=hidden.device)  # there were no positions at all
        ctx.grad_weight = grad_weight if grad_weight is None else grad_weight[:vocabulary].to(weight.dtype)
        ctx.grad_bias = grad_bias if grad_bias is None else grad_bias[:vocabulary].to(weight.dtype)
        ctx.mark_non_differentiable(guesses)
        return loss, guesses

    @staticmethod
    def backward(ctx: Any, *of_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        slope = of_outputs[0]  # of the loss; the guesses have none
        if ctx.grad_hidden is None and ctx.grad_weight is None and ctx.grad_bias is None:
            raise RuntimeError("the gradient of this loss was taken before, and is gone")
        kept = (ctx.grad_hidden, ctx.grad_weight, ctx.grad_bias)
        found = tuple(None if each is None else each.mul_(slope) for each in kept)
        ctx.grad_hidden = ctx.grad_weight = ctx.grad_bias = None
        return *found, None, None, None, None, None


def _sum_with_product(total: torch.Tensor | None, slopes: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """`total` and slopes.T @ inputs, in float32 whatever they are; the first product where there is no total yet."""
    if total is None:
        return (slopes.T @ inputs).float()
    if slopes.dtype == torch.float32:
        return total.addmm_(slopes.T, inputs)
    total += slopes.T @ inputs
    return total


def _filled_up(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The head's matrix in `dtype`, its rows filled up with zeros where it is copied for a GPU anyway."""
    if weight.dtype == dtype or weight.device.type != "cuda":
        return weight.to(dtype)
    missing = -weight.shape[0] % _MULTIPLE
    return F.pad(weight.to(dtype), (0, 0, 0, missing)) if missing else weight.to(dtype)


def _of_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return loss, logits.detach().argmax(dim=-1)


def loss_choice(model: PreTrainedModel) -> Choice:
    """How the loss of a model's tokens is computed, and why; by trying, so the model must have weights."""
    if open_head(model) is None:
        return Choice("cross-entropy of all logits", f"{model.config.model_type} has no plain output head")
    return Choice("head and cross-entropy in one", "logits are held for some thousand positions at a time")


def open_head(model: PreTrainedModel) -> nn.Linear | None:
    """The model's output head, if logits are nothing but its output: found by trying, once for each model."""
    if model not in _HEADS:
        _HEADS[model] = _tried(model)
    return _HEADS[model]


def _tried(model: PreTrainedModel) -> nn.Linear | None:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:  # quantized, adapted, or of the model's own making
        return None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            # Large values too: a bound (Gemma 2's tanh) is next to nothing for the small logits of an untrained model.
            largest = 1e3 if head.weight.dtype == torch.float16 else 1e4  # float16 ends at 65,504
            return head if all(_is_linear_behind(model, head, factor) for factor in (1.0, largest)) else None
    except Exception:  # an architecture that needs other inputs, or looks at the logits' shape
        return None
    finally:
        model.train(was_training)


def _is_linear_behind(model: PreTrainedModel, head: nn.Linear, factor: float) -> bool:
    """Whether what goes into the head, `factor` times, may pass through what is behind it before the head is applied.

    A scale behind the head (Granite, Cohere) does no harm, unless there is a bias that it scales as well.
    """
    ids = torch.arange(3, 6, device=head.weight.device)[None] % head.weight.shape[0]
    inputs: list[torch.Tensor] = []

    def enlarged(hidden: torch.Tensor) -> torch.Tensor:
        inputs.append(hidden * factor)
        return F.linear(inputs[-1], head.weight, head.bias)  # with DTensors, where the head is split

    with _replaced(head, enlarged):
        logits = model(input_ids=ids).logits
    with _replaced(head, lambda hidden: hidden * factor):
        hidden = model(input_ids=ids).logits
    if hidden.shape != (*ids.shape, head.weight.shape[1]) or (
        head.bias is not None and not hidden.equal(_plain(inputs[0]))
    ):
        return False
    wanted = _applied(head, hidden.to(head.weight.dtype)).to(logits.dtype)
    # A scale before the head is rounded once more than one behind it.
    relative, share = (1e-5, 1e-6) if logits.dtype == torch.float32 else (0.0, 4 * torch.finfo(logits.dtype).eps)
    return torch.allclose(wanted, logits, rtol=relative, atol=share * float(logits.abs().max()))


def _applied(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """What the head makes of `hidden`, which is the same on all processes where the head is split."""
    if isinstance(head.weight, DTensor):
        hidden = DTensor.from_local(hidden, head.weight.device_mesh, [Replicate()], run_check=False)
    return _plain(F.linear(hidden, head.weight, head.bias))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _replaced(head: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    head.forward = forward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del head.forward


def _as_it_is(hidden: torch.Tensor) -> torch.Tensor:
    return hidden
