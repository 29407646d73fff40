"""Measures the operators of a training step one at a time at a few sizes, in the format of `planning.rates`.

On a CPU the median wall time counts, because a run waits for its threads and has slow calls too. Other memory is
written before each call, so that caches are cold, as in a step. Each operator is measured in two rounds some seconds
apart, because the speed of a shared host varies. On a GPU the fastest of several sequences of calls counts: the next
operator is queued while one runs.
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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from artel.models.attention import AttentionOptions, attend
from artel.models.compile import compile_layers
from artel.models.cross_entropy import row_function
from artel.models.cross_entropy_rows import Rows, torch_rows
from artel.models.device import autocast_dtype, pick_precision
from artel.parallel.tensor_styles import ColumnParallel, RowParallel
from artel.planning.operations import DISPATCH, MEMORY, Operation, OperationRecorder
from artel.planning.rates import Rates, rate_key

Call = Callable[[], object]
MeasuredPoints = dict[str, list[tuple[float, float]]]

_ROUNDS = 2
_MIN_CALLS, _MAX_CALLS = 3, 10
"""Calls per round on a CPU."""
_MAX_ROUND_SECONDS = 2.0
"""Seconds of a first round above which the second is skipped, as with emulated bf16."""
_MAX_SEQUENCES_ON_GPU, _SYNCHRONIZED_SEQUENCES_ON_GPU, _CALLS_ON_GPU = 20, 10, 10
"""Sequences on a GPU: the maximum, the number if all processes must run equally many, and calls per sequence."""
_BARRIERS, _BARRIER_SECONDS = 30, 5.0
"""Maximum number of synchronizations of processes, and of seconds for them."""
_MATMULS_BETWEEN_BARRIERS = (1, 8)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes to measure, and the time for it."""

    seconds: float = 0.06
    """Time per operator, on a CPU per round: as many calls as fit."""
    matmuls: Sequence[tuple[int, int, int]] = (
        (32, 64, 64),
        (256, 384, 16),
        (2048, 384, 16),
        (2048, 64, 256),
        (2048, 128, 512),
        (2048, 384, 1536),
        (2048, 1024, 4096),
    )
    """Tokens, inputs and outputs of each layer. The first one is pure overhead, the next two are those of LoRA
    adapters."""
    heads: Sequence[tuple[int, int, int, int]] = ((1, 8, 64, 64), (8, 6, 256, 64), (2, 8, 1024, 64))
    """Rows, heads, length, head size of each attention."""
    elements: Sequence[int] = (786_432, 8_388_608)
    """Elements of a tensor: 2,048 x 384, and one larger than any cache."""
    width: int = 384
    vocabulary: int = 16_384
    messages: Sequence[int] = (2**16, 2**20, 2**24)
    """Bytes to reduce or gather."""
    cache_elements: int = 2**23
    """Elements in float32 written between two calls, the size of an L3 cache."""


ON_GPU = Sizes(
    matmuls=((16_384, 128, 512), (16_384, 512, 2048), (16_384, 1024, 4096), (16_384, 4096, 16_384)),
    heads=((8, 12, 1024, 64), (4, 16, 4096, 128)),
    elements=(8_388_608, 67_108_864),
    width=1024,
    vocabulary=32_768,
    messages=(2**20, 2**24, 2**28),
)
"""Sizes for GPUs, where an operator must take longer than its launch: on an H200 the largest matmul of the CPU sizes
took 0.04 ms, and showed half of the rate that PyTorch reaches there."""


@dataclass(frozen=True, slots=True)
class Work:
    """One or more operators to measure."""

    key: str
    size: float
    """FLOPs, bytes or a count, as in `Rates`."""
    run: Call
    subtracted: tuple[str, float] | None = None
    """Key and size of work that it includes, measured earlier. Its seconds are subtracted."""
    is_synchronized: bool = False
    """True if all processes must run it equally often, because it waits for the others."""


