"""Trace two training steps of one rank without memory, with the run's own model, strategy and optimizer.

The tensors are FakeTensors, and the process group is PyTorch's `fake` one, whose collectives do nothing. All other code
is training's own: `plan_parallelism`, the strategy's `run`, the objective's loss, the optimizer's step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.generation.base import BATCH_TOKENS
from artel.messages import silence_messages
from artel.models import loss
from artel.models.activation_checkpointing import Recompute, recompute
from artel.models.attention_switch import use_artel_attention
from artel.models.experts import compute_experts_in_autocast
from artel.models.output_head import trust_output_head
from artel.models.quantization import quantization_scales, set_compute_precision, shrink_weights
from artel.objectives import Batch, Objective
from artel.parallel import ParallelStrategy, World, plan_parallelism
from artel.parallel.tensor_styles import clear_mesh_caches
from artel.planning.operations import Operation, OperationRecorder
from artel.planning.plan.float8_trace import multiply_in_float8
from artel.planning.plan.gpu_trace import cuda_autocast, save_as_compiled
from artel.planning.plan.live_bytes import (
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    LiveBytes,
    bytes_by_kind,
    remember_values,
)
from artel.training.optim.optimizer import Optimizer

_NUM_STEPS = 2  # the first one creates the optimizer's state


@dataclass(slots=True)
class Trace:
    """The memory events of two steps, and the operations of a third."""

    live: LiveBytes
    phases: list[tuple[int, int]] = field(default_factory=list)
    """Event ranges of each step: the forward and backward passes, then the optimizer's step."""
    checkpoint_bytes: int = 0
    """Trained weights and optimizer state: this rank's shard of a checkpoint."""
    passes: dict[Operation, int] = field(default_factory=dict)
    """Operations of a step's forward and backward passes, with how often each runs."""
    optimizer_operations: dict[Operation, int] = field(default_factory=dict)
    """Operations of the optimizer's step."""
    reading: dict[str, int] = field(default_factory=dict)
    """With rounds: bytes by kind at the peak of a forward pass that reads prompts, between two steps."""
    writing_operations: dict[Operation, int] = field(default_factory=dict)
    """With rounds: operations of a forward pass that writes a token of each answer."""


def trace_steps(
    config: RunConfig,
    model: PreTrainedModel,
    objective: Objective,
    batches: list[Batch],
    world: World,
    mode: Recompute,
    precision: str,
    *,
    average_batch: Batch | None = None,
    on_gpu: bool = False,
    compiled: bool = False,
    concurrent_answers: int = 0,
    autocasts: bool = True,
) -> Trace:
    """Trace the steps on the rank of `world`. Consumes `model`, which is on the meta device.

    `batches` are the largest micro-batches, and determine the memory. If `average_batch` is set, it determines the
    operations, because most rows are shorter.
    `on_gpu`: imitate a GPU, with its chunks of logits, its autocast, and what compiled layers save if nothing is
    recomputed. The operators are still a CPU's. `concurrent_answers`: answers that the model writes at a time, if it
    learns in rounds. `autocasts`: False if the weights themselves are in `precision`, as DeepSpeed holds them.
    """
    live = LiveBytes(compiled=on_gpu and compiled)
    trace = Trace(live)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    use_artel_attention(model, encoders=config.parallel.context > 1)
    compute_experts_in_autocast(model)
    trust_output_head(model)
    model.train()
    set_compute_precision(model, precision)
    with fake:
        _materialize(model, world.device)
    with fake_process_group(world):
        # Outside of the mode: a mesh has real tensors.
        with _ddp_buckets(fake, live):
            strategy = _parallelize(config, model, objective, world, precision)
        if not autocasts:
            strategy.disable_autocast()
        targets = float(sum(batch.targets for batch in batches) * world.size)
        largest_batches = _local_shards(strategy, batches, fake)
        average_batches = (
            largest_batches if average_batch is None else _local_shards(strategy, [average_batch] * len(batches), fake)
        )
        gc.collect()  # full weights that are sharded now
        if precision == "fp8":
            multiply_in_float8(model)
        recompute(model, mode)
        if on_gpu and compiled and mode == "none":
            save_as_compiled(model, live.ignore_bytes)
        with (
            fake,
            live,
            loss.imitate_device("cuda" if on_gpu else "cpu"),
            cuda_autocast() if on_gpu and autocasts else nullcontext(),
        ):
            live.set_kind(model.parameters(), WEIGHTS)
            live.set_kind(model.buffers(), COMMUNICATION)
            live.set_kind(quantization_scales(model), WEIGHTS)  # buffers if the weights are sharded
            optimizer = Optimizer(model, config.train, config.seed, None, precision)
            for _ in range(_NUM_STEPS):
                _step(strategy, optimizer, largest_batches, targets, trace)
            _record_operations(strategy, optimizer, average_batches, targets, trace, compiled=compiled, on_gpu=on_gpu)
            if concurrent_answers and strategy.holds_full_model:
                _trace_writing(strategy, trace, fake, concurrent_answers, on_gpu=on_gpu)
    final_bytes = bytes_by_kind(live.events, len(live.events) - 1)
    trained = (parameter for parameter in strategy.model.parameters() if parameter.requires_grad)
    shards = (getattr(parameter, "_local_tensor", parameter) for parameter in trained)
    trace.checkpoint_bytes = sum(shard.nbytes for shard in shards) + final_bytes[OPTIMIZER]
    return trace


