"""EleutherAI's lm-evaluation-harness (Gao et al. 2021), for models that write text. Needs the extra `tasks`."""

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
"""Requests in a forward pass."""
_BOOTSTRAPS = 100_000
"""For the errors of metrics that have no formula: the harness's own number."""


def check_tasks(config: RunConfig) -> None:
    """Raise InputError where a run's `validate.tasks` cannot be answered, as far as that is known before the texts."""
    if not config.validate_.tasks:
        return
    if not objective_type(config).generates:
        what = f"{config.objective} makes no model that writes text, which the harness needs"
        raise InputError.at(KEY, what, "leave it out: the objective's own metrics are computed")
    check_known(config.validate_.tasks, KEY)
    if goes_by_task(config) and _is_readable(config.validate_.tasks):
        check_best(config)


def goes_by_task(config: RunConfig) -> bool:
    """Whether `checkpoint.best` is a figure of `validate.tasks`: TASK/METRIC."""
    best = config.checkpoint.best
    return best is not None and "/" in best and best not in objective_type(config).better


def check_best(config: RunConfig) -> None:
    """Raise InputError where `checkpoint.best` is to be a figure of `validate.tasks`, and is none of them.

    Their names are those that the harness gives for answers by chance to the first example of each.
    """
    if not goes_by_task(config):
        return
    from lm_eval.models.dummy import DummyLM

    best, tasks = config.checkpoint.best, config.validate_.tasks
    assert best is not None
    try:
        with _same_random_state(torch.device("cpu")), _quiet():
            directions = task_directions(_results(DummyLM(), tasks, folder=None, limit=1, bootstraps=0))
    except Exception as error:  # of tasks that cannot be asked so
        fix = "write a figure of another task, or one of the objective's"
        raise InputError.at(_BEST, f"the figures of validate.tasks are unknown: {_reason(error)}", fix) from None
    if best not in directions:
        near = get_close_matches(best, directions, 3, cutoff=0.5) or list(directions)[:10]
        raise InputError.at(_BEST, f"{best!r} is no figure of validate.tasks", f"write one of: {', '.join(near)}")
    if directions[best] is None:
        what = f"the harness does not say whether a higher {best} is better"
        raise InputError.at(_BEST, what, "write a figure of one of its tasks")


def check_known(tasks: Sequence[str], key: str, folder: str | None = None) -> None:
    """Raise InputError where the harness is not installed, and for tasks that it does not know, and files not there."""
    if find_spec("lm_eval") is None:
        raise missing_extra("lm_eval", "tasks", key)
    problems = []
    for task in tasks:
        if _is_file(task):
            if not Path(task).is_file():
                problems.append(Problem(key, f"there is no file {task}", "write a task's name, or its YAML file"))
        elif task not in _manager(_needs_names(tasks), folder).task_index:
            fix = "lm-eval ls tasks names them; one of your own is its YAML file: tasks/NAME.yaml"
            problems.append(Problem(key, f"the harness knows no {task!r}", fix))
    if problems:
        raise InputError(problems)


def check_data(tasks: Sequence[str]) -> None:
    """Raise InputError for tasks whose files are wrong, or whose data cannot be read: they are read here."""
    for task in tasks:
        try:
            _read(task, tasks)
        except Exception as error:  # whatever Jinja, YAML and datasets raise
            fix = "fetch its data once where there is a network; a file of your own is described by the harness's docs"
            raise InputError.at(KEY, f"{task} cannot be read: {_reason(error)}", fix) from None


def _is_readable(tasks: Sequence[str]) -> bool:
    """Whether the data of all tasks is here, or can be fetched; if not, `check_data` says so before the first step."""
    try:
        for task in tasks:
            _read(task, tasks)
    except Exception:
        return False
    return True


def _read(task: str, tasks: Sequence[str]) -> None:
    with _quiet():
        _manager(_needs_names(tasks), None).load([task])


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
    """The harness's results of a model on tasks, in the harness's format.

    `folder` holds the user's task files; `limit` is the number of examples of each task. With a `world` of several
    processes, each answers a share of the questions; all of them call this, and all get the results. `quiet` leaves out
    the harness's progress and its errors of measurement. The state of random generators does not change.

    Raises whatever the harness raises.
    """
    _manager(_needs_names(tasks), folder)  # its settings hold before the rest of the harness is imported
    from artel.training.tasks.model import HarnessModel

    was_training = model.training
    model.eval()
    try:
        with _same_random_state(model.device), _quiet() if quiet else nullcontext():
            harness_model = HarnessModel(model, tokenizer, _BATCH, world)
            return _results(harness_model, tasks, folder=folder, limit=limit, bootstraps=0 if quiet else _BOOTSTRAPS)
    finally:
        model.train(was_training)


def _results(model: Any, tasks: Sequence[str], *, folder: str | None, limit: int | None, bootstraps: int) -> Any:
    manager = _manager(_needs_names(tasks), folder)
    from lm_eval import evaluate

    seeded = _seeded_tasks(manager, tasks)
    results = evaluate(model, seeded, limit=limit, log_samples=False, bootstrap_iters=bootstraps)
    assert results is not None  # None on ranks of the harness's own
    # What the harness's --output_path writes, without samples and functions, which are no JSON.
    return {name: results[name] for name in ("results", "versions", "n-shot", "higher_is_better", "n-samples")}


def _seeded_tasks(manager: Any, tasks: Sequence[str]) -> Any:
    """The tasks as the harness's own `simple_evaluate` prepares them, which also lists every package there is."""
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


def task_figures(results: dict[str, Any]) -> dict[str, float]:
    """The metrics of the harness's results by `task/metric`; `task/metric/filter` where an answer was filtered."""
    return {name: value for name, _, _, value in _figures(results)}


def task_directions(results: dict[str, Any]) -> dict[str, bool | None]:
    """Of each figure whether higher is better, as the harness has it; None where the tasks of a group differ in it."""
    higher = results["higher_is_better"]
    return {name: higher.get(task, {}).get(metric) for name, task, metric, _ in _figures(results)}


def _figures(results: dict[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """(name, task, metric, value)."""
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
                yield f"{task}/{metric}" + ("" if kind == "none" else f"/{kind}"), task, metric, float(value)


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _needs_names(tasks: Sequence[str]) -> bool:
    return not all(map(_is_file, tasks))


@cache
def _manager(defaults: bool, folder: str | None) -> Any:
    """What knows tasks by name; to read the harness's own takes eight seconds of processor time."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "false")  # datasets would tell its makers of each file it opens
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder, include_defaults=defaults)


@contextmanager
def _quiet() -> Iterator[None]:
    """Bars of the harness and of datasets would stand in the run's own."""
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    """The harness seeds every generator there is."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
