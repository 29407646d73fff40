"""Tasks of EleutherAI's lm-evaluation-harness (Gao et al. 2021), for causal models. Needs the extra `tasks`."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from artel.errors import InputError, Problem, missing_extra
from artel.inference.open import OpenedModel


def run_tasks(opened: OpenedModel, tasks: list[str], folder: str | None, limit: int | None) -> dict[str, Any]:
    """The harness's results of a model on `tasks`, in the harness's format.

    `folder` holds the user's task files; `limit` is the number of examples of each task. Raises InputError for an
    unknown task, a model that is not causal, and where the harness is not installed.
    """
    if find_spec("lm_eval") is None:
        raise missing_extra("lm_eval", "tasks", "--tasks")
    if not opened.objective.generates:
        raise InputError.at(
            "--tasks",
            f"{opened.name} is no causal model, which the harness needs",
            "evaluate it by the metrics of its objective: leave --tasks out",
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        fix = "lm-eval ls tasks names them; your own need --task-folder"
        raise InputError([Problem("--tasks", f"the harness knows no {task!r}", fix) for task in unknown])
    device = str(opened.model.device)
    model = HFLM(opened.model, tokenizer=opened.tokenizer.hf, device=device, batch_size=8)
    results = lm_eval.simple_evaluate(model, tasks=tasks, limit=limit, task_manager=manager, log_samples=False)
    assert results is not None  # None on ranks other than the first
    # What the harness's --output_path writes, without samples and functions, which are no JSON.
    return {name: results[name] for name in ("results", "versions", "n-shot", "higher_is_better", "n-samples")}
