"""Two training steps of one rank of a run, traced without memory: the model, the strategy and the optimizer of the run.

The tensors are FakeTensors and the process group is PyTorch's `fake` one, whose collectives do nothing. All else is
the code that trains: `plan_parallelism`, the strategy's `run`, the objective's loss, the optimizer's step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.models import loss
from artel.models.activation_checkpointing import Recompute, recompute
from artel.models.attention_switch import use_artel_attention
from artel.models.experts import compute_experts_in_autocast
from artel.models.output_head import trust_output_head
from artel.models.quantization import scales, set_compute_precision, shrink_weights
from artel.objectives import Batch, Objective
from artel.parallel import ParallelStrategy, World, plan_parallelism
from artel.parallel.tensor_styles import clear_mesh_caches
from artel.planning.operations import Operation, OperationRecorder
from artel.planning.plan.compiled_kernels import KernelShapes
from artel.planning.plan.compiled_layers import save_as_compiled
from artel.planning.plan.cuda_autocast import cuda_autocast
from artel.planning.plan.known_values import remember_values
from artel.planning.plan.live_bytes import COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS, LiveBytes, bytes_by_kind
from artel.training.optim.optimizer import Optimizer

_STEPS = 2  # the first makes the optimizer's state


@dataclass(slots=True)
class Trace:
    """What lived when."""

    live: LiveBytes
    begin: int = 0
    """The event at which the first step begins; before it are the weights."""
    phases: list[tuple[int, int]] = field(default_factory=list)
    """Events of each: the forward and backward passes and the optimizer's step, of each step."""
    kept_bytes: int = 0
    """Of the trained weights and the optimizer's state: what a checkpoint holds of this rank."""
    passes: dict[Operation, int] = field(default_factory=dict)
    """What the forward and backward passes of a step do, and how often."""
    stepping: dict[Operation, int] = field(default_factory=dict)
    """What the optimizer's step does."""


def trace_steps(
    run: RunConfig,
    model: PreTrainedModel,
    objective: Objective,
    batches: list[Batch],
    world: World,
    how: Recompute,
    precision: str,
    *,
    usual: Batch | None = None,
    on_gpu: bool = False,
    compiled: bool = False,
) -> Trace:
    """Trace the steps on the rank of `world`. `model`, on the meta device, is used up.

    `batches` are the micro-batches that hold the most. The operations are those of `usual` in the place of each, if it
    is given: rows are not always as long.
    `on_gpu`: logits are held in chunks as large as on a GPU, its autocast is imitated, and where nothing is computed
    again so is what compiled layers keep. The operators are those of a CPU all the same.
    """
    live = LiveBytes(on_cpu=not on_gpu, compiled=on_gpu and compiled)
    trace = Trace(live)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    use_artel_attention(model, encoders=run.parallel.context > 1)
    compute_experts_in_autocast(model)
    trust_output_head(model)
    model.train()
    set_compute_precision(model, precision)
    with fake:
        _give_memory(model, world.device)
    with fake_process_group(world):
        # Without the mode: a mesh is of real tensors, and what becomes of fake ones is fake.
        with _ddp_buckets(fake, live):
            strategy = _parallelized(run, model, objective, world, precision)
        targets = float(sum(batch.targets for batch in batches) * world.size)
        longest = _local_parts(strategy, batches, fake)
        timed = longest if usual is None else _local_parts(strategy, [usual] * len(batches), fake)
        gc.collect()  # whole weights that are sharded now
        recompute(model, how)
        if on_gpu and compiled and how == "none":
            save_as_compiled(model, live.never_written)
        with fake, live, loss.use_chunk_size_of("cuda" if on_gpu else "cpu"), _autocast_of(on_gpu):
            live.name(model.parameters(), WEIGHTS)
            live.name(model.buffers(), COMMUNICATION)
            live.name(scales(model), WEIGHTS)  # buffers, where the weights are sharded
            optimizer = Optimizer(model, run.train, run.seed, None, precision)
            trace.begin = len(live.events)
            for _ in range(_STEPS):
                _step(strategy, optimizer, longest, targets, trace)
            _record_operations(strategy, optimizer, timed, targets, trace, compiled=compiled, on_gpu=on_gpu)
    after = bytes_by_kind(live.events, len(live.events) - 1)
    trace.kept_bytes = _trained_bytes(strategy.model) + after[OPTIMIZER]
    return trace


