"""The examples of lm-evaluation-harness's tasks (Gao et al. 2021). Needs the extra `tasks`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from artel.config import BenchmarkConfig
from artel.errors import InputError, Problem, missing_extra
from artel.text.decontamination.rows import Row


def task_problems(benchmark: BenchmarkConfig, key: str) -> list[Problem]:
    """Whether the harness is here. Which tasks it knows takes seconds to find out: that is checked as they are read."""
    return [] if find_spec("lm_eval") else list(missing_extra("lm_eval", "tasks", key).problems)


def task_version() -> str:
    """The version of the harness: another one may ask otherwise."""
    return version("lm_eval")


def task_rows(benchmark: BenchmarkConfig, key: str) -> Iterator[Row]:
    """Yield the examples of a task, or of all tasks of a group, that the harness evaluates on.

    Raises InputError for an unknown task, and where its data are not here.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "false")  # datasets would tell its makers of each file it opens
    from lm_eval.tasks import TaskManager

    # To list the harness's own tasks takes it half a minute of processor time.
    folder = benchmark.task_folder
    manager = TaskManager(include_path=folder or None, include_defaults=not folder)
    known = {*manager.all_tasks, *manager.all_groups, *manager.all_tags}
    if benchmark.task not in known:
        where = f"in {folder} there is no task" if folder else "the harness knows no task"
        fix = "lm-eval ls tasks names them; your own need task_folder; a file or folder is {path: NAME}"
        raise InputError.at(key, f"{where} {benchmark.task!r}", fix)
    try:
        tasks = manager.load([benchmark.task])["tasks"]
    except Exception as error:  # whatever datasets raises where its files are not here and no network is
        reason = str(error).strip().partition("\n")[0][:200]
        fix = f"fetch them once where there is a network: lm-eval run --tasks {benchmark.task} --limit 1 …"
        raise InputError.at(key, f"the data of {benchmark.task} cannot be read: {reason}", fix) from None
    for name, task in tasks.items():
        for number, example in enumerate(task.eval_docs):
            yield Row(f"{name}[{number}]", _query(task, example), _labels(task, example))


def _query(task: Any, example: Any) -> str:
    query = task.doc_to_text(example)
    if isinstance(query, str):
        return query
    choices = _choices(task, example)  # a number, as in winogrande: the choices are what is asked
    return choices[query] if isinstance(query, int) and query < len(choices) else ""


def _labels(task: Any, example: Any) -> list[str]:
    """The right answers; where the task has choices, the right ones of them."""
    target = task.doc_to_target(example)
    choices = _choices(task, example)
    targets = target if isinstance(target, list) else [target]
    return [choices[item] if isinstance(item, int) and item < len(choices) else str(item) for item in targets]


def _choices(task: Any, example: Any) -> list[str]:
    if getattr(task.config, "doc_to_choice", None) is None:
        return []
    return list(map(str, task.doc_to_choice(example)))
