"""Parallel layouts of a run on some hardware, from which the advice chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.config.schema.run import ParallelConfig
from artel.errors import InputError
from artel.models.activation_checkpointing import Recompute
from artel.objectives import objective_type
from artel.parallel.mesh import ADVISED_MODES, ParallelDims, read_parallel_dims
from artel.training.model_setup import check_layout

_MOST_STAGES = 16
_SPLITS_AT_ONCE = 2  # of tensor, pipeline, context and expert; three together are for thousands of accelerators


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A way to parallelize a run."""

    config: RunConfig
    """The run with this layout in its `parallel` section."""
    dims: ParallelDims
    on_host: int

    @property
    def processes(self) -> int:
        return self.dims.world_size

    @property
    def offloads(self) -> bool:
        return self.config.parallel.offload != "none"

    @property
    def shards(self) -> int:
        """Number of shards of weights, gradients and optimizer state, at most."""
        return self.dims.world_size // self.dims.dp_replicate

    @property
    def is_whole(self) -> bool:
        """True if weights need not be gathered before use."""
        return self.dims.dp_shard * self.config.parallel.context == 1 and not self.offloads

    @property
    def splits(self) -> tuple[int, int, int, int]:
        parallel = self.config.parallel
        return parallel.tensor, parallel.pipeline, parallel.context, parallel.expert

    def at(self, mode: Recompute, rows: int) -> RunConfig:
        """Return the run with micro-batches of `rows` rows, and this activation checkpointing."""
        return changed(self.config, {"train.activation_checkpointing": mode, "train.micro_batch": rows})


def layouts(
    config: RunConfig, model: PreTrainedModel, processes: int, on_host: int, *, offload: str = "none"
) -> Iterator[Layout]:
    """Yield each layout of `processes` processes, `on_host` per host, that passes `check_layout`.

    `model` is the run's, on the meta device. Splits are powers of two. Tensor, context and expert parallelism stay
    within a host.
    """
    auto_class = objective_type(config).auto_class
    seen = set()
    for tensor, pipeline, context, expert in _splits(processes, on_host):
        for data in ADVISED_MODES:
            parallel = _parallel(config, data, tensor, pipeline, context, expert, offload)
            try:
                dims = read_parallel_dims(parallel, processes, on_host)
            except InputError:
                continue
            key = (dims.sizes, expert, dims.holds_full_model, dims.reshard_after_forward)
            alone = processes == 1 and not dims.holds_full_model and offload == "none"  # nothing to shard
            if key in seen or alone or dims.dp_degree > config.train.batch:
                continue
            seen.add(key)
            candidate = config.model_copy(update={"parallel": _as_written(config, parallel, dims, on_host)})
            try:
                check_layout(candidate, auto_class, processes, on_host, model)
            except InputError:
                continue
            yield Layout(candidate, dims, on_host)


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return the run with new values for keys `section.key`, unchecked."""
    for dotted, value in changes.items():
        section, key = dotted.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
    return config


def _splits(processes: int, on_host: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tensor, pipeline, context, expert), the fewest splits first."""
    within = _powers(on_host)
    stages = _powers(min(processes, _MOST_STAGES))
    for splits in product(within, stages, within, within):
        tensor, pipeline, context, expert = splits
        if sum(size > 1 for size in splits) > _SPLITS_AT_ONCE or tensor * max(context, expert) > on_host:
            continue
        if processes % (tensor * pipeline * context) == 0:
            yield splits


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if most % 2**power == 0]


def _parallel(
    config: RunConfig, data: str, tensor: int, pipeline: int, context: int, expert: int, offload: str
) -> ParallelConfig:
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
    if config.parallel.offload != "none" and offload != "none":
        offload = config.parallel.offload  # keep the user's kind of offload
    return config.parallel.model_copy(update={"data": data, "shard": "auto", "offload": offload, **sizes})


def _as_written(config: RunConfig, parallel: ParallelConfig, dims: ParallelDims, on_host: int) -> ParallelConfig:
    """Keep the run file's own `data` if it means the same, so that the advice shows only necessary changes."""
    own = parallel.model_copy(update={"data": config.parallel.data, "shard": config.parallel.shard})
    try:
        same = isinstance(own.data, str) and read_parallel_dims(own, dims.world_size, on_host) == dims
    except InputError:
        return parallel
    return own if same else parallel
