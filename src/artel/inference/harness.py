"""`artel evaluate --tasks`: tasks of lm-evaluation-harness for a model that is opened."""

from __future__ import annotations

from typing import Any

from artel.errors import InputError
from artel.inference.open import OpenedModel
from artel.training.tasks import harness


def run_tasks(opened: OpenedModel, tasks: list[str], folder: str | None, limit: int | None) -> dict[str, Any]:
    """The harness's results of a model on `tasks`, names or YAML files, in the harness's format.

    `folder` holds the user's task files; `limit` is the number of examples of each task. Raises InputError for an
    unknown task, a model that writes no text, and where the harness is not installed.
    """
    if not opened.objective.generates:
        raise InputError.at(
            "--tasks",
            f"{opened.name} is no causal model, which the harness needs",
            "evaluate it by the metrics of its objective: leave --tasks out",
        )
    harness.check_known(tasks, "--tasks", folder)
    return harness.run_tasks(opened.model, opened.tokenizer, tasks, folder=folder, limit=limit)
