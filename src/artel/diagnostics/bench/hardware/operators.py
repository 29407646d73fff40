"""The operators of a training step at a few sizes, each measured alone, as `planning.rates` keeps them.

The fastest of several turns counts. On a CPU that is processor time of the thread that starts the operator, which has a
share of the work like all others: another program on the machine does not lengthen it. Communication is by the clock:
a process waits for the other one, and for its own threads that communicate.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from artel.models.attention import AttentionOptions, attend
from artel.models.compile import compile_layers
from artel.models.cpu.cross_entropy import can_take, cpu_cross_entropy_with_grad
from artel.parallel.tensor.styles import Columns, Rows
from artel.planning.operations import DISPATCH, MEMORY, OperationRecorder

Measured = dict[str, list[tuple[float, float]]]

_TURNS = 20
_CALLS_ON_GPU = 10


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how long."""

    seconds: float = 0.06
    """Of each operator: as many turns as fit, from three to 20."""
    tokens: int = 2048
    widths: Sequence[int] = (64, 128, 384, 1024)
    heads: Sequence[tuple[int, int, int, int]] = ((8, 6, 256, 64), (2, 8, 1024, 64))
    """Rows, heads, length, size of each attention."""
    numbers: Sequence[int] = (786_432, 8_388_608)
    """Of a tensor: 2,048 x 384, and one that no cache holds."""
    width: int = 384
    vocabulary: int = 16_384
    messages: Sequence[int] = (2**16, 2**20, 2**24)
    """Bytes of an all-reduce."""


ON_GPU = Sizes(
    tokens=16_384,
    widths=(128, 512, 1024, 4096),
    heads=((8, 12, 1024, 64), (4, 16, 4096, 128)),
    numbers=(8_388_608, 67_108_864),
    width=1024,
    vocabulary=32_768,
    messages=(2**20, 2**24, 2**28),
)
"""What keeps a GPU busy for longer than its start takes: on an H200 the largest product of a CPU's sizes took 0.04 ms,
and showed half of the rate that PyTorch reaches there."""


def measure(device: torch.device, *, compiles: bool, sizes: Sizes | None = None) -> Measured:
    """All operators on this process's device; with several processes also the all-reduce between them."""
    sizes = sizes or (ON_GPU if device.type == "cuda" else Sizes())
    measured: Measured = defaultdict(list)
    fastest = partial(_fastest, device=device, seconds=sizes.seconds)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for width in sizes.widths:
            for layout, work, flops in _products(sizes.tokens, width, dtype, device):
                measured[f"product {name} {layout}"].append((flops, fastest(work)))
        for shape in sizes.heads:
            for direction, work, flops in _attention(shape, dtype, device):
                measured[f"attention {name} {direction}"].append((flops, fastest(work)))
    for count in sizes.numbers:
        for work in _memory_operators(count, sizes, device):
            name, size = _recorded(work)
            measured[f"memory {name}"].append((size, fastest(work)))
    if compiles:
        _measure_compiled(measured, sizes, device)
    if device.type == "cpu":
        _measure_host(measured)
    if dist.is_initialized():
        for size in sizes.messages:
            message = torch.zeros(size // 4, device=device)
            if device.type == "cuda":
                seconds = fastest(partial(dist.all_reduce, message), turns=10)
            else:
                seconds = _usual(partial(_reduced, message), time.perf_counter)
            measured["all_reduce"].append((size, seconds))
    return {key: sorted(points) for key, points in measured.items()}


def _fastest(
    work: Callable[[], object],
    device: torch.device,
    seconds: float,
    clock: Callable[[], float] = time.thread_time,
    turns: int = 0,
) -> float:
    """Seconds of the fastest of several turns, by `clock` on a CPU; `turns` fixes how many, else `seconds` do.

    On a GPU a turn is several calls in a row, as in a step, where the next operator is queued while one runs.
    """
    calls = 1
    if device.type == "cuda":
        clock, calls = time.perf_counter, _CALLS_ON_GPU
    work()
    measured: list[float] = []
    while len(measured) < (turns or 3):
        _wait(device)
        start = clock()
        for _ in range(calls):
            work()
        _wait(device)
        measured.append((clock() - start) / calls)
        turns = turns or max(3, min(_TURNS, int(seconds / max(calls * measured[0], 1e-6))))
    return min(measured)


def _usual(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds by `clock` of the turn in the middle. Before each something else fills the caches, as it does in a step:
    what waits or runs in Python takes two to four times as long then, on some turns more.
    """
    others = torch.zeros(2**24)
    measured = []
    for _ in range(_TURNS):
        others += 1
        start = clock()
        work()
        measured.append(clock() - start)
    return statistics.median(measured)


def _reduced(message: torch.Tensor) -> torch.Tensor:
    """The sum of all processes' messages, as tensor parallelism asks for it."""
    return wait_tensor(all_reduce(message, "sum", list(range(dist.get_world_size()))))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _products(
    tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], object], float]]:
    """A layer's matrix: forward as it lies or transposed, the gradient of the weight with the left one transposed."""
    inputs = torch.randn(tokens, width, device=device).to(dtype)
    weight = torch.randn(width, 4 * width, device=device).to(dtype)
    transposed = weight.T.contiguous().T
    grad_output = torch.randn(tokens, 4 * width, device=device).to(dtype)
    flops = 2.0 * tokens * width * 4 * width
    yield "nn", partial(torch.mm, inputs, weight), flops
    yield "nt", partial(torch.mm, inputs, transposed), flops
    yield "tn", partial(torch.mm, grad_output.T, inputs), flops


