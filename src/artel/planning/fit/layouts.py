"""Parallel layouts of a run on some hardware: the search space of the advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.config.schema.run import ParallelConfig
from artel.errors import InputError
from artel.models.activation_checkpointing import Recompute
from artel.objectives import objective_type
from artel.parallel.mesh import ADVISED_MODES, ParallelDims, read_parallel_dims
from artel.training.model_setup import check_layout

_MAX_STAGES = 16
_MAX_COMBINED_SPLITS = 2  # of tensor, pipeline, context and expert; three together are for thousands of accelerators


class Splits(NamedTuple):
    """Sizes of the parallel dimensions that split the model or a sequence."""

    tensor: int
    pipeline: int
    context: int
    expert: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A run with its parallel dimensions."""

    config: RunConfig
    """The run with this layout in its `parallel` section."""
    dims: ParallelDims
    processes_per_host: int

    @property
    def processes(self) -> int:
        return self.dims.world_size

    @property
    def offloads(self) -> bool:
        return self.config.parallel.offload != "none"

    @property
    def shards(self) -> int:
        """Maximum number of shards of weights, gradients and optimizer state."""
        return self.dims.world_size // self.dims.dp_replicate

    @property
    def is_unsharded(self) -> bool:
        """True if weights need not be gathered before use."""
        return self.dims.dp_shard * self.config.parallel.context == 1 and not self.offloads

    @property
    def splits(self) -> Splits:
        parallel = self.config.parallel
        return Splits(parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)

    def with_micro_batch(self, mode: Recompute, num_rows: int) -> RunConfig:
        """Return the run with micro-batches of `num_rows` rows, and this activation checkpointing."""
        return with_changes(self.config, {"train.activation_checkpointing": mode, "train.micro_batch": num_rows})


def iterate_layouts(
    config: RunConfig, model: PreTrainedModel, processes: int, processes_per_host: int, *, offload: str = "none"
) -> Iterator[Layout]:
    """Yield every layout of `processes` processes, `processes_per_host` on each host, that passes `check_layout`.

    `model` is the run's, on the meta device. Splits are powers of two. Tensor, context and expert parallelism stay
    within a host.
    """
    auto_class = objective_type(config).auto_class
    known_keys = set()
    if config.parallel.offload != "none" and offload != "none":
        offload = config.parallel.offload  # keep the user's kind of offload
    for splits in _iterate_splits(processes, processes_per_host):
        for data in ADVISED_MODES:
            changes = {"data": data, "shard": "auto", "offload": offload, **splits._asdict()}
            parallel = config.parallel.model_copy(update=changes)
            try:
                dims = read_parallel_dims(parallel, processes, processes_per_host)
            except InputError:
                continue
            key = (dims.sizes, splits.expert, dims.holds_full_model, dims.reshard_after_forward)
            has_nothing_to_shard = processes == 1 and not dims.holds_full_model and offload == "none"
            if key in known_keys or has_nothing_to_shard or dims.dp_degree > config.train.batch:
                continue
            known_keys.add(key)
            candidate = config.model_copy(
                update={"parallel": _keep_user_keys(config, parallel, dims, processes_per_host)}
            )
            try:
                check_layout(candidate, auto_class, processes, processes_per_host, model)
            except InputError:
                continue
            yield Layout(candidate, dims, processes_per_host)


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return the run with new values for keys `section.key`, without validation."""
    for target_key, value in changes.items():
        section, key = target_key.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
    return config


def _iterate_splits(processes: int, processes_per_host: int) -> Iterator[Splits]:
    """Yield all splits of powers of two, the fewest splits first."""
    host_sizes = _powers_of_two_dividing(processes_per_host)
    stages = _powers_of_two_dividing(min(processes, _MAX_STAGES))
    for sizes in product(host_sizes, stages, host_sizes, host_sizes):
        splits = Splits(*sizes)
        if sum(size > 1 for size in splits) > _MAX_COMBINED_SPLITS:
            continue
        if splits.tensor * max(splits.context, splits.expert) > processes_per_host:
            continue
        if processes % (splits.tensor * splits.pipeline * splits.context) == 0:
            yield splits


def _powers_of_two_dividing(number: int) -> list[int]:
    return [2**power for power in range(number.bit_length()) if number % 2**power == 0]


def _keep_user_keys(
    config: RunConfig, parallel: ParallelConfig, dims: ParallelDims, processes_per_host: int
) -> ParallelConfig:
    """Keep `data` and `shard` of the run file if they mean the same, because the advice should change few keys."""
    user_parallel = parallel.model_copy(update={"data": config.parallel.data, "shard": config.parallel.shard})
    try:
        is_same = (
            isinstance(user_parallel.data, str)
            and read_parallel_dims(user_parallel, dims.world_size, processes_per_host) == dims
        )
    except InputError:
        return parallel
    return user_parallel if is_same else parallel
