"""All checks of a run that need no training. `config check`, `prepare`, `train` and `launch` call them.

A check is a function and the keys that it reads. A check is skipped if one of its keys is already known to be wrong.
Otherwise it would report problems that only follow from the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from artel.config import InvalidRunFile, RunConfig, is_suspect, with_location
from artel.config.read import read_file
from artel.config.schema.run import ParallelConfig
from artel.config.yaml_lines import sort_by_line
from artel.errors import InputError, Problem
from artel.host import usable_cores
from artel.models.device import pick_precision
from artel.models.loading.check import check_model, check_model_keys, check_pretrained
from artel.models.loading.model_folder import check_on_hub
from artel.objectives import build_objective, objective_type
from artel.parallel import local_device
from artel.parallel.mesh import ParallelDims, read_parallel_dims
from artel.planning.budget.sizes import auto_problems, with_smallest_model
from artel.planning.machine_limits import check_budget, check_memory
from artel.planning.outline import is_available_offline, local_tokenizer, outline_model
from artel.preparing import (
    check_claim,
    check_from_store,
    check_sources_and_outputs,
    has_store,
    is_prepared,
    prepare_silently,
    tokenizer_location,
)
from artel.registry import STRATEGIES
from artel.training.checkpoint.format import list_checkpoints
from artel.training.lengthening import prepared_length
from artel.training.metrics.trackers import check_trackers
from artel.training.model_setup import check_layout
from artel.training.optim.optimizer import check_optimizer
from artel.training.run_folder import RunFolder
from artel.training.task_harness import check_tasks
from artel.training.unused_settings import find_unused_settings


@dataclass(frozen=True, slots=True)
class StartConditions:
    """Facts known about the start of the run."""

    world_size: int | None = None
    """Number of all processes. None if unknown. Then assume the minimum that `parallel` needs."""
    on_host: int | None = None
    """Processes on each host. None if all run on one host."""
    trains_here: bool = True
    """True if this machine trains the run. Then check its device and memory."""
    checks_texts: bool = True
    """False if the texts are already checked."""
    may_download: bool = False
    """True if a model's configuration may be downloaded from the hub."""


class Check(NamedTuple):
    """The dotted keys or sections that a check reads, and a function that raises InputError."""

    keys: tuple[str, ...]
    run: Callable[[], object]


def find_further_problems(error: InvalidRunFile, start: StartConditions | None = None) -> list[Problem]:
    """Find more problems of a run whose file has errors. Skip problems caused by the wrong keys."""
    if error.valid_run is None:
        return []
    checks = _list_checks(error.valid_run, start or StartConditions(), error.doubtful)
    return _run_checks(error.valid_run, checks, error.doubtful)


def check_run(config: RunConfig, start: StartConditions | None = None, extra_checks: Sequence[Check] = ()) -> None:
    """Raise InputError with all problems of a run that can be found before any text is read."""
    problems = _run_checks(config, [*_list_checks(config, start or StartConditions(), set()), *extra_checks], set())
    if problems:
        raise InputError(sort_by_line(problems))


def find_length_notes(config: RunConfig) -> list[str]:
    """Return notes on settings that have no effect in a run of this length, if the length is known."""
    if _has_started(config):
        return []
    length = None
    with suppress(InputError):  # reported by other checks
        if not config.model.auto and is_prepared(config):
            prepared = prepare_silently(config)
            length = prepared_length(prepared.config, prepared)
    return find_unused_settings(config, length if length and length.samples else None)


def _run_checks(config: RunConfig, checks: Iterable[Check], doubtful: set[str]) -> list[Problem]:
    problems: list[Problem] = []
    for check in checks:
        if not any(is_suspect(key, doubtful) for key in check.keys):
            try:
                check.run()
            except InputError as error:
                problems += [problem for problem in error.problems if problem not in problems]
    return [with_location(problem, config) for problem in problems if not is_suspect(problem.where, doubtful)]


def _list_checks(config: RunConfig, start: StartConditions, doubtful: set[str]) -> Iterator[Check]:
    auto_model_problems = auto_problems(config) if config.model.auto else []
    yield Check(("model", "objective", "parallel", "train"), lambda: _raise_if_any(auto_model_problems))
    is_auto = config.model.auto
    if is_auto:
        config = with_smallest_model(config)  # the choice needs the text
    train = config.train
    text_keys = ("data.sources", "data.validation", "data.max_document", "data.from_store", "data.store", "run")
    if start.checks_texts:
        yield Check(text_keys, lambda: check_sources_and_outputs(config))
        yield Check(("run",), lambda: check_claim(Path(config.run)))
        if config.data.from_store:
            yield Check(("data.from_store", "tokenizer", "objective", "model"), lambda: check_from_store(config))
    if config.parallel.deepspeed is not None:
        file = Path(config.parallel.deepspeed)
        yield Check(("parallel.deepspeed",), lambda: read_file(file))
    if not _has_started(config):
        yield Check(("train", "validate", "checkpoint", "log"), lambda: find_unused_settings(config))
    yield Check(("track",), lambda: check_trackers(list(config.track)))
    yield Check(("train.optimizer", "train.weights", "train.precision"), lambda: check_optimizer(train))
    if start.trains_here:
        yield Check(
            ("train.precision", "train.weights"), lambda: pick_precision(train.precision, local_device(), train.weights)
        )
        yield Check(("train.threads",), lambda: _check_threads(train.threads))
    yield Check(("model.config",), lambda: check_model_keys(config.model))  # needs no known objective
    if is_suspect("objective", doubtful) or is_suspect("data.sources", doubtful):
        return
    objective = objective_type(config)
    yield Check(("objective",), lambda: _raise_if_any(objective.problems(config)))
    yield Check(("validate.tasks", "objective"), lambda: check_tasks(config))
    yield Check(("tokenizer", "model.from", "data.from_store"), lambda: _check_tokenizer(config))
    auto_class = objective.auto_class
    missing = _missing_models(config) if start.trains_here and not _has_started(config) else []
    yield Check(("model.from", "tokenizer.from", "distill.teacher"), lambda: _raise_if_any(missing))
    if any(problem.where == "model.from" for problem in missing):
        return
    if auto_model_problems or not (is_available_offline(config.model.from_) or start.may_download):
        return
    yield Check(("model",), lambda: check_model(config.model, auto_class))
    model_keys = ("model", "tokenizer", "data.block", "data.from_store")
    outline = cache(lambda: _build_outline(config, auto_class))  # built once for all checks
    yield Check(model_keys, outline)
    if start.trains_here:
        yield Check(("parallel", "train", *model_keys), lambda: _check_memory(config, outline, start))
        if train.budget is not None and not is_auto:
            yield Check(("parallel", "train", *model_keys), lambda: _check_budget(config, outline, start))
    yield Check(("parallel", "train", *model_keys), lambda: _check_layout(config, auto_class, start))


