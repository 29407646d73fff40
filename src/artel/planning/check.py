"""All checks of a run that need no training, in one round: `config check`, `prepare`, `train` and `launch` call them.

A check is a function and the keys that it reads: what reads a key that is wrong already is left out, so that nothing
is said that only follows from it.
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

from artel.config import RunConfig, WrongRunFile, is_doubtful, located
from artel.config.load import read_file
from artel.config.schema.run import ParallelConfig
from artel.config.yaml_lines import by_line
from artel.errors import InputError, Problem
from artel.host import usable_cores
from artel.models.device import pick_precision
from artel.models.loading.check import check_model, check_model_keys, check_pretrained
from artel.models.loading.model_folder import check_on_hub
from artel.objectives import objective_of, objective_type
from artel.parallel import local_device
from artel.parallel.mesh import ParallelDims, read_parallel_dims
from artel.planning.budget.auto import auto_problems, smallest
from artel.planning.budget.shortest import check_budget
from artel.planning.memory import check_memory
from artel.planning.outline import is_within_reach, outline_model, tokenizer_here
from artel.preparing import (
    check_claim,
    check_from_store,
    check_texts,
    has_store,
    is_prepared,
    prepare,
    tokenizer_place,
)
from artel.registry import STRATEGIES
from artel.training.checkpoint.format import list_checkpoints
from artel.training.lengthening import prepared_length
from artel.training.metrics.trackers import check_trackers
from artel.training.model_setup import check_layout
from artel.training.optim.optimizer import check_optimizer
from artel.training.run_folder import RunFolder
from artel.training.task_harness import check_tasks
from artel.training.unreached import unreached_settings


@dataclass(frozen=True, slots=True)
class Start:
    """How a run is started, as far as it is known."""

    world_size: int | None = None
    """Processes in all; None: not known yet, and at least as many as the numbers in `parallel` need."""
    on_host: int | None = None
    """Processes on each host; None: all of them."""
    here: bool = True
    """Whether this machine trains it: its device and its memory are then looked at."""
    texts: bool = True
    """Whether the texts are looked at, too; else that is done already."""
    hub: bool = False
    """Whether a hub may be asked for a configuration that is not in the cache."""


class Check(NamedTuple):
    """One check: the dotted keys, or their sections, that it reads, and what raises InputError."""

    keys: tuple[str, ...]
    run: Callable[[], object]


def further_problems(error: WrongRunFile, start: Start | None = None) -> list[Problem]:
    """What else is wrong with a run whose run file is wrong, and does not follow from that."""
    if error.rest is None:
        return []
    return _problems(error.rest, _checks(error.rest, start or Start(), error.doubtful), error.doubtful)


def check_run(run: RunConfig, start: Start | None = None, further: Sequence[Check] = ()) -> None:
    """Raise InputError with all that is wrong with a run and can be known before any text is read.

    `further` are checks of what the caller alone knows.
    """
    problems = _problems(run, [*_checks(run, start or Start(), set()), *further], set())
    if problems:
        raise InputError(by_line(problems))


def notes_on_length(run: RunConfig) -> list[str]:
    """Sentences about settings that cannot act in a run of this length, as far as it is known."""
    if _has_begun(run):
        return []
    length = None
    with suppress(InputError):  # said by other checks
        if not run.model.auto and is_prepared(run):
            prepared = prepare(run, verify=False)
            length = prepared_length(prepared.config, prepared)
    return unreached_settings(run, length if length and length.samples else None)


def _problems(run: RunConfig, checks: Iterable[Check], doubtful: set[str]) -> list[Problem]:
    problems: list[Problem] = []
    for check in checks:
        if not any(is_doubtful(key, doubtful) for key in check.keys):
            try:
                check.run()
            except InputError as error:
                problems += [problem for problem in error.problems if problem not in problems]
    return [located(problem, run) for problem in problems if not is_doubtful(problem.where, doubtful)]


def _checks(run: RunConfig, start: Start, doubtful: set[str]) -> Iterator[Check]:
    auto = auto_problems(run) if run.model.auto else []
    yield Check(("model", "objective", "parallel", "train"), lambda: _refuse(auto))
    is_chosen = run.model.auto
    if is_chosen:
        run = smallest(run)  # which one is chosen only when the text is known
    train = run.train
    texts = ("data.sources", "data.validation", "data.max_document", "data.from_store", "data.store", "run")
    if start.texts:
        yield Check(texts, lambda: check_texts(run))
        yield Check(("run",), lambda: check_claim(Path(run.run)))
        if run.data.from_store:
            yield Check(("data.from_store", "tokenizer", "objective", "model"), lambda: check_from_store(run))
    if run.parallel.deepspeed is not None:
        file = Path(run.parallel.deepspeed)
        yield Check(("parallel.deepspeed",), lambda: read_file(file))
    if not _has_begun(run):
        yield Check(("train", "validate", "checkpoint", "log"), lambda: unreached_settings(run))
    yield Check(("track",), lambda: check_trackers(list(run.track)))
    yield Check(("train.optimizer", "train.weights", "train.precision"), lambda: check_optimizer(train))
    if start.here:
        yield Check(
            ("train.precision", "train.weights"), lambda: pick_precision(train.precision, local_device(), train.weights)
        )
        yield Check(("train.threads",), lambda: _check_threads(train.threads))
    yield Check(("model.config",), lambda: check_model_keys(run.model))  # `check_model` needs the objective
    if is_doubtful("objective", doubtful) or is_doubtful("data.sources", doubtful):
        return
    objective = objective_type(run)
    yield Check(("objective",), lambda: _refuse(objective.problems(run)))
    yield Check(("validate.tasks", "objective"), lambda: check_tasks(run))
    yield Check(("tokenizer", "model.from", "data.from_store"), lambda: _check_tokenizer(run))
    auto_class = objective.auto_class
    absent = _absent(run) if start.here and not _has_begun(run) else []
    yield Check(("model.from", "tokenizer.from", "distill.teacher"), lambda: _refuse(absent))
    if any(problem.where == "model.from" for problem in absent):
        return
    if auto or not (is_within_reach(run.model.from_) or start.hub):
        return
    yield Check(("model",), lambda: check_model(run.model, auto_class))
    model = ("model", "tokenizer", "data.block", "data.from_store")
    outline = cache(lambda: _outline(run, auto_class))  # built once for both
    yield Check(model, outline)
    if start.here:
        yield Check(("parallel", "train", *model), lambda: _check_memory(run, outline, start))
        if train.budget is not None and not is_chosen:
            yield Check(("parallel", "train", *model), lambda: _check_budget(run, outline, start))
    yield Check(("parallel", "train", *model), lambda: _check_layout(run, auto_class, start))


def _has_begun(run: RunConfig) -> bool:
    return bool(list_checkpoints(RunFolder(Path(run.run)).checkpoints))


def _absent(run: RunConfig) -> list[Problem]:
    """A problem for each model and tokenizer of another's that is neither here nor on the hub."""
    names = {"model.from": run.model.from_}
    if not (run.data.from_store or has_store(run)):
        key, tokenizer = tokenizer_place(run)
        names[key] = tokenizer
    if not RunFolder(Path(run.run)).teacher.is_file():
        names["distill.teacher"] = run.distill.teacher
    problems: list[Problem] = []
    for key, name in names.items():
        if name is not None and not is_within_reach(name):
            try:
                check_on_hub(name, key)
            except InputError as error:
                problems += error.problems
    return problems


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise InputError(problems)


