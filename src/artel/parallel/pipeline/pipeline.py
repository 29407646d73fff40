"""The layers of a model shared out over processes, which work on different micro-batches at the same time.

Only hidden states and their gradients travel. All processes of a pipeline are given the same micro-batches, and every
stage takes what it needs of them from its own copy. Micro-batches of one step may be of different shapes: hidden states
are filled up to the largest on their way, and nowhere else.

The orders are PyTorch's: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, "PipeDream"), interleaved 1F1B
(Narayanan et al. 2021, "Megatron-LM"), zero bubble (Qi et al. 2023, ZB1P). Sequential is GPipe with one micro-batch at
a time. Zero bubble takes a stage's backward pass apart, except where that would do its work twice: in the last stage,
whose loss computes all its gradients at once, and where layers are compiled or compute their activations again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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

from artel.models.failed_pass import forget_failed_pass
from artel.models.half_base import hidden_dtype
from artel.models.profiler_ranges import profiler_range
from artel.models.router_aux_loss import attach_loss, router_aux_loss_of
from artel.objectives import Batch, Objective
from artel.parallel.base import Strategy
from artel.parallel.grad_norm import norm_of_shards
from artel.parallel.mesh import ParallelDims
from artel.parallel.pipeline.stages import Stage, Task, stages_in_all
from artel.parallel.process_group import World

_ORDERS: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "sequential": ScheduleGPipe,
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PipelineParallel(Strategy):
    """Each process holds one stage of the model, or two; `model` holds the parameters of its stages.

    `stages` are those that `cut` gave for this process's place in the pipeline, in order, on its device. Where
    processes share the batch, each has been through fully_shard as a whole (layer by layer, and then the Stage itself),
    set to sum gradients and not to average them. `mesh` is the dimension `pipeline` of the whole mesh.
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
        self._count = stages_in_all(dims.pipeline, schedule)
        self._sent: list[tuple[torch.dtype, int]] = []
        """(precision, size) of the hidden states that each stage sends."""
        self._orders: dict[bool, tuple[Any, int, tuple[int, int]]] = {}
        """The newest order for training (True) and for looking (False), for how many micro-batches, up to what size."""
        self._scale: torch.Tensor | float = 1.0
        self._counted = 0
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
        # Else the same masks of dropout would be drawn in all stages.
        torch.manual_seed(torch.initial_seed() + self._stages[0].index)
        if self._objective.needs_global_statistics:
            self._objective.set_global_statistics(self._global_statistics(batches))
        self._sums = torch.zeros(len(self._objective.sums), device=self._world.device)
        batches = [self._local_batch(batch) for batch in batches]
        # One order for the whole step: where weights are in shards, a new one forgets gradients when it first runs.
        size = _largest(batches)
        at_a_time = 1 if self._schedule == "sequential" else len(batches)
        for start in range(0, len(batches), at_a_time):
            self._learn_from(batches[start : start + at_a_time], size)
        self._add_shared()
        return self._count_once(self._sums)

    def probe_memory(self, batch: Batch) -> None:
        """With as many micro-batches as this process holds at a time, of which GPipe may hold more than are tried."""
        self._measure()
        batch, device = self._local_batch(batch), self._world.device
        self._scale, self._sums = 1.0, torch.zeros(len(self._objective.sums), device=device)
        outputs = []
        for stage in self._stages:
            stage.size = None
            for _ in range(1 if self._schedule == "sequential" else self._count - stage.index):
                stage.tasks.append(self._learning(stage, batch, counted=True))
                outputs.append(stage(*self._example(stage, _largest([batch]), device.type)))
        for output in outputs:
            output.backward(torch.zeros_like(output))
        for stage in self._stages:
            stage.zero_grad(set_to_none=True)

    def norm(self) -> torch.Tensor:
        spared = [
            parameter
            for stage in self._stages
            for name, parameter in stage.model.named_parameters()
            if name in stage.counted_elsewhere
        ]
        owners = self._world.size // self.dims.pipeline
        return norm_of_shards(self.model.parameters(), owners, self._world.device, spared)

    def evaluate(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        totals = torch.zeros(len(self._objective.sums), dtype=torch.float64)
        outputs = self._room_for_outputs(count)
        coming = iter(batches)
        with self._eval_mode():
            while chunk := list(islice(coming, self._count)):  # enough to keep all stages busy
                results = self._look([batch for batch, _ in chunk], self._objective.evaluate_batch)
                for (sums, rows), (_, indices) in zip(results, chunk, strict=False):  # none but of the last stage
                    totals += self._count_once(sums).double().cpu()
                    self._keep_outputs(outputs, rows, indices)
        return self._over_all_ranks(totals, outputs)

    @contextmanager
    def generating(self) -> Iterator[bool]:
        yield False  # no process can write: a token would have to go through all stages

    def _global_statistics(self, batches: list[Batch]) -> list[float]:
        statistics = [
            self._count_once(statistic) for statistic in self._look(batches, self._objective.batch_statistics)
        ]
        # Only the last stage knows how many numbers there are.
        width = -self.all_reduce_min(-len(statistics[0]) if statistics else 0)
        total = torch.stack(statistics).sum(dim=0).double().tolist() if statistics else [0.0] * width
        return self.all_reduce_sum(total)

    def _count_once(self, sums: torch.Tensor) -> torch.Tensor:
        # Ranks that share the matrices of a layer all have the same sums.
        return sums if self._world.rank % self.dims.tensor == 0 else torch.zeros_like(sums)

    # One pass through the pipeline

    def _learn_from(self, batches: list[Batch], size: tuple[int, int]) -> None:
        """Forward and backward of micro-batches; their sums are added to `_sums`."""
        self._counted = len(batches)
        # The last one once more, for nothing, until there are as many as the order needs.
        batches = batches + batches[-1:] * (self._enough(len(batches)) - len(batches))
        order = self._order(len(batches), size, training=True)
        for stage in self._stages:
            for number, batch in enumerate(batches):
                stage.tasks.append(self._learning(stage, batch, counted=number < self._counted))
        with profiler_range("artel: pipeline"):
            order.step(target=torch.arange(len(batches)))

    def _look(self, batches: list[Batch], work: Callable[[PreTrainedModel, Batch], Any]) -> list[Any]:
        """What the objective finds of each micro-batch, forward only, on the last stage; on others nothing."""
        results: list[Any] = []
        batches = [self._local_batch(batch) for batch in batches]
        nothing = torch.zeros(len(self._objective.sums), device=self._world.device)

        def looking(batch: Batch) -> Task:
            def call(model: PreTrainedModel) -> torch.Tensor:
                with self._autocast():
                    results.append(work(model, batch))
                return nothing

            return Task(call)

        with torch.no_grad():
            order = self._order(len(batches), _largest(batches), training=False)
            for stage in self._stages:
                stage.tasks.extend(looking(batch) for batch in batches)
            order.step()
        return results

    def _learning(self, stage: Stage, batch: Batch, *, counted: bool) -> Task:
        """The forward pass of a micro-batch; its sums count, or it is there to make up the number."""

        def call(model: PreTrainedModel) -> torch.Tensor:
            with profiler_range("artel: forward"), self._autocast():
                sums = self._objective.loss(model, batch)
            if counted:
                self._sums += sums.detach()
            return sums

        balance = None if stage.is_last else router_aux_loss_of(stage.model)  # the last stage's objective adds it
        if balance is None or "balance" not in self._objective.sums:
            return Task(call)

        def hand_on(hidden: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():  # the model's head is being tried
                return hidden
            with balance.recording() as logits:  # within the objective's own watch: what its routers have given so far
                pass
            sums = balance.loss(logits, batch.tensors["targets"], batch.tensors.get("real"))
            if counted:
                self._sums[self._objective.sums.index("balance")] += sums.detach()
            return attach_loss(hidden, sums * (self._scale if counted else 0.0))

        return Task(call, hand_on)

    def _last_loss(self, sums: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """What the backward pass of a micro-batch begins with, on the last stage."""
        return sums[0] * (self._scale if int(number) < self._counted else 0.0)

    def _enough(self, count: int) -> int:
        """The least number of micro-batches, at least `count`, that the order can be made for.

        PyTorch's interleaved orders go in rounds of about as many as there are processes, all of the same length.
        """
        if self._schedule in ("interleaved", "zero_bubble"):
            while count % max(1, count // self.dims.pipeline):
                count += 1
        return count

    def _order(self, count: int, size: tuple[int, int], *, training: bool) -> Any:
        """PyTorch's schedule of so many micro-batches of up to `size`; a new one where the newest will not do.

        It keeps what it receives hidden states into. So that micro-batches of ever other lengths do not each make
        another, what it has room for grows only.
        """
        self._measure()
        order, known, room = self._orders.get(training, (None, count, size))
        if order is None or known != count or room[0] < size[0] or room[1] < size[1]:
            room = max(room[0], size[0]), max(room[1], size[1])
            self._orders.pop(training, None)  # its memory goes before new is taken
            order = self._new_order(count, room, training=training)
            self._orders[training] = (order, count, room)
        for stage in self._stages:
            stage.size = room
        return order

    def _new_order(self, count: int, size: tuple[int, int], *, training: bool) -> Any:
        engines = [self._engine(stage, size) for stage in self._stages]
        kind = _ORDERS[self._schedule]
        if not training:
            kind = ScheduleGPipe if len(engines) == 1 else ScheduleLoopedBFS
        elif kind is Schedule1F1B and count < self._count:
            kind = ScheduleGPipe  # PyTorch's 1F1B refuses so few, with which it would hold no less
        one = kind in (ScheduleGPipe, Schedule1F1B)
        # Gradients are not divided by the number of micro-batches: the loss is by the targets already.
        loss = self._last_loss if training else None
        return kind(engines[0] if one else engines, count, loss_fn=loss, scale_grads=False)

    def _engine(self, stage: Stage, size: tuple[int, int]) -> PipelineStage:
        sent = torch.empty(len(self._objective.sums), device="meta", requires_grad=True)
        if not stage.is_last:
            (sent,) = self._example(stage, size, "meta", after=True)
        return PipelineStage(
            stage,
            stage.index,
            self._count,
            self._world.device,
            input_args=self._example(stage, size, "meta"),
            output_args=(sent,),
            group=self._group,
            dw_builder=None if _comes_apart(stage) else _nothing_left,
        )

    def _example(
        self, stage: Stage, size: tuple[int, int], device: str, *, after: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Hidden states of (rows, length) as a stage receives or, `after` it, sends them: none before the first."""
        if stage.is_first and not after:
            return ()
        dtype, width = self._sent[stage.index if after else stage.index - 1]
        # Not zeros: what comes of them may be what the model's head is tried with.
        states = torch.linspace(-1, 1, width, dtype=dtype, device=device).repeat(*size, 1)
        return (states.requires_grad_(),)

    def skip_collectives(self) -> None:
        hidden = self.model.config.get_text_config().hidden_size
        self._sent = [(hidden_dtype(self.model), hidden)] * self._count

    def _measure(self) -> None:
        """Find what hidden states each stage sends, by sending four tokens through all; once."""
        if self._sent:
            return
        config = self.model.config.get_text_config()
        device, local_stages = self._world.device, {stage.index: stage for stage in self._stages}
        ids = (torch.arange(3, 7, device=device) % config.vocab_size)[None]

        def call(model: PreTrainedModel) -> torch.Tensor:
            with self._autocast():
                logits: torch.Tensor = model(input_ids=ids).logits
            return logits

        with self._eval_mode(), torch.no_grad():
            for index in range(self._count - 1):
                header = torch.zeros(2, dtype=torch.int64, device=device)
                if index in local_stages:
                    stage = local_stages[index]
                    stage.size = None
                    stage.tasks.append(Task(call))
                    hidden = stage(*self._example(stage, (1, 4), device.type))
                    header = torch.tensor([_DTYPES.index(hidden.dtype), hidden.shape[-1]], device=device)
                dist.broadcast(header, group=self._group, group_src=index % self.dims.pipeline)
                number, width = header.tolist()
                self._sent.append((_DTYPES[number], width))

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Without dropout; weights that were gathered for forward passes alone are let go."""
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

    def _add_shared(self) -> None:
        """Sum the gradients of parameters that several stages hold: all do so in the same order, and stay equal."""
        here: dict[str, list[torch.Tensor]] = {}
        holders: dict[str, tuple[int, ...]] = {}
        for stage in self._stages:
            parameters = dict(stage.model.named_parameters())
            for name in stage.shared:
                if parameters[name].requires_grad:
                    holders[name] = tuple(sorted({index % self.dims.pipeline for index in stage.shared[name]}))
                    here.setdefault(name, []).append(_gradient(parameters[name]))
        rank = dist.get_rank(self._group)
        for name in sorted(here):
            others = [other for other in holders[name] if other != rank]
            parts = {rank: torch.stack(here[name]).sum(dim=0) if len(here[name]) > 1 else here[name][0].contiguous()}
            parts |= {other: torch.empty_like(parts[rank]) for other in others}
            messages = [
                dist.P2POp(operation, part, group=self._group, group_peer=other)
                for other in others
                for operation, part in ((dist.isend, parts[rank]), (dist.irecv, parts[other]))
            ]
            for message in dist.batch_isend_irecv(messages) if messages else ():
                message.wait()
            total = torch.stack([parts[other] for other in holders[name]]).sum(dim=0)
            for gradient in here[name]:
                gradient.copy_(total)


def _largest(batches: list[Batch]) -> tuple[int, int]:
    """(most rows, most tokens in a row)."""
    shapes = [batch.tensors["input_ids"].shape for batch in batches]
    return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of a gradient, which is zero where the step has not needed the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _comes_apart(stage: Stage) -> bool:
    """Whether gradients of inputs and of weights can be computed one after the other without doing anything twice."""
    plain = (layer._compiled_call_impl is None and "forward" not in vars(layer) for layer in stage.layers)
    return not stage.is_last and all(plain)


def _nothing_left() -> Callable[[], None]:
    """For PyTorch's engine: what is left to do of a backward pass that was done as a whole."""
    return lambda: None
