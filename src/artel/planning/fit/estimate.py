"""What a layout takes, by arithmetic: in which order layouts are planned, and which cannot fit and need no plan.

Bytes are a floor: what is certain, and what plans of other layouts showed. Seconds put layouts in order, no more: what
is printed comes from plans.
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
from artel.planning.plan.rank_memory import copies_checkpoints
from artel.planning.plan.untraced import FRAMEWORK
from artel.training.optim.optimizer import state_bytes

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
# Of a forward pass, which is a third of a step: what is computed again.
_AGAIN = {"none": 0.0, "selective": 0.1, "full": 1.0}
# Bytes of activations for each token, layer and hidden number, as `artel plan pile-125m` holds them: a first guess at
# the micro-batch, which plans then correct.
_ACTIVATION_BYTES = {"none": 60, "selective": 40, "full": 4}
# Where the table has no figures. Only the order of layouts comes from them.
_FLOPS, _BANDWIDTH, _LINK = 1e12, 1e11, 1e10
_USED = 0.5  # of peaks


@dataclass(frozen=True, slots=True)
class Size:
    """What the arithmetic needs to know of a model."""

    held: int
    """Bytes of weights, their gradients and the optimizer's state."""
    kept: int
    """Bytes of weights and optimizer state: what a checkpoint holds."""
    weights: int
    """Numbers."""
    trained: int
    active: int
    """Numbers that a token is multiplied with."""
    hidden: int
    layers: int
    unit: int
    """Numbers of the largest layer and of all that is in no layer: what fully_shard gathers at a time."""

    @classmethod
    def of(cls, run: RunConfig, model: PreTrainedModel, active: int) -> Size:
        """`model` may be on the meta device."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        state = state_bytes(model, run.train) if trained else 0
        kept = sum(parameter.nbytes for parameter in model.parameters()) + state
        config: Any = model.config.get_text_config()
        weights = sum(parameter.numel() for parameter in model.parameters())
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in repeated_layers(model)]
        return cls(
            kept + sum(parameter.nbytes for parameter in trained),
            kept,
            weights,
            sum(parameter.numel() for parameter in trained),
            active,
            int(config.hidden_size),
            int(config.num_hidden_layers),
            weights - sum(layers) + max(layers, default=0),
        )


def device_floor(layout: Layout, size: Size, precision: str) -> int:
    """Bytes that one process holds at least on its device, without activations."""
    tensor, pipeline, *_ = layout.splits
    gathered = 0
    if not layout.dims.reshard_after_forward and not layout.is_whole:
        gathered = size.weights * _bytes(precision) // (tensor * pipeline)
    return gathered if layout.offloads else size.held // layout.shards + gathered


def host_floor(layout: Layout, size: Size) -> int:
    """Bytes that the processes of a host hold at least in its memory."""
    held = size.held if layout.offloads else 0
    copied = size.kept if copies_checkpoints(layout.run) else 0
    return layout.on_host * (FRAMEWORK + (held + copied) // layout.shards)


def guessed_buffers(layout: Layout, size: Size, precision: str) -> float:
    """Bytes of what is gathered for a layer, and of its gradients before they are shared out."""
    tensor, _, _, expert = layout.splits
    return 0 if layout.is_whole else size.unit * (_bytes(precision) + 8) / (tensor * expert)


def guessed_activations(layout: Layout, size: Size, how: Recompute, row_tokens: int) -> float:
    """Bytes of activations for each row of a micro-batch."""
    tensor, pipeline, context, _ = layout.splits
    share = tensor * context * pipeline
    return row_tokens * size.hidden * size.layers * _ACTIVATION_BYTES[how] / share * min(pipeline, 2)


def step_seconds(
    layout: Layout, size: Size, how: Recompute, rows: int, row_tokens: int, hardware: Hardware, precision: str
) -> float:
    """Seconds of a step, about."""
    tensor, pipeline, context, expert = layout.splits
    run, dims = layout.run, layout.dims
    width = _bytes(precision)
    micro_batches = -(-run.train.batch // (dims.dp_degree * rows))
    passes = 1 + _AGAIN[how] / 3
    peak = (hardware.peak_flops.get(precision) or max(hardware.peak_flops.values(), default=_FLOPS)) * _USED
    # Processes on a CPU share its cores.
    workers = hardware.nodes if hardware.shares_memory else layout.processes
    computing = 6 * size.active * run.train.batch * row_tokens * passes / (workers * peak)
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
    hidden_bytes = run.train.batch * row_tokens / dims.dp_degree / context * size.hidden * width
    layers = size.layers / pipeline * passes
    waited = layers * hidden_bytes * ((tensor > 1) * 8 + (context > 1) * 6 + (expert > 1) * 8) / link
    stepping = 2 * size.held / layout.shards / ((hardware.memory_bandwidth or _BANDWIDTH) * _USED)
    busy = computing + exchanged if hardware.shares_memory else max(computing, exchanged)
    return (busy + waited + stepping) * (1 + pipeline_bubble(run.parallel.schedule, pipeline, micro_batches))


class Known:
    """What plans showed of activations, for layouts that are not planned yet."""

    def __init__(self) -> None:
        self._points: dict[tuple[Any, ...], dict[int, int]] = {}

    def add(self, layout: Layout, plan: Plan) -> None:
        kinds = plan.fullest.kinds
        size = kinds.get(ACTIVATIONS, 0) + kinds.get(LOSS, 0)
        self._points.setdefault(self._key(layout, plan.recompute), {})[plan.micro_batch] = size

    def least(self, layout: Layout, how: Recompute, rows: int) -> float:
        """Bytes of activations, at least."""
        points = self._of(layout, how)
        if len(points) == 1:  # above it no more is certain, and below it a part does not depend on the rows
            known, size = points[0]
            return size * min(1.0, rows / known)
        return self.about(layout, how, rows) or 0.0

    def about(self, layout: Layout, how: Recompute, rows: int) -> float | None:
        """Bytes of activations: the line through two points, or in proportion to one; None: nothing is known."""
        points = self._of(layout, how)
        if not points:
            return None
        (fewer, less), (more, most) = points[0], points[-1]
        if fewer == more:
            return less * rows / fewer
        return less + (rows - fewer) * (most - less) / (more - fewer)

    def _of(self, layout: Layout, how: Recompute) -> list[tuple[int, int]]:
        return sorted(self._points.get(self._key(layout, how), {}).items())

    def _key(self, layout: Layout, how: Recompute) -> tuple[Any, ...]:
        run = layout.run
        held_in = (run.train.weights, run.train.precision, run.model.lora is None)
        return (layout.splits, layout.is_whole, how, held_in)


def smallest_need(layout: Layout, size: Size, known: Known, how: Recompute, rows: int, precision: str) -> float:
    """Bytes on a process's device, at least, by all that is known."""
    return device_floor(layout, size, precision) + known.least(layout, how, rows) + FRAMEWORK


def _bytes(precision: str) -> int:
    return 4 if precision == "fp32" else 2


def _rates(hardware: Hardware) -> tuple[float, float]:
    """Bytes/s within a node and between nodes."""
    link = hardware.link.bandwidth if hardware.link else _LINK
    return link * _USED, (hardware.network.bandwidth if hardware.network else link) * _USED
