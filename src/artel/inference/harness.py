"""`artel evaluate --tasks`: tasks of lm-evaluation-harness, or of MTEB, for a model that is opened."""

from __future__ import annotations

from typing import Any

from artel.errors import InputError
from artel.inference.mteb_tasks import run_mteb
from artel.inference.open import OpenedModel
from artel.training import task_harness


def run_tasks(opened: OpenedModel, tasks: list[str], folder: str | None, limit: int | None) -> dict[str, Any]:
    """The harness's results of a model on `tasks`, names or YAML files, in the harness's format; for a model that
    embeds or reranks, MTEB's of tasks by name.

    `folder` holds the user's task files; `limit` is the number of examples of each task. Raises InputError for an
    unknown task, a model that neither can ask, and where the package is not installed.
    """
    if {"embed", "rerank"} & set(opened.objective.tasks):
        for given, key in ((folder, "--task-folder"), (limit, "--limit")):
            if given is not None:
                raise InputError.at(key, "is of lm-evaluation-harness; MTEB's tasks are run whole", "leave it out")
        return run_mteb(opened, tasks)
    if not opened.objective.generates:
        raise InputError.at(
            "--tasks",
            f"{opened.name} writes no text and gives no vectors: no harness of tasks can ask it",
            "evaluate it by the metrics of its objective: leave --tasks out",
        )
    task_harness.check_known(tasks, "--tasks", folder)
    return task_harness.run_tasks(opened.model, opened.tokenizer, tasks, folder=folder, limit=limit)