def _check_threads(threads: int | None) -> None:
    """Raise InputError for so many threads that a step never ends: each waits for all others to have had their turn."""
    cores = usable_cores()
    if threads is not None and threads > max(128, 16 * cores):
        what = f"{threads:,} threads would wait for one another on {cores} cores"
        raise InputError.at("train.threads", what, f"write {cores} or fewer, or leave it out")


def _check_tokenizer(run: RunConfig) -> None:
    """Raise InputError for a tokenizer in a folder that cannot be opened, or that the objective cannot use."""
    tokenizer = tokenizer_here(run)
    if tokenizer is not None:
        objective_of(run, tokenizer)


def _outline(run: RunConfig, auto_class: str) -> PreTrainedModel | None:
    """The run's model on the meta device; None where there is no such model, which is said by a check of its own.

    Raises InputError where it cannot be built, lacks weights, or takes no such inputs.
    """
    try:
        check_model(run.model.model_copy(update={"lora": None, "freeze": []}), auto_class)
    except InputError:
        return None
    check_pretrained(run.model, auto_class)
    return outline_model(run, auto_class)


def _check_memory(run: RunConfig, outline: Callable[[], PreTrainedModel | None], start: Start) -> None:
    """Raise InputError for a model that fits no memory here."""
    dims = _dims(run, start)
    model = None if dims is None else _sound_model(outline)
    if dims is not None and model is not None:
        check_memory(model, run, dims, start.on_host or dims.world_size)


def _check_budget(run: RunConfig, outline: Callable[[], PreTrainedModel | None], start: Start) -> None:
    """Raise InputError for a budget that the first steps outlast; a run that resumes has had them."""
    if run.parallel.deepspeed is not None or start.world_size is None or _has_begun(run):
        return
    model = _sound_model(outline)
    if model is not None:
        check_budget(run, model, start.world_size, start.on_host or start.world_size)


def _sound_model(outline: Callable[[], PreTrainedModel | None]) -> PreTrainedModel | None:
    """The run's model without weights; None where it is not here, or is wrong, which other checks say."""
    try:
        return outline()
    except InputError:
        return None


def _dims(run: RunConfig, start: Start) -> ParallelDims | None:
    """How processes share the run; None where that is not known yet, or DeepSpeed or a plugin decides, or is wrong."""
    name = run.parallel.data
    if run.parallel.deepspeed is not None or (isinstance(name, str) and STRATEGIES.module_of(name)):
        return None
    world_size = start.world_size or _fewest(run.parallel)
    try:
        dims = read_parallel_dims(run.parallel, world_size, start.on_host or world_size)
    except InputError:  # said by the check of the layout
        return None
    if start.world_size is None and not (world_size == 1 and dims.holds_full_model):
        return None
    return dims


def _check_layout(run: RunConfig, auto_class: str, start: Start) -> None:
    if run.parallel.deepspeed is not None and (start.world_size is None or not start.here):
        return  # the file's numbers are of processes, and its engine is of their machine
    if run.model.from_ is not None and not (start.hub or Path(run.model.from_).is_dir()):
        return  # no structure to look at; if that is wrong, it is said of the model
    world_size = start.world_size or _fewest(run.parallel)
    check_layout(run, auto_class, world_size, start.on_host or world_size)


def _fewest(parallel: ParallelConfig) -> int:
    """The fewest processes with which the numbers in `parallel` go."""
    those = parallel.data if isinstance(parallel.data, int) else parallel.expert
    shard = parallel.shard if isinstance(parallel.shard, int) else 1
    return math.lcm(those, shard) * parallel.tensor * parallel.pipeline * parallel.context