def _attention(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], object], float]]:
    rows, heads, length, size = shape
    query, key, value = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    options = AttentionOptions(None, causal=True, window=None, dropout=0.0, scale=None)
    flops = 2.0 * rows * heads * length * length * size  # two products on half of the square
    yield "forward", partial(attend, query, key, value, options), flops
    output = attend(query, key, value, options)
    gradient = torch.randn_like(output)
    yield (
        "backward",
        partial(torch.autograd.grad, output, (query, key, value), gradient, retain_graph=True),
        2.5 * flops,
    )


def _memory_operators(count: int, sizes: Sizes, device: torch.device) -> Iterator[Callable[[], object]]:
    """Those that take most of a step between products; each is one operator of PyTorch."""
    aten: Any = torch.ops.aten
    width, vocabulary = sizes.width, sizes.vocabulary
    x, y = torch.randn(2, count // width, width, device=device)
    half, other_half = x.bfloat16(), y.bfloat16()
    weight, bias = torch.ones(2, width, device=device)
    _, mean, scale = torch.native_layer_norm(x, [width], weight, bias, 1e-5)
    yield partial(torch.add, x, y)
    yield partial(torch.mul, half, other_half)
    yield partial(x.mul_, 1.0)
    yield partial(x.to, torch.bfloat16)
    yield partial(x.copy_, y)
    yield x.clone
    yield partial(torch.cat, (x, y))
    yield partial(torch.pow, x, 2)
    yield partial(torch.mean, x, -1, True)
    yield partial(torch.sum, half, 0)
    yield partial(torch.tanh, half)
    yield partial(aten.tanh_backward, half, other_half)
    yield partial(F.gelu, half)
    yield partial(aten.gelu_backward, half, other_half)
    yield partial(F.silu, half)
    yield partial(aten.silu_backward, half, other_half)
    yield partial(torch.native_layer_norm, x, [width], weight, bias, 1e-5)
    mask = [True, True, True]
    yield partial(aten.native_layer_norm_backward, y, x, [width], mean, scale, weight, bias, mask)
    yield partial(torch.linalg.vector_norm, x)
    ids = torch.randint(vocabulary, (count // width,), device=device)
    yield partial(aten.embedding_dense_backward, x, ids, vocabulary, -1, False)
    yield _adamw(count, device)
    logits = torch.randn(max(1, count // vocabulary), vocabulary, device=device).bfloat16()
    targets = torch.randint(vocabulary, (len(logits),), device=device)
    if can_take(device, logits.dtype):
        yield partial(cpu_cross_entropy_with_grad, logits, targets)


def _adamw(count: int, device: torch.device) -> Callable[[], object]:
    parameter = nn.Parameter(torch.randn(count, device=device))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-9, fused=True)
    optimizer.step()
    return optimizer.step


def _recorded(work: Callable[[], object]) -> tuple[str, int]:
    """The name and the bytes of the largest operation in `work`, as a trace of a step counts them."""
    with OperationRecorder(nn.Module()) as recorder:
        work()
    largest = max(recorder.operations, key=lambda operation: operation.bytes)
    assert largest.kind == MEMORY, largest
    return largest.name, largest.bytes


def _measure_host(measured: Measured) -> None:
    """The host's own time for each operator, and for each on DTensors: of layers that compute next to nothing."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(16)))
    count, seconds = _counted(layers)[0], _usual(partial(_pass, layers), time.thread_time)
    measured["start"].append((count, seconds))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers:
            parallelize_module(layer, mesh, {"0": Columns(), "2": Rows()})
        plain, dispatched = _counted(layers)
        beside = _usual(partial(_pass, layers), time.thread_time) - plain * seconds / count
        measured["dispatch"].append((dispatched, max(beside, 1e-9)))


def _pass(layers: nn.Module) -> None:
    layers(torch.ones(1, 8, requires_grad=True)).sum().backward()


def _counted(layers: nn.Module) -> tuple[int, int]:
    """Operators of a forward and backward pass: those on plain tensors, and those on DTensors."""
    _pass(layers)
    with OperationRecorder(layers) as recorder:
        _pass(layers)
    dispatched = sum(count for operation, count in recorder.operations.items() if operation.kind == DISPATCH)
    return sum(recorder.operations.values()) - dispatched, dispatched


class _Plain(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + y


class _Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


class _Layers(nn.Module):
    """What `compile_layers` asks for of a model."""

    _no_split_modules = ("_Plain", "_Gelu")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.layers = nn.ModuleList([_Plain(), _Gelu()])


def _measure_compiled(measured: Measured, sizes: Sizes, device: torch.device) -> None:
    """What the compiler makes of a chain: the time of a byte, and on top of it that of an exponential."""
    layers = _Layers(device)
    compile_layers(layers, fixed=False)
    plain, gelu = layers.layers
    with torch.no_grad():
        for count in sizes.numbers:
            x, y = torch.randn(2, count, device=device).bfloat16()
            seconds = _fastest(partial(plain, x, y), device, sizes.seconds)
            measured["fused"].append((6 * count, seconds))
            with_exponentials = _fastest(partial(gelu, x), device, sizes.seconds) - seconds * 4 / 6
            measured["exponentials"].append((count, max(with_exponentials, 1e-9)))