def _step(strategy: ParallelStrategy, optimizer: Optimizer, batches: list[Batch], targets: float, trace: Trace) -> None:
    live = trace.live
    start = len(live.events)
    strategy.run(batches, targets, optimizer.loss_factor)
    live.set_kind((parameter.grad for parameter in strategy.model.parameters()), GRADIENTS)
    optimizer_start = len(live.events)
    optimizer.clip_and_step(1.0, strategy.gradient_norm())
    state = [tensor for tensor in optimizer.state().values() if tensor.ndim]
    live.set_kind(state, OPTIMIZER)
    live.keep_only(state, OPTIMIZER)
    trace.phases += [(start, optimizer_start), (optimizer_start, len(live.events))]


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
    """Run one more step to record its operations. Discard its events: the recorder's hooks hold tensors."""
    end = len(trace.live.events)
    with OperationRecorder(strategy.model, compiled=compiled, on_gpu=on_gpu) as passes:
        strategy.run(batches, targets, optimizer.loss_factor)
    with OperationRecorder(strategy.model, on_gpu=on_gpu) as optimizer_recorder:
        optimizer.clip_and_step(1.0, strategy.gradient_norm())
    trace.passes, trace.optimizer_operations = passes.operations, optimizer_recorder.operations
    del trace.live.events[end:]


def _trace_writing(
    strategy: ParallelStrategy, trace: Trace, fake: FakeTensorMode, answers: int, *, on_gpu: bool
) -> None:
    """Trace a pass that reads prompts, for its memory, and one that writes, for its operations."""
    live, model = trace.live, strategy.model
    end = len(live.events)
    selection = {"logits_to_keep": answers} if "logits_to_keep" in signature(type(model).forward).parameters else {}

    def compute(tokens: int) -> None:
        model(input_ids=fake.from_tensor(torch.zeros(1, tokens, dtype=torch.long)), use_cache=False, **selection)

    model.eval()
    with torch.no_grad():
        compute(BATCH_TOKENS)
        trace.reading = bytes_by_kind(live.events, end)
        with OperationRecorder(model, on_gpu=on_gpu) as recorder:
            compute(answers)
    model.train()
    trace.writing_operations = recorder.operations
    del live.events[end:]


@silence_messages()
def _parallelize(
    config: RunConfig, model: PreTrainedModel, objective: Objective, world: World, precision: str
) -> ParallelStrategy:
    plan = plan_parallelism(config, world.size, world.on_host)
    model.to = lambda *_, **__: model
    strategy = plan.parallelize(model, objective, world, precision, load_weights=None)
    del model.to
    strategy.skip_collectives()
    return strategy


@contextmanager
def _ddp_buckets(fake: FakeTensorMode, live: LiveBytes) -> Iterator[None]:
    """Make DistributedDataParallel allocate fake buckets inside the block, and count them."""
    reducer = dist.Reducer  # type: ignore[attr-defined]

    def create_reducer(*arguments: Any) -> Any:
        with fake, live:
            return reducer(*arguments)

    dist.Reducer = create_reducer  # type: ignore[attr-defined,assignment]
    try:
        yield
    finally:
        dist.Reducer = reducer  # type: ignore[attr-defined]


def _materialize(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate parameters and buffers on `device` in place of the meta device. Tied weights stay tied."""
    # Keeps the old tensors alive, so their ids stay unique.
    replacements: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replacements:
            allocated = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                allocated = nn.Parameter(allocated, tensor.requires_grad)
            replacements[id(tensor)] = tensor, allocated
        return replacements[id(tensor)][1]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: allocate(tensor) for name, tensor in tensors.items() if tensor is not None})
    if getattr(model, "is_quantized", False):
        shrink_weights(model, device)


def _local_shards(strategy: ParallelStrategy, batches: list[Batch], fake: FakeTensorMode) -> list[Batch]:
    """Return this rank's shards of micro-batches. The strategy reads their values to split sequences."""
    return [
        replace(
            shard,
            tensors={name: remember_values(fake.from_tensor(tensor), tensor) for name, tensor in shard.tensors.items()},
        )
        for shard in strategy.shard_batches(batches)
    ]


@contextmanager
def fake_process_group(world: World) -> Iterator[None]:
    """Open a fake process group of `world.size` ranks (also 1). Only this process exists.

    On exit, clear the meshes cached by DTensor and tensor parallelism: otherwise a rank traced later would get the
    groups of an earlier rank.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        clear_mesh_caches()