def measure(device: torch.device, *, can_compile: bool, sizes: Sizes | None = None) -> MeasuredPoints:
    """Measure all operators on this process's device; with several processes also collectives."""
    sizes = sizes or (ON_GPU if device.type == "cuda" else Sizes())
    works = _list_works(device, sizes, can_compile)
    timings = _time_on_gpu(works, device, sizes) if device.type == "cuda" else _time_on_cpu(list(works), sizes)
    measured: MeasuredPoints = defaultdict(list)
    for work, seconds in timings:
        if work.subtracted is not None:
            seconds -= Rates(1, measured).seconds(*work.subtracted)
        measured[work.key] = sorted([*measured[work.key], (work.size, max(seconds, 1e-9))])
    if device.type == "cpu" and dist.is_initialized():
        measured["waiting"] = [_measure_waiting(matmuls, sizes) for matmuls in _MATMULS_BETWEEN_BARRIERS]
    return dict(measured)


def _time_on_cpu(works: Sequence[Work], sizes: Sizes) -> Iterator[tuple[Work, float]]:
    """Yield each work with its median wall seconds."""
    cache_filler = torch.zeros(sizes.cache_elements)
    rounds: list[list[float]] = [[] for _ in works]
    for _ in range(_ROUNDS):
        for work, times in zip(works, rounds, strict=True):
            if sum(times) > _MAX_ROUND_SECONDS and not work.is_synchronized:
                continue
            work.run()
            end = time.perf_counter() + sizes.seconds
            for num_calls in range(_MAX_CALLS):
                if num_calls >= _MIN_CALLS and time.perf_counter() >= end and not work.is_synchronized:
                    break
                cache_filler += 1
                times.append(_time_call(work.run))
    yield from zip(works, map(statistics.median, rounds), strict=True)


def _time_on_gpu(works: Iterator[Work], device: torch.device, sizes: Sizes) -> Iterator[tuple[Work, float]]:
    """Yield each work with its seconds per call, from the fastest sequence of calls."""

    def call_repeatedly(run: Call) -> None:
        for _ in range(_CALLS_ON_GPU):
            run()
        torch.cuda.synchronize(device)

    for work in works:
        work.run()
        torch.cuda.synchronize(device)
        times = [_time_call(partial(call_repeatedly, work.run))]
        num_fitting = max(_MIN_CALLS, min(_MAX_SEQUENCES_ON_GPU, int(sizes.seconds / max(times[0], 1e-6))))
        num_sequences = _SYNCHRONIZED_SEQUENCES_ON_GPU if work.is_synchronized else num_fitting
        times += [_time_call(partial(call_repeatedly, work.run)) for _ in range(num_sequences - 1)]
        yield work, min(times) / _CALLS_ON_GPU


