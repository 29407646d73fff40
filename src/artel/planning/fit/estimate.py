"""Quick estimates of a layout's memory and time, to plan promising layouts first and skip those that cannot fit.

Bytes are a lower bound, from arithmetic and from plans of other layouts. Seconds only order the layouts. Printed
numbers come from plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.integers import ceil_div
from artel.models.activation_checkpointing import Recompute
from artel.models.compile import repeated_layers
from artel.planning.fit.layouts import Layout
from artel.planning.hardware import Hardware
from artel.planning.performance import pipeline_bubble
from artel.planning.plan import Plan
from artel.planning.plan.live_bytes import ACTIVATIONS, LOSS
from artel.planning.plan.rank_memory import FRAMEWORK_BYTES, copies_checkpoints
from artel.training.optim.optimizer import state_bytes

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
# Recomputed fraction of a forward pass, which is a third of a step.
_RECOMPUTED_FRACTION = {"none": 0.0, "selective": 0.1, "full": 1.0}
# Bytes of activations per token, layer and hidden unit, from the plan of pile-125m. They give the first guess at a
# micro-batch, which plans correct.
_ACTIVATION_BYTES = {"none": 60, "selective": 40, "full": 4}
# Rates per second of hardware that is not in the table. Only the order of layouts depends on them.
_DEFAULT_FLOPS, _DEFAULT_BANDWIDTH, _DEFAULT_LINK = 1e12, 1e11, 1e10
_UTILIZATION = 0.5  # fraction of peak rates that is achieved


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters, dimensions and training state of a model: the input of the estimates."""

    training_bytes: int
    """Bytes of weights, gradients and optimizer state."""
    checkpoint_bytes: int
    """Bytes of weights and optimizer state, as in a checkpoint."""
    parameters: int
    trainable_parameters: int
    active_parameters: int
    """Number of parameters used by a token."""
    hidden_size: int
    layers: int
    gathered_parameters: int
    """Parameters outside of layers plus the largest layer's. fully_shard holds at most these unsharded at once."""

    @classmethod
    def measure(cls, config: RunConfig, model: PreTrainedModel, active_parameters: int) -> ModelSize:
        """Measure `model`, which may be on the meta device."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        state = state_bytes(model, config.train) if trainable else 0
        checkpoint_bytes = sum(parameter.nbytes for parameter in model.parameters()) + state
        model_config: Any = model.config.get_text_config()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in repeated_layers(model)]
        return cls(
            training_bytes=checkpoint_bytes + sum(parameter.nbytes for parameter in trainable),
            checkpoint_bytes=checkpoint_bytes,
            parameters=parameters,
            trainable_parameters=sum(parameter.numel() for parameter in trainable),
            active_parameters=active_parameters,
            hidden_size=int(model_config.hidden_size),
            layers=int(model_config.num_hidden_layers),
            gathered_parameters=parameters - sum(layers) + max(layers, default=0),
        )


def min_state_bytes(layout: Layout, size: ModelSize, precision: str) -> int:
    """Return the minimum bytes of a process on its device, without activations."""
    gathered = 0
    if not layout.dims.reshard_after_forward and not layout.is_unsharded:
        gathered = size.parameters * _bytes_per_number(precision) // (layout.splits.tensor * layout.splits.pipeline)
    return gathered if layout.offloads else size.training_bytes // layout.shards + gathered


def min_host_bytes(layout: Layout, size: ModelSize) -> int:
    """Return the minimum host memory of all processes on a host, in bytes."""
    offloaded = size.training_bytes if layout.offloads else 0
    copied = size.checkpoint_bytes if copies_checkpoints(layout.config) else 0
    return layout.processes_per_host * (FRAMEWORK_BYTES + (offloaded + copied) // layout.shards)


def estimate_buffers(layout: Layout, size: ModelSize, precision: str) -> float:
    """Estimate the bytes of a gathered layer and of its gradients before they are reduced."""
    if layout.is_unsharded:
        return 0
    shards = layout.splits.tensor * layout.splits.expert
    return size.gathered_parameters * (_bytes_per_number(precision) + 8) / shards


def estimate_activations(layout: Layout, size: ModelSize, mode: Recompute, row_tokens: int) -> float:
    """Estimate the activation bytes per row of a micro-batch."""
    splits = layout.splits
    shards = splits.tensor * splits.context * splits.pipeline
    model_bytes = row_tokens * size.hidden_size * size.layers * _ACTIVATION_BYTES[mode]
    return model_bytes / shards * min(splits.pipeline, 2)


def step_seconds(
    layout: Layout, size: ModelSize, mode: Recompute, num_rows: int, row_tokens: int, hardware: Hardware, precision: str
) -> float:
    """Estimate the seconds of a step."""
    micro_batches = ceil_div(layout.config.train.batch, layout.dims.dp_degree * num_rows)
    compute_seconds = _compute_seconds(layout, size, mode, row_tokens, hardware, precision)
    reduce_seconds = _data_parallel_seconds(layout, size, micro_batches, hardware, precision)
    exchange_seconds = _model_parallel_seconds(layout, size, mode, row_tokens, hardware, precision)
    memory_rate = (hardware.memory_bandwidth or _DEFAULT_BANDWIDTH) * _UTILIZATION
    optimizer_seconds = 2 * size.training_bytes / layout.shards / memory_rate  # reads and writes all state
    overlapped_seconds = (
        compute_seconds + reduce_seconds if hardware.shares_memory else max(compute_seconds, reduce_seconds)
    )
    bubble = pipeline_bubble(layout.config.parallel.schedule, layout.splits.pipeline, micro_batches)
    return (overlapped_seconds + exchange_seconds + optimizer_seconds) * (1 + bubble)


def _compute_seconds(
    layout: Layout, size: ModelSize, mode: Recompute, row_tokens: int, hardware: Hardware, precision: str
) -> float:
    """Estimate the seconds of 6 FLOPs per active parameter and token (Kaplan et al. 2020), and of recomputation."""
    peak = hardware.peak_flops.get(precision) or max(hardware.peak_flops.values(), default=_DEFAULT_FLOPS)
    workers = hardware.nodes if hardware.shares_memory else layout.processes  # processes on a CPU share its cores
    flops = 6 * size.active_parameters * layout.config.train.batch * row_tokens * _work_factor(mode)
    return flops / (workers * peak * _UTILIZATION)


def _data_parallel_seconds(
    layout: Layout, size: ModelSize, micro_batches: int, hardware: Hardware, precision: str
) -> float:
    """Estimate the seconds of gathering weights and reducing gradients (4 bytes a number)."""
    splits, dims = layout.splits, layout.dims
    model_shards = splits.tensor * splits.pipeline
    link, network = _link_rates(hardware)
    shards = dims.dp_shard * splits.context
    seconds = 0.0
    if shards > 1:
        gathers = 2 * micro_batches if dims.reshard_after_forward else 1
        weight_bytes = gathers * _bytes_per_number(precision) * size.parameters
        gradient_bytes = micro_batches * 4 * size.trainable_parameters
        rate = link if shards * splits.tensor <= layout.processes_per_host else network
        seconds += (weight_bytes + gradient_bytes) / model_shards / splits.expert / rate
    if dims.dp_replicate > 1:
        rate = link if layout.processes_per_host == layout.processes else network
        seconds += 2 * 4 * size.trainable_parameters / (model_shards * dims.dp_shard) / rate
    return seconds


def _model_parallel_seconds(
    layout: Layout, size: ModelSize, mode: Recompute, row_tokens: int, hardware: Hardware, precision: str
) -> float:
    """Estimate how many seconds layers wait for hidden states.

    Tensor and expert parallelism exchange them 8 times per layer, context parallelism 6 times.
    """
    splits = layout.splits
    tokens = layout.config.train.batch * row_tokens / layout.dims.dp_degree / splits.context
    hidden_bytes = tokens * size.hidden_size * _bytes_per_number(precision)
    exchanges = (splits.tensor > 1) * 8 + (splits.context > 1) * 6 + (splits.expert > 1) * 8
    return size.layers / splits.pipeline * _work_factor(mode) * hidden_bytes * exchanges / _link_rates(hardware)[0]


def _work_factor(mode: Recompute) -> float:
    """Return the compute of a step with recomputation, relative to a step without."""
    return 1 + _RECOMPUTED_FRACTION[mode] / 3


class ActivationModel:
    """Activation memory from earlier plans, to estimate layouts that have no plan yet."""

    def __init__(self) -> None:
        self._points: dict[tuple[Any, ...], dict[int, int]] = {}

    def add(self, layout: Layout, plan: Plan) -> None:
        by_kind = plan.fullest.by_kind
        activation_bytes = by_kind.get(ACTIVATIONS, 0) + by_kind.get(LOSS, 0)
        self._points.setdefault(self._point_key(layout, plan.recompute), {})[plan.micro_batch] = activation_bytes

    def lower_bound(self, layout: Layout, mode: Recompute, num_rows: int) -> float:
        """Return the minimum activation bytes."""
        points = self._find_points(layout, mode)
        if len(points) == 1:  # more rows need at least as much, fewer rows at least in proportion
            known_rows, known_bytes = points[0]
            return known_bytes * min(1.0, num_rows / known_rows)
        return self.estimate(layout, mode, num_rows) or 0.0

    def estimate(self, layout: Layout, mode: Recompute, num_rows: int) -> float | None:
        """Estimate the activation bytes: linear through two points, or proportional to one. None without any."""
        points = self._find_points(layout, mode)
        if not points:
            return None
        (rows_0, bytes_0), (rows_1, bytes_1) = points[0], points[-1]
        if rows_0 == rows_1:
            return bytes_0 * num_rows / rows_0
        return bytes_0 + (num_rows - rows_0) * (bytes_1 - bytes_0) / (rows_1 - rows_0)

    def _find_points(self, layout: Layout, mode: Recompute) -> list[tuple[int, int]]:
        return sorted(self._points.get(self._point_key(layout, mode), {}).items())

    def _point_key(self, layout: Layout, mode: Recompute) -> tuple[Any, ...]:
        config = layout.config
        dtypes = (config.train.weights, config.train.precision, config.model.lora is None)
        return (layout.splits, layout.is_unsharded, mode, dtypes)


def min_device_bytes(
    layout: Layout, size: ModelSize, activations: ActivationModel, mode: Recompute, num_rows: int, precision: str
) -> float:
    """Return the minimum bytes of a process on its device, using earlier plans."""
    return min_state_bytes(layout, size, precision) + activations.lower_bound(layout, mode, num_rows) + FRAMEWORK_BYTES


def _bytes_per_number(precision: str) -> int:
    return 4 if precision == "fp32" else 2


def _link_rates(hardware: Hardware) -> tuple[float, float]:
    """Return bytes/s within a host and between hosts."""
    link = hardware.link.bandwidth if hardware.link else _DEFAULT_LINK
    return link * _UTILIZATION, (hardware.network.bandwidth if hardware.network else link) * _UTILIZATION