def _has_started(config: RunConfig) -> bool:
    return bool(list_checkpoints(RunFolder(Path(config.run)).checkpoints))


def _missing_models(config: RunConfig) -> list[Problem]:
    """Return a problem for each model and tokenizer that is neither local nor on the hub."""
    names = {"model.from": config.model.from_}
    if not (config.data.from_store or has_store(config)):
        key, tokenizer = tokenizer_location(config)
        names[key] = tokenizer
    if not RunFolder(Path(config.run)).teacher.is_file():
        names["distill.teacher"] = config.distill.teacher
    problems: list[Problem] = []
    for key, name in names.items():
        if name is not None and not is_available_offline(name):
            try:
                check_on_hub(name, key)
            except InputError as error:
                problems += error.problems
    return problems


def _raise_if_any(problems: list[Problem]) -> None:
    if problems:
        raise InputError(problems)


def _check_threads(threads: int | None) -> None:
    """Raise InputError for so many threads that they would mostly wait for each other."""
    cores = usable_cores()
    if threads is not None and threads > max(128, 16 * cores):
        what = f"{threads:,} threads would slow each other down on {cores} cores"
        raise InputError.at("train.threads", what, f"use at most {cores}, or remove it")


def _check_tokenizer(config: RunConfig) -> None:
    """Raise InputError if a local tokenizer cannot be opened, or if the objective cannot use it."""
    tokenizer = local_tokenizer(config)
    if tokenizer is not None:
        build_objective(config, tokenizer)


def _build_outline(config: RunConfig, auto_class: str) -> PreTrainedModel | None:
    """Return the run's model on the meta device. None if the model does not exist: another check reports that.

    Raise InputError if it cannot be built, lacks weights, or does not accept inputs of this length.
    """
    try:
        check_model(config.model.model_copy(update={"lora": None, "freeze": []}), auto_class)
    except InputError:
        return None
    check_pretrained(config.model, auto_class)
    return outline_model(config, auto_class)


def _check_memory(config: RunConfig, outline: Callable[[], PreTrainedModel | None], start: StartConditions) -> None:
    """Raise InputError if the model does not fit into this machine's memory."""
    dims = _parallel_dims(config, start)
    model = None if dims is None else _valid_model(outline)
    if dims is not None and model is not None:
        check_memory(model, config, dims, start.on_host or dims.world_size)


def _check_budget(config: RunConfig, outline: Callable[[], PreTrainedModel | None], start: StartConditions) -> None:
    """Raise InputError if the budget is too short for the first steps. Skipped for a run that resumes."""
    if config.parallel.deepspeed is not None or start.world_size is None or _has_started(config):
        return
    model = _valid_model(outline)
    if model is not None:
        check_budget(config, model, start.world_size, start.on_host or start.world_size)


def _valid_model(outline: Callable[[], PreTrainedModel | None]) -> PreTrainedModel | None:
    """Return the run's model without weights. None if it is missing or invalid: other checks report that."""
    try:
        return outline()
    except InputError:
        return None


def _parallel_dims(config: RunConfig, start: StartConditions) -> ParallelDims | None:
    """Return the parallel dimensions. None if unknown or invalid, or if DeepSpeed or a plugin sets them."""
    name = config.parallel.data
    if config.parallel.deepspeed is not None or (isinstance(name, str) and STRATEGIES.get_module(name)):
        return None
    world_size = start.world_size or _min_processes(config.parallel)
    try:
        dims = read_parallel_dims(config.parallel, world_size, start.on_host or world_size)
    except InputError:  # reported by the check of the layout
        return None
    if start.world_size is None and not (world_size == 1 and dims.holds_full_model):
        return None
    return dims


def _check_layout(config: RunConfig, auto_class: str, start: StartConditions) -> None:
    if config.parallel.deepspeed is not None and (start.world_size is None or not start.trains_here):
        return  # the DeepSpeed file depends on the number of processes and on their machine
    if config.model.from_ is not None and not (start.may_download or Path(config.model.from_).is_dir()):
        return  # the structure is unknown; a wrong name is reported by another check
    world_size = start.world_size or _min_processes(config.parallel)
    check_layout(config, auto_class, world_size, start.on_host or world_size)


def _min_processes(parallel: ParallelConfig) -> int:
    """Return the smallest number of processes that `parallel` allows."""
    replicas = parallel.data if isinstance(parallel.data, int) else parallel.expert
    shard = parallel.shard if isinstance(parallel.shard, int) else 1
    return math.lcm(replicas, shard) * parallel.tensor * parallel.pipeline * parallel.context