def _time_call(run: Call) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _list_works(device: torch.device, sizes: Sizes, can_compile: bool) -> Iterator[Work]:
    for dtype in (torch.bfloat16, torch.float32):
        for layer in sizes.matmuls:
            for run in _list_matmuls(layer, dtype, device):
                yield _record_work(run)
        for shape in sizes.heads:
            for run in _list_attention(shape, dtype, device):
                yield _record_work(run)
    for num_elements in sizes.elements:
        for run in _list_memory_operators(num_elements, sizes, device):
            yield _record_work(run)
    if can_compile:
        yield from _list_compiled_works(sizes, device)
    if device.type == "cpu":
        yield from _list_host_works()
    if dist.is_initialized():
        reduce = dist.all_reduce if device.type == "cuda" else _all_reduce
        collective = partial(Work, is_synchronized=True)
        for size in sizes.messages:
            shard = torch.zeros(size // 4 // dist.get_world_size(), device=device)
            full = shard.repeat(dist.get_world_size())
            yield collective("all_reduce", full.nbytes, partial(reduce, full))
            yield collective("all_gather", full.nbytes, partial(dist.all_gather_into_tensor, full, shard))
            yield collective("reduce_scatter", full.nbytes, partial(dist.reduce_scatter_tensor, shard, full))


def _record_work(run: Call) -> Work:
    """Return the work under the key and size of its largest operation, as recorded in a trace."""
    with OperationRecorder(nn.Module()) as recorder:
        run()
    largest: Operation = max(recorder.operations, key=lambda operation: (operation.flops, operation.bytes))
    return Work(rate_key(largest), largest.bytes if largest.kind == MEMORY else largest.flops, run)


def _list_matmuls(layer: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Iterator[Call]:
    """Yield a layer's matmuls: forward with a plain or transposed weight, and the gradient of the weight."""
    tokens, width, out_width = layer
    inputs = torch.randn(tokens, width, device=device).to(dtype)
    weight = torch.randn(width, out_width, device=device).to(dtype)
    transposed = weight.T.contiguous().T
    grad_output = torch.randn(tokens, out_width, device=device).to(dtype)
    yield partial(torch.mm, inputs, weight)
    yield partial(torch.mm, inputs, transposed)
    yield partial(torch.mm, grad_output.T, inputs)


def _list_attention(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[Call]:
    """Yield artel's attention forward and backward, and PyTorch's backward pass, which replaces it in some cases."""
    query, key, value = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    options = AttentionOptions(None, causal=True, window=None, dropout=0.0, scale=None)
    yield partial(attend, query, key, value, options)
    outputs = [attend(query, key, value, options)]
    if device.type == "cpu" and dtype == torch.bfloat16:
        outputs.append(F.scaled_dot_product_attention(query, key, value, is_causal=True))
    for output in outputs:
        yield partial(torch.autograd.grad, output, (query, key, value), torch.randn_like(output), retain_graph=True)


def _list_memory_operators(num_elements: int, sizes: Sizes, device: torch.device) -> Iterator[Call]:
    """Yield the operators that take most of the time between matmuls. Each is one operator of PyTorch."""
    aten: Any = torch.ops.aten
    width, vocabulary = sizes.width, sizes.vocabulary
    x, y = torch.randn(2, num_elements // width, width, device=device)
    half, other_half = x.bfloat16(), y.bfloat16()
    weight, bias = torch.ones(2, width, device=device)
    _, mean, scale = torch.native_layer_norm(x, [width], weight, bias, 1e-5)
    for left, right in ((x, y), (half, other_half)):
        yield partial(torch.add, left, right)
        yield partial(torch.mul, left, right)
        yield partial(left.add_, right)
        yield partial(torch.cat, (left, right), -1)
        yield partial(torch.sum, left, 0)
        for forward, backward in (
            (torch.tanh, aten.tanh_backward),
            (F.gelu, aten.gelu_backward),
            (F.silu, aten.silu_backward),
        ):
            yield partial(forward, left)
            yield partial(backward, left, right)
        yield left.unflatten(-1, (-1, 64)).transpose(0, 1).contiguous  # heads of 64
    yield partial(x.mul_, 1.0)
    yield partial(x.to, torch.bfloat16)
    yield partial(x.copy_, y)
    yield partial(torch.pow, x, 2)
    yield partial(torch.mean, x, -1, True)
    yield partial(torch.native_layer_norm, x, [width], weight, bias, 1e-5)
    mask = [True, True, True]
    yield partial(aten.native_layer_norm_backward, y, x, [width], mean, scale, weight, bias, mask)
    yield partial(torch.linalg.vector_norm, x)
    rows = torch.randperm(len(x), device=device)
    yield partial(torch.index_put, half, (rows,), other_half, accumulate=True)
    ids = torch.randint(vocabulary, (len(x),), device=device)
    yield partial(aten.embedding_dense_backward, x, ids, vocabulary, -1, False)
    yield _make_adamw_step(num_elements, device)
    logits = torch.randn(max(1, num_elements // vocabulary), vocabulary, device=device).bfloat16()
    targets = torch.randint(vocabulary, (len(logits),), device=device)
    results = torch.empty(4, len(logits), device=device), torch.empty_like(targets)
    logit_rows = Rows(logits, targets, None, *results, columns=vocabulary, first_id=0, num_ids=vocabulary, soft_cap=0.0)
    compute = row_function(device.type, logits.dtype)
    if compute is not torch_rows:  # which is not a single operator
        yield partial(compute, logit_rows, with_statistics=True, with_grad=True)


def _make_adamw_step(num_elements: int, device: torch.device) -> Call:
    parameter = nn.Parameter(torch.randn(num_elements, device=device))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-9, fused=True)
    optimizer.step()
    return optimizer.step


def _list_host_works() -> Iterator[Work]:
    """Yield the host's overhead per operator, and per operator on DTensors, from layers that compute next to nothing.

    The first is measured on a transformers model. It includes modules, autograd and autocast, which take as long as
    the operators themselves.
    """
    model = _small_model()
    step = partial(_train_step, dtype=autocast_dtype(pick_precision("auto", torch.device("cpu"))))
    yield Work("start", _count_operators(model, step)[0], partial(step, model))
    if dist.is_initialized():
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(16)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers:
            parallelize_module(layer, mesh, {"0": ColumnParallel(), "2": RowParallel()})
        started, dispatched = _count_operators(layers, _forward_backward)
        run = partial(_forward_backward, layers)
        yield Work("dispatch", dispatched, run, subtracted=("start", started), is_synchronized=True)


def _small_model() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 16}
    config = AutoConfig.for_model("llama", num_hidden_layers=4, **sizes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.train()


def _train_step(model: nn.Module, dtype: torch.dtype | None) -> None:
    ids = torch.zeros(1, 8, dtype=torch.long)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(ids, use_cache=False).logits
    logits.float().sum().backward()
    model.zero_grad()


def _forward_backward(layers: nn.Module) -> None:
    layers(torch.ones(1, 8, requires_grad=True)).sum().backward()


def _count_operators(model: nn.Module, run: Callable[[nn.Module], None]) -> tuple[int, int]:
    """Count the operators of a forward and backward pass: on plain tensors, and on DTensors."""
    run(model)
    with OperationRecorder(model) as recorder:
        run(model)
    dispatched = sum(count for operation, count in recorder.operations.items() if operation.kind == DISPATCH)
    return sum(recorder.operations.values()) - dispatched, dispatched


def _all_reduce(message: torch.Tensor) -> torch.Tensor:
    """Return the sum of all processes' messages, by the same call as tensor parallelism."""
    return wait_tensor(all_reduce(message, "sum", list(range(dist.get_world_size()))))


def _measure_waiting(matmuls: int, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds that processes compute between two collectives, and the mean seconds of waiting in them.

    The time of the collective itself is subtracted from the waiting.
    """
    tokens, width, _ = sizes.matmuls[-1]
    dtype = autocast_dtype(pick_precision("auto", torch.device("cpu"))) or torch.float32
    left, right = torch.ones(2, tokens, width, dtype=dtype)
    message = torch.zeros(1)
    exchange_seconds = statistics.median([_time_call(partial(_all_reduce, message)) for _ in range(_BARRIERS)])
    compute = partial(torch.mm, left.T, right)
    seconds = float(_all_reduce(torch.tensor([_time_call(compute)]))) / dist.get_world_size()  # the same on all
    num_barriers = max(2, min(_BARRIERS, int(_BARRIER_SECONDS / (matmuls * seconds))))
    compute_seconds, wait_seconds = 0.0, 0.0
    for _ in range(num_barriers):
        _all_reduce(message)
        compute_seconds += sum(_time_call(compute) for _ in range(matmuls))
        wait_seconds += _time_call(partial(_all_reduce, message))
    return compute_seconds / num_barriers, max(wait_seconds / num_barriers - exchange_seconds, 1e-9)


class _ElementwiseLayer(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + y


class _Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


class _Layers(nn.Module):
    """A model that `compile_layers` accepts."""

    _no_split_modules = ("_Plain", "_Gelu")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.layers = nn.ModuleList([_ElementwiseLayer(), _Gelu()])


def _list_compiled_works(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Yield fused chains: the time per byte, and the additional time per exponential."""
    layers = _Layers(device)
    compile_layers(layers, fixed=False)
    plain, gelu = layers.layers
    for length in sizes.elements:
        x, y = torch.randn(2, length, device=device).bfloat16()
        yield Work("fused", 6 * length, torch.no_grad()(partial(plain, x, y)))
        yield Work("exponentials", length, torch.no_grad()(partial(gelu, x)), subtracted=("fused", 4 * length))
