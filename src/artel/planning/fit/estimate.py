"""Quick estimates of a layout's memory and time: they order the layouts to plan, and rule out those that cannot fit.

Bytes are a lower bound, from arithmetic and from plans of other layouts. Seconds only order the layouts: printed
numbers come from plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from artel.config import RunConfig
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
_AGAIN = {"none": 0.0, "selective": 0.1, "full": 1.0}
# Bytes of activations per token, layer and hidden unit, as in the plan of pile-125m: a first guess at the micro-batch,
# corrected by plans.
_ACTIVATION_BYTES = {"none": 60, "selective": 40, "full": 4}
# For hardware without figures in the table. Only the order of layouts depends on them.
_FLOPS, _BANDWIDTH, _LINK = 1e12, 1e11, 1e10
_USED = 0.5  # of peaks


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a model."""

    held: int
    """Bytes of weights, gradients and optimizer state."""
    kept: int
    """Bytes of weights and optimizer state, as in a checkpoint."""
    weights: int
    """Number of parameters."""
    trained: int
    active: int
    """Number of parameters used by a token."""
    hidden: int
    layers: int
    unit: int
    """Number of parameters of the largest layer and outside of layers: what fully_shard gathers at a time."""

    @classmethod
    def of(cls, config: RunConfig, model: PreTrainedModel, active: int) -> Size:
        """Measure `model`, which may be on the meta device."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        state = state_bytes(model, config.train) if trained else 0
        kept = sum(parameter.nbytes for parameter in model.parameters()) + state
        model_config: Any = model.config.get_text_config()
        weights = sum(parameter.numel() for parameter in model.parameters())
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in repeated_layers(model)]
        return cls(
            kept + sum(parameter.nbytes for parameter in trained),
            kept,
            weights,
            sum(parameter.numel() for parameter in trained),
            active,
            int(model_config.hidden_size),
            int(model_config.num_hidden_layers),
            weights - sum(layers) + max(layers, default=0),
        )


def device_floor(layout: Layout, size: Size, precision: str) -> int:
    """Return the minimum bytes of a process on its device, without activations."""
    tensor, pipeline, *_ = layout.splits
    gathered = 0
    if not layout.dims.reshard_after_forward and not layout.is_whole:
        gathered = size.weights * _bytes(precision) // (tensor * pipeline)
    return gathered if layout.offloads else size.held // layout.shards + gathered


def host_floor(layout: Layout, size: Size) -> int:
    """Return the minimum bytes of all processes of a host in its memory."""
    held = size.held if layout.offloads else 0
    copied = size.kept if copies_checkpoints(layout.config) else 0
    return layout.on_host * (FRAMEWORK_BYTES + (held + copied) // layout.shards)


def guessed_buffers(layout: Layout, size: Size, precision: str) -> float:
    """Estimate the bytes of a gathered layer and of its gradients before they are reduced."""
    tensor, _, _, expert = layout.splits
    return 0 if layout.is_whole else size.unit * (_bytes(precision) + 8) / (tensor * expert)


def guessed_activations(layout: Layout, size: Size, mode: Recompute, row_tokens: int) -> float:
    """Estimate the bytes of activations per row of a micro-batch."""
    tensor, pipeline, context, _ = layout.splits
    share = tensor * context * pipeline
    return row_tokens * size.hidden * size.layers * _ACTIVATION_BYTES[mode] / share * min(pipeline, 2)


def step_seconds(
    layout: Layout, size: Size, mode: Recompute, rows: int, row_tokens: int, hardware: Hardware, precision: str
) -> float:
    """Estimate the seconds of a step."""
    tensor, pipeline, context, expert = layout.splits
    config, dims = layout.config, layout.dims
    width = _bytes(precision)
    micro_batches = -(-config.train.batch // (dims.dp_degree * rows))
    passes = 1 + _AGAIN[mode] / 3
    peak = (hardware.peak_flops.get(precision) or max(hardware.peak_flops.values(), default=_FLOPS)) * _USED
    # Processes on a CPU share its cores.
    workers = hardware.nodes if hardware.shares_memory else layout.processes
    computing = 6 * size.active * config.train.batch * row_tokens * passes / (workers * peak)
    link, network = _rates(hardware)
    reach = link if layout.on_host == layout.processes else network
    weights = size.weights / (tensor * pipeline)
    sharing = dims.dp_shard * context
    exchanged = 0.0
    if sharing > 1:
        gathers = 2 * micro_batches if dims.reshard_after_forward else 1
        sent = (gathers * width * weights + micro_batches * 4 * size.trained / (tensor * pipeline)) / expert
        exchanged += sent / (link if sharing * tensor <= layout.on_host else network)
    if dims.dp_replicate > 1:
        exchanged += 2 * 4 * size.trained / (tensor * pipeline * dims.dp_shard) / reach
    hidden_bytes = config.train.batch * row_tokens / dims.dp_degree / context * size.hidden * width
    layers = size.layers / pipeline * passes
    waited = layers * hidden_bytes * ((tensor > 1) * 8 + (context > 1) * 6 + (expert > 1) * 8) / link
    stepping = 2 * size.held / layout.shards / ((hardware.memory_bandwidth or _BANDWIDTH) * _USED)
    busy = computing + exchanged if hardware.shares_memory else max(computing, exchanged)
    return (busy + waited + stepping) * (1 + pipeline_bubble(config.parallel.schedule, pipeline, micro_batches))


class Known:
    """Activation memory from earlier plans, to estimate layouts that have no plan yet."""

    def __init__(self) -> None:
        self._points: dict[tuple[Any, ...], dict[int, int]] = {}

    def add(self, layout: Layout, plan: Plan) -> None:
        kinds = plan.fullest.kinds
        size = kinds.get(ACTIVATIONS, 0) + kinds.get(LOSS, 0)
        self._points.setdefault(self._key(layout, plan.recompute), {})[plan.micro_batch] = size

    def least(self, layout: Layout, mode: Recompute, rows: int) -> float:
        """Return the minimum bytes of activations."""
        points = self._of(layout, mode)
        if len(points) == 1:  # more rows need at least as much; of fewer rows a part is constant
            known, size = points[0]
            return size * min(1.0, rows / known)
        return self.about(layout, mode, rows) or 0.0

    def about(self, layout: Layout, mode: Recompute, rows: int) -> float | None:
        """Estimate the bytes of activations: linear through two points, or proportional to one. None without any."""
        points = self._of(layout, mode)
        if not points:
            return None
        (fewer, less), (more, most) = points[0], points[-1]
        if fewer == more:
            return less * rows / fewer
        return less + (rows - fewer) * (most - less) / (more - fewer)

    def _of(self, layout: Layout, mode: Recompute) -> list[tuple[int, int]]:
        return sorted(self._points.get(self._key(layout, mode), {}).items())

    def _key(self, layout: Layout, mode: Recompute) -> tuple[Any, ...]:
        config = layout.config
        held_in = (config.train.weights, config.train.precision, config.model.lora is None)
        return (layout.splits, layout.is_whole, mode, held_in)


def smallest_need(layout: Layout, size: Size, known: Known, mode: Recompute, rows: int, precision: str) -> float:
    """Return the minimum bytes of a process on its device, using earlier plans."""
    return device_floor(layout, size, precision) + known.least(layout, mode, rows) + FRAMEWORK_BYTES


def _bytes(precision: str) -> int:
    return 4 if precision == "fp32" else 2


def _rates(hardware: Hardware) -> tuple[float, float]:
    """Return bytes/s within a node and between nodes."""
    link = hardware.link.bandwidth if hardware.link else _LINK
    return link * _USED, (hardware.network.bandwidth if hardware.network else link) * _USED