def _autocast_of(on_gpu: bool) -> AbstractContextManager[object]:
    return cuda_autocast() if on_gpu else nullcontext()


def _trained_bytes(model: PreTrainedModel) -> int:
    """Of this rank's parts of the parameters that are trained."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return sum(getattr(parameter, "_local_tensor", parameter).nbytes for parameter in trained)


def _step(
    strategy: ParallelStrategy,
    optimizer: Optimizer,
    batches: list[Batch],
    targets: float,
    trace: Trace,
) -> None:
    live, begin = trace.live, len(trace.live.events)
    strategy.run(batches, targets, optimizer.loss_factor)
    live.name((parameter.grad for parameter in strategy.model.parameters()), GRADIENTS)
    middle = len(live.events)
    optimizer.clip_and_step(1.0, strategy.norm())
    state = [tensor for tensor in optimizer.state().values() if tensor.ndim]
    live.name(state, OPTIMIZER)
    live.keep_only(state, OPTIMIZER)
    trace.phases += [(begin, middle), (middle, len(live.events))]


def _record_operations(
    strategy: ParallelStrategy,
    optimizer: Optimizer,
    batches: list[Batch],
    targets: float,
    trace: Trace,
    *,
    compiled: bool,
    on_gpu: bool,
) -> None:
    """One more step, of which the operations count; neither its bytes (the recorder's hooks hold tensors) nor its
    kernels, which are of other micro-batches.
    """
    end, kernels = len(trace.live.events), trace.live.kernels
    trace.live.kernels = KernelShapes()
    with OperationRecorder(strategy.model, compiled=compiled, on_gpu=on_gpu) as passes:
        strategy.run(batches, targets, optimizer.loss_factor)
    with OperationRecorder(strategy.model, on_gpu=on_gpu) as stepping:
        optimizer.clip_and_step(1.0, strategy.norm())
    trace.passes, trace.stepping = passes.operations, stepping.operations
    del trace.live.events[end:]
    trace.live.kernels = kernels


def _parallelized(
    run: RunConfig, model: PreTrainedModel, objective: Objective, world: World, precision: str
) -> ParallelStrategy:
    plan = plan_parallelism(run, world.size, world.on_host)
    model.to = lambda *_, **__: model
    strategy = plan.parallelize(model, objective, world, precision, load_weights=None, tell=lambda _: None)
    del model.to
    strategy.skip_collectives()
    return strategy


@contextmanager
def _ddp_buckets(fake: FakeTensorMode, live: LiveBytes) -> Iterator[None]:
    """Within the block DistributedDataParallel makes fake buckets, which are counted."""
    reducer = dist.Reducer  # type: ignore[attr-defined]

    def make(*arguments: Any) -> Any:
        with fake, live:
            return reducer(*arguments)

    dist.Reducer = make  # type: ignore[attr-defined,assignment]
    try:
        yield
    finally:
        dist.Reducer = reducer  # type: ignore[attr-defined]


def _give_memory(model: PreTrainedModel, device: torch.device) -> None:
    """Put what is on the meta device on `device`; ties stay."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old: an id is given again

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            moved[id(tensor)] = tensor, new
        return moved[id(tensor)][1]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: move(tensor) for name, tensor in tensors.items() if tensor is not None})
    if getattr(model, "is_quantized", False):
        shrink_weights(model, device)


def _local_parts(strategy: ParallelStrategy, batches: list[Batch], fake: FakeTensorMode) -> list[Batch]:
    """This rank's parts of micro-batches. The strategy looks at their values to split sequences."""
    return [
        replace(
            part,
            tensors={name: remember_values(fake.from_tensor(tensor), tensor) for name, tensor in part.tensors.items()},
        )
        for part in strategy.shard_batches(batches)
    ]


@contextmanager
def fake_process_group(world: World) -> Iterator[None]:
    """A process group of that size, which may be 1, of which only this process is there.

    What DTensor's operators and tensor parallelism remember of its meshes goes with it: a rank traced later would be
    given the groups of one traced earlier.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        clear_mesh_caches()
