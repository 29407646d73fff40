"""EleutherAI's lm-evaluation-harness (Gao et al. 2021) for models that generate text. Needs the extra `tasks`."""

from __future__ import annotations

import io
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.errors import InputError, Problem, missing_extra
from artel.objectives import objective_type
from artel.parallel import World
from artel.tokens import Tokenizer

KEY = "validate.tasks"
_BEST = "checkpoint.best"
_BATCH = 8
"""Requests per forward pass."""
_BOOTSTRAPS = 100_000
"""Resamples for the standard error of metrics without a formula: the harness's own default."""


def check_tasks(config: RunConfig) -> None:
    """Raise InputError if `validate.tasks` cannot run. Checks only what is known before the text is read."""
    if not config.validate_.tasks:
        return
    if not objective_type(config).generates:
        message = f"{config.objective} does not train a model that generates text, but the harness needs one"
        raise InputError.at(KEY, message, "remove it: the objective's own metrics are computed")
    check_known(config.validate_.tasks, KEY)
    if best_is_task(config) and _is_readable(config.validate_.tasks):
        check_best(config)


def best_is_task(config: RunConfig) -> bool:
    """True if `checkpoint.best` is a metric of `validate.tasks`: TASK/METRIC."""
    best = config.checkpoint.best
    return best is not None and "/" in best and best not in objective_type(config).metric_directions


def check_best(config: RunConfig) -> None:
    """Raise InputError if `checkpoint.best` names a metric that `validate.tasks` does not have.

    Runs a dummy model on the first example of each task, to learn the names of metrics.
    """
    if not best_is_task(config):
        return
    from lm_eval.models.dummy import DummyLM

    best, tasks = config.checkpoint.best, config.validate_.tasks
    assert best is not None
    try:
        with _preserved_random_state(torch.device("cpu")), _hide_progress_bars():
            directions = task_directions(_evaluate(DummyLM(), tasks, folder=None, limit=1, bootstraps=0))
    except Exception as error:  # the dummy model cannot answer some tasks
        fix = "write a metric of another task, or one of the objective's"
        raise InputError.at(_BEST, f"the metrics of validate.tasks are unknown: {_first_line(error)}", fix) from None
    if best not in directions:
        similar = get_close_matches(best, directions, 3, cutoff=0.5) or list(directions)[:10]
        fix = f"write one of: {', '.join(similar)}"
        raise InputError.at(_BEST, f"{best!r} is not a metric of validate.tasks", fix)
    if directions[best] is None:
        message = f"the harness does not define whether a higher {best} is better"
        raise InputError.at(_BEST, message, "write a metric of one of its tasks")


def check_known(tasks: Sequence[str], key: str, folder: str | None = None) -> None:
    """Raise InputError if the harness is not installed, or for unknown tasks and missing files."""
    if find_spec("lm_eval") is None:
        raise missing_extra("lm_eval", "tasks", key)
    problems = []
    for task in tasks:
        if _is_file(task):
            if not Path(task).is_file():
                problems.append(Problem(key, f"there is no file {task}", "write a task's name, or its YAML file"))
        elif task not in _task_manager(_needs_names(tasks), folder).task_index:
            fix = "lm-eval ls tasks names them; one of your own is its YAML file: tasks/NAME.yaml"
            problems.append(Problem(key, f"the harness has no task {task!r}", fix))
    if problems:
        raise InputError(problems)


def check_data(tasks: Sequence[str]) -> None:
    """Read all tasks. Raise InputError if the file or the data of a task cannot be read."""
    for task in tasks:
        try:
            _load_task(task, tasks)
        except Exception as error:  # Jinja, YAML and datasets raise all types
            fix = "download its data once with network access; for a task file of your own see the harness's docs"
            raise InputError.at(KEY, f"{task} cannot be read: {_first_line(error)}", fix) from None


def _is_readable(tasks: Sequence[str]) -> bool:
    """True if the data of all tasks can be read. If not, `check_data` reports it before the first step."""
    try:
        for task in tasks:
            _load_task(task, tasks)
    except Exception:
        return False
    return True


def _load_task(task: str, tasks: Sequence[str]) -> None:
    with _hide_progress_bars():
        _task_manager(_needs_names(tasks), None).load([task])


def run_tasks(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    limit: int | None = None,
    world: World | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate a model on tasks. Return the results in the harness's format, or raise whatever the harness raises.

    `folder`: the user's task files. `limit`: number of examples per task. With a `world` of several processes the
    questions are divided: all ranks must call this, and all get the results. `quiet`: hide progress and skip standard
    errors. The state of random generators does not change.
    """
    _task_manager(_needs_names(tasks), folder)  # sets variables that must precede other imports of the harness
    from artel.training.harness_model import HarnessModel

    was_training = model.training
    model.eval()
    try:
        with _preserved_random_state(model.device), _hide_progress_bars() if quiet else nullcontext():
            harness_model = HarnessModel(model, tokenizer, _BATCH, world)
            return _evaluate(harness_model, tasks, folder=folder, limit=limit, bootstraps=0 if quiet else _BOOTSTRAPS)
    finally:
        model.train(was_training)


def _evaluate(model: Any, tasks: Sequence[str], *, folder: str | None, limit: int | None, bootstraps: int) -> Any:
    manager = _task_manager(_needs_names(tasks), folder)
    from lm_eval import evaluate

    seeded = _seeded_tasks(manager, tasks)
    results = evaluate(model, seeded, limit=limit, log_samples=False, bootstrap_iters=bootstraps)
    assert results is not None  # None only on ranks of the harness's own parallelism
    # The content of the harness's --output_path, without samples and functions, which are not JSON.
    return {name: results[name] for name in ("results", "versions", "n-shot", "higher_is_better", "n-samples")}


def _seeded_tasks(manager: Any, tasks: Sequence[str]) -> Any:
    """Prepare the tasks like the harness's `simple_evaluate`, which would also list all installed packages."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    loaded = manager.load(list(tasks))
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def task_metrics(results: dict[str, Any]) -> dict[str, float]:
    """Return the harness's metrics by `task/metric`, or `task/metric/filter` if answers were filtered."""
    return {name: value for name, _, _, value in _iterate_metrics(results)}


def task_directions(results: dict[str, Any]) -> dict[str, bool | None]:
    """Return for each metric True if higher is better; None if the tasks of a group differ."""
    higher = results["higher_is_better"]
    return {name: higher.get(task, {}).get(metric) for name, task, metric, _ in _iterate_metrics(results)}


def _iterate_metrics(results: dict[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """Yield (name, task, metric, value)."""
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if isinstance(value, int | float) and filter_name and not metric.endswith("_stderr"):
                suffix = "" if filter_name == "none" else f"/{filter_name}"
                yield f"{task}/{metric}{suffix}", task, metric, float(value)


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _needs_names(tasks: Sequence[str]) -> bool:
    return not all(map(_is_file, tasks))


@cache
def _task_manager(defaults: bool, folder: str | None) -> Any:
    """Return the harness's task manager. `defaults`: also read the harness's own tasks, in 8 s of CPU time."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "false")  # datasets would report each file it opens
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder, include_defaults=defaults)


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    """Hide progress bars of the harness and of datasets, which would overlap the run's."""
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore all random generators afterwards: the harness seeds every one."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
