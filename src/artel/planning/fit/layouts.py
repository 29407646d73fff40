"""The ways in which the processes of some hardware can share a run: what the advice chooses from."""

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
_SPLITS_AT_ONCE = 2  # of tensor, pipeline, context and expert: three together are for thousands of accelerators


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How processes share a run."""

    run: RunConfig
    """With its `parallel` section."""
    dims: ParallelDims
    on_host: int

    @property
    def processes(self) -> int:
        return self.dims.world_size

    @property
    def offloads(self) -> bool:
        return self.run.parallel.offload != "none"

    @property
    def shards(self) -> int:
        """Processes among which the weights, the gradients and the optimizer's state are shared out, at most."""
        return self.dims.world_size // self.dims.dp_replicate

    @property
    def is_whole(self) -> bool:
        """Whether no weights travel before they are used."""
        return self.dims.dp_shard * self.run.parallel.context == 1 and not self.offloads

    @property
    def splits(self) -> tuple[int, int, int, int]:
        parallel = self.run.parallel
        return parallel.tensor, parallel.pipeline, parallel.context, parallel.expert

    def at(self, how: Recompute, rows: int) -> RunConfig:
        """The run with micro-batches of `rows` rows, recomputing as asked."""
        return changed(self.run, {"train.activation_checkpointing": how, "train.micro_batch": rows})


def layouts(
    run: RunConfig, model: PreTrainedModel, processes: int, on_host: int, *, offload: str = "none"
) -> Iterator[Layout]:
    """All layouts of `processes` processes, `on_host` on each host, that `check_layout` lets pass, each once.

    `model` is the run's, on the meta device. Splits are powers of two; tensor, context and experts stay within a host.
    """
    auto_class = objective_type(run).auto_class
    seen = set()
    for tensor, pipeline, context, expert in _splits(processes, on_host):
        for data in ADVISED_MODES:
            parallel = _parallel(run, data, tensor, pipeline, context, expert, offload)
            try:
                dims = read_parallel_dims(parallel, processes, on_host)
            except InputError:
                continue
            key = (dims.sizes, expert, dims.holds_full_model, dims.reshard_after_forward)
            alone = processes == 1 and not dims.holds_full_model and offload == "none"  # nothing to share
            if key in seen or alone or dims.dp_degree > run.train.batch:
                continue
            seen.add(key)
            candidate = run.model_copy(update={"parallel": _as_written(run, parallel, dims, on_host)})
            try:
                check_layout(candidate, auto_class, processes, on_host, model)
            except InputError:
                continue
            yield Layout(candidate, dims, on_host)


def changed(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The run with other values for keys `section.key`, which are not checked."""
    for dotted, value in changes.items():
        section, key = dotted.split(".")
        run = run.model_copy(update={section: getattr(run, section).model_copy(update={key: value})})
    return run


def _splits(processes: int, on_host: int) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, pipeline, context, expert), the least split first."""
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
    run: RunConfig, data: str, tensor: int, pipeline: int, context: int, expert: int, offload: str
) -> ParallelConfig:
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
    if run.parallel.offload != "none" and offload != "none":
        offload = run.parallel.offload  # its own way stays
    return run.parallel.model_copy(update={"data": data, "shard": "auto", "offload": offload, **sizes})


def _as_written(run: RunConfig, parallel: ParallelConfig, dims: ParallelDims, on_host: int) -> ParallelConfig:
    """With the run file's own `data` where that means the same: advice says no more than what has to change."""
    own = parallel.model_copy(update={"data": run.parallel.data, "shard": run.parallel.shard})
    try:
        same = isinstance(own.data, str) and read_parallel_dims(own, dims.world_size, on_host) == dims
    except InputError:
        return parallel
    return own if same else parallel
