"""Pipeline parallelism: processes hold different layers and work on different micro-batches at the same time.

Processes send only hidden states and their gradients. All processes of a pipeline get the same micro-batches, and every
stage reads its inputs from its own copy. Micro-batches of a step may differ in shape. Hidden states are padded to the
largest shape while they are sent.

The schedules are PyTorch's: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, "PipeDream"), interleaved 1F1B
(Narayanan et al. 2021, "Megatron-LM"), zero bubble (Qi et al. 2023, ZB1P). Sequential is GPipe with one micro-batch at
a time. Zero bubble splits the backward pass of a stage, unless that would do work twice. It would in the last stage,
whose loss computes all its gradients at once, and in layers that are compiled or recompute their activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from artel.models.forward_pass import forget_failed_pass, profiler_range
from artel.models.half_base import hidden_dtype
from artel.models.router_aux_loss import attach_loss, get_router_aux_loss
from artel.objectives import Batch, Objective
from artel.parallel.base import Strategy, local_shard, sharded_norm
from artel.parallel.mesh import ParallelDims
from artel.parallel.pipeline_stages import Stage, Task, stage_count
from artel.parallel.process_group import World

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "sequential": ScheduleGPipe,
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PipelineParallel(Strategy):
    """Each process holds one stage of the model, or two. `model` holds the parameters of its stages.

    `stages`: from `split_into_stages` for this process's rank in the pipeline, in order, on its device. If processes
    share the batch, each stage has been through fully_shard (layer by layer, then the Stage itself), set to sum
    gradients instead of averaging them. `mesh`: dimension `pipeline` of the full mesh.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stages: list[Stage],
        objective: Objective,
        world: World,
        precision: str,
        dims: ParallelDims,
        mesh: DeviceMesh,
        schedule: str,
    ) -> None:
        super().__init__(model, objective, world, precision, dims)
        self._stages = stages
        self._schedule = schedule
        self._group = mesh.get_group()
        self._num_stages = stage_count(dims.pipeline, schedule)
        self._sent_states: list[tuple[torch.dtype, int]] = []
        """(dtype, width) of the hidden states that each stage sends."""
        self._engines: dict[bool, tuple[Any, int, tuple[int, int]]] = {}
        """Newest PyTorch schedule for training (True) and evaluation (False), with its number of micro-batches and
        shape."""
        self._scale: torch.Tensor | float = 1.0
        self._num_counted = 0
        self._sums = torch.zeros(0)

    @property
    def holds_full_model(self) -> bool:
        return False

    @property
    def stages(self) -> int:
        return self.dims.pipeline

    @property
    def can_run_full_model(self) -> bool:
        return False

    @property
    def can_generate(self) -> bool:
        return False

    def forget_failed_pass(self) -> None:
        forget_failed_pass(self.model, self._stages)

    def run(self, batches: list[Batch], targets: float, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        self._scale = self._loss_multiplier(targets) * (1.0 if loss_scale is None else loss_scale)
        # Otherwise all stages would draw the same dropout masks.
        torch.manual_seed(torch.initial_seed() + self._stages[0].index)
        if self._objective.needs_global_statistics:
            self._objective.set_global_statistics(self._global_statistics(batches))
        self._sums = torch.zeros(len(self._objective.sums), device=self._world.device)
        batches = [self._local_batch(batch) for batch in batches]
        # One schedule for the full step: if weights are sharded, the first run of a new one drops the gradients.
        shape = _max_shape(batches)
        chunk_size = 1 if self._schedule == "sequential" else len(batches)
        for start in range(0, len(batches), chunk_size):
            self._train_on(batches[start : start + chunk_size], shape)
        self._sum_shared_gradients()
        return self._count_once(self._sums)

    def probe_memory(self, batch: Batch) -> None:
        """Run as many micro-batches as this process holds at a time with 1F1B. GPipe may hold more."""
        self._measure_hidden_states()
        batch = self._local_batch(batch)
        device = self._world.device
        self._scale = 1.0
        self._sums = torch.zeros(len(self._objective.sums), device=device)
        outputs = []
        for stage in self._stages:
            stage.padded_shape = None
            for _ in range(1 if self._schedule == "sequential" else self._num_stages - stage.index):
                stage.tasks.append(self._create_training_task(stage, batch, counted=True))
                outputs.append(stage(*self._example_states(stage, _max_shape([batch]), device.type)))
        for output in outputs:
            output.backward(torch.zeros_like(output))
        for stage in self._stages:
            stage.zero_grad(set_to_none=True)

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        counted_names = {
            name
            for stage in self._stages
            for name, _ in stage.model.named_parameters()
            if name not in stage.counted_elsewhere
        }
        owners = self._world.size // self.dims.pipeline
        shards = (local_shard(tensor, owners) for name, tensor in tensors.items() if name in counted_names)
        return sharded_norm(shards, self._world.device)

    def evaluate(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        totals = torch.zeros(len(self._objective.sums), dtype=torch.float64)
        outputs = self._empty_outputs(count)
        remaining = iter(batches)
        with self._eval_mode():
            while chunk := list(islice(remaining, self._num_stages)):  # enough to keep all stages busy
                results = self._forward_only([batch for batch, _ in chunk], self._objective.evaluate_batch)
                # Only the last stage has results.
                for (sums, sample_outputs), (_, indices) in zip(results, chunk, strict=False):
                    totals += self._count_once(sums).double().cpu()
                    self._store_outputs(outputs, sample_outputs, indices)
        return self._reduce_evaluation(totals, outputs)

    @contextmanager
    def generating(self) -> Iterator[bool]:
        yield False  # no process can generate: each token would have to pass through all stages

    def _global_statistics(self, batches: list[Batch]) -> list[float]:
        results = self._forward_only(batches, self._objective.batch_statistics)
        statistics = [self._count_once(statistic) for statistic in results]
        # Only the last stage knows the number of statistics.
        width = -self.all_reduce_min(-len(statistics[0]) if statistics else 0)
        sums = torch.stack(statistics).sum(dim=0).double().tolist() if statistics else [0.0] * width
        return self.all_reduce_sum(sums)

    def _count_once(self, sums: torch.Tensor) -> torch.Tensor:
        # Ranks of one tensor-parallel group all have the same sums.
        return sums if self._world.rank % self.dims.tensor == 0 else torch.zeros_like(sums)

    # One pass through the pipeline

    def _train_on(self, batches: list[Batch], shape: tuple[int, int]) -> None:
        """Run forward and backward over micro-batches, and add their sums to `_sums`."""
        self._num_counted = len(batches)
        # Repeat the last one, without counting it, until the schedule has enough.
        batches = batches + batches[-1:] * (self._valid_count(len(batches)) - len(batches))
        engine = self._get_engine(len(batches), shape, training=True)
        for stage in self._stages:
            for index, batch in enumerate(batches):
                stage.tasks.append(self._create_training_task(stage, batch, counted=index < self._num_counted))
        with profiler_range("artel: pipeline"):
            engine.step(target=torch.arange(len(batches)))

    def _forward_only(self, batches: list[Batch], work: Callable[[PreTrainedModel, Batch], Any]) -> list[Any]:
        """Return the result of `work` for each micro-batch on the last stage, and an empty list on other stages."""
        results: list[Any] = []
        batches = [self._local_batch(batch) for batch in batches]
        zeros = torch.zeros(len(self._objective.sums), device=self._world.device)

        def task(batch: Batch) -> Task:
            def call(model: PreTrainedModel) -> torch.Tensor:
                with self._autocast():
                    results.append(work(model, batch))
                return zeros

            return Task(call)

        with torch.no_grad():
            engine = self._get_engine(len(batches), _max_shape(batches), training=False)
            for stage in self._stages:
                stage.tasks.extend(task(batch) for batch in batches)
            engine.step()
        return results

    def _create_training_task(self, stage: Stage, batch: Batch, *, counted: bool) -> Task:
        """Return the forward pass of a micro-batch. `counted`: False if it only fills the schedule."""

        def call(model: PreTrainedModel) -> torch.Tensor:
            with profiler_range("artel: forward"), self._autocast():
                sums = self._objective.loss(model, batch)
            if counted:
                self._sums += sums.detach()
            return sums

        aux_loss = None if stage.is_last else get_router_aux_loss(stage.model)  # the last stage's objective adds it
        if aux_loss is None or "balance" not in self._objective.sums:
            return Task(call)

        def before_send(hidden: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():  # a test of the model's head
                return hidden
            with aux_loss.recording() as logits:  # nested in the objective's recording: router logits so far
                pass
            sums = aux_loss.loss(logits, batch.tensors["targets"], batch.tensors.get("real"))
            if counted:
                self._sums[self._objective.sums.index("balance")] += sums.detach()
            return attach_loss(hidden, sums * (self._scale if counted else 0.0))

        return Task(call, before_send)

    def _last_loss(self, sums: torch.Tensor, batch_index: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch, on the last stage."""
        return sums[0] * (self._scale if int(batch_index) < self._num_counted else 0.0)

    def _valid_count(self, num_batches: int) -> int:
        """Return the smallest number of micro-batches from `num_batches` on that the schedule accepts.

        PyTorch's interleaved schedules run rounds of about one micro-batch per process, all of the same length.
        """
        if self._schedule in ("interleaved", "zero_bubble"):
            while num_batches % max(1, num_batches // self.dims.pipeline):
                num_batches += 1
        return num_batches

    def _get_engine(self, num_batches: int, shape: tuple[int, int], *, training: bool) -> Any:
        """Return PyTorch's schedule for `num_batches` micro-batches of up to `shape`. Reuse the newest one if it fits.

        A schedule owns the buffers that receive hidden states. Its shape only grows, so that micro-batches of varying
        lengths do not create a new schedule each.
        """
        self._measure_hidden_states()
        engine, known_batches, max_shape = self._engines.get(training, (None, num_batches, shape))
        if engine is None or known_batches != num_batches or max_shape[0] < shape[0] or max_shape[1] < shape[1]:
            max_shape = max(max_shape[0], shape[0]), max(max_shape[1], shape[1])
            self._engines.pop(training, None)  # free its memory before allocating more
            engine = self._create_engine(num_batches, max_shape, training=training)
            self._engines[training] = (engine, num_batches, max_shape)
        for stage in self._stages:
            stage.padded_shape = max_shape
        return engine

    def _create_engine(self, num_batches: int, shape: tuple[int, int], *, training: bool) -> Any:
        stages = [self._create_pytorch_stage(stage, shape) for stage in self._stages]
        schedule_class = _SCHEDULES[self._schedule]
        if not training:
            schedule_class = ScheduleGPipe if len(stages) == 1 else ScheduleLoopedBFS
        elif schedule_class is Schedule1F1B and num_batches < self._num_stages:
            schedule_class = ScheduleGPipe  # PyTorch's 1F1B refuses so few micro-batches: it would save no memory
        is_single_stage = schedule_class in (ScheduleGPipe, Schedule1F1B)
        # Do not divide gradients by the number of micro-batches: the loss is already divided by the targets.
        loss = self._last_loss if training else None
        return schedule_class(stages[0] if is_single_stage else stages, num_batches, loss_fn=loss, scale_grads=False)

    def _create_pytorch_stage(self, stage: Stage, shape: tuple[int, int]) -> PipelineStage:
        output_example = torch.empty(len(self._objective.sums), device="meta", requires_grad=True)
        if not stage.is_last:
            (output_example,) = self._example_states(stage, shape, "meta", is_output=True)
        return PipelineStage(
            stage,
            stage.index,
            self._num_stages,
            self._world.device,
            input_args=self._example_states(stage, shape, "meta"),
            output_args=(output_example,),
            group=self._group,
            dw_builder=None if _can_split_backward(stage) else _no_weight_gradients,
        )

    def _example_states(
        self, stage: Stage, shape: tuple[int, int], device: str, *, is_output: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return example hidden states (rows, length, width) that a stage receives, or sends with `is_output`.

        The first stage receives none.
        """
        if stage.is_first and not is_output:
            return ()
        dtype, width = self._sent_states[stage.index if is_output else stage.index - 1]
        # Not zeros: they may reach a test of the model's head.
        states = torch.linspace(-1, 1, width, dtype=dtype, device=device).repeat(*shape, 1)
        return (states.requires_grad_(),)

    def skip_collectives(self) -> None:
        hidden = self.model.config.get_text_config().hidden_size
        dtype = torch.bfloat16 if self._dtype == torch.bfloat16 else hidden_dtype(self.model)
        self._sent_states = [(dtype, hidden)] * self._num_stages

    def _measure_hidden_states(self) -> None:
        """Measure dtype and width of each stage's hidden states once, with four tokens sent through all stages."""
        if self._sent_states:
            return
        config = self.model.config.get_text_config()
        device = self._world.device
        local_stages = {stage.index: stage for stage in self._stages}
        ids = (torch.arange(3, 7, device=device) % config.vocab_size)[None]

        def call(model: PreTrainedModel) -> torch.Tensor:
            with self._autocast():
                logits: torch.Tensor = model(input_ids=ids).logits
            return logits

        with self._eval_mode(), torch.no_grad():
            for index in range(self._num_stages - 1):
                header = torch.zeros(2, dtype=torch.int64, device=device)
                if index in local_stages:
                    stage = local_stages[index]
                    stage.padded_shape = None
                    stage.tasks.append(Task(call))
                    hidden = stage(*self._example_states(stage, (1, 4), device.type))
                    header = torch.tensor([_DTYPES.index(hidden.dtype), hidden.shape[-1]], device=device)
                dist.broadcast(header, group=self._group, group_src=index % self.dims.pipeline)
                dtype_index, width = header.tolist()
                self._sent_states.append((_DTYPES[dtype_index], width))

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Disable dropout inside the block. Then free the weights gathered for forward passes."""
        for stage in self._stages:
            stage.eval()
        try:
            yield
        finally:
            for stage in self._stages:
                stage.train()
                for module in stage.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

    def _sum_shared_gradients(self) -> None:
        """Sum the gradients of parameters held by several stages. All stages sum in the same order, and stay equal."""
        local_gradients: dict[str, list[torch.Tensor]] = {}
        holders: dict[str, tuple[int, ...]] = {}
        for stage in self._stages:
            parameters = dict(stage.model.named_parameters())
            for name in stage.shared:
                if parameters[name].requires_grad:
                    holders[name] = tuple(sorted({index % self.dims.pipeline for index in stage.shared[name]}))
                    local_gradients.setdefault(name, []).append(_local_gradient(parameters[name]))
        rank = dist.get_rank(self._group)
        for name, gradients in sorted(local_gradients.items()):
            peers = [peer for peer in holders[name] if peer != rank]
            sums = {rank: torch.stack(gradients).sum(dim=0) if len(gradients) > 1 else gradients[0].contiguous()}
            sums |= {peer: torch.empty_like(sums[rank]) for peer in peers}
            messages = [
                dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
                for peer in peers
                for operation, tensor in ((dist.isend, sums[rank]), (dist.irecv, sums[peer]))
            ]
            for message in dist.batch_isend_irecv(messages) if messages else ():
                message.wait()
            gradient_sum = torch.stack([sums[peer] for peer in holders[name]]).sum(dim=0)
            for gradient in gradients:
                gradient.copy_(gradient_sum)


def _max_shape(batches: list[Batch]) -> tuple[int, int]:
    """Return (most rows, most tokens in a row)."""
    shapes = [batch.tensors["input_ids"].shape for batch in batches]
    return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a gradient: zeros if the step did not use the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _can_split_backward(stage: Stage) -> bool:
    """True if gradients of inputs and of weights can be computed separately without repeating work."""
    unwrapped = (layer._compiled_call_impl is None and "forward" not in vars(layer) for layer in stage.layers)
    return not stage.is_last and all(unwrapped)


def _no_weight_gradients() -> Callable[[], None]:
    """`dw_builder` for a stage whose backward pass has already computed everything."""
    return lambda: None
