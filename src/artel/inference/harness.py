"""Tasks of EleutherAI's lm-evaluation-harness (Gao et al. 2021), for causal models; an extra."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from artel.errors import InputError, Problem, missing_extra
from artel.inference.open import Opened


def run_tasks(opened: Opened, tasks: list[str], folder: str | None, limit: int | None) -> dict[str, Any]:
    """The harness's own results of a model on its tasks, as it writes them.

    `folder` holds task files of your own; `limit` is the number of examples of each task. Raises InputError for an
    unknown task, a model that is not causal, and a harness that is not installed.
    """
    if find_spec("lm_eval") is None:
        raise missing_extra("lm_eval", "tasks", "--tasks")
    if not opened.objective.generates:
        raise InputError.at(
            "--tasks",
            f"{opened.name} is no causal model, which the harness needs",
            "judge it by its own figures: leave --tasks out",
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
    found = lm_eval.simple_evaluate(model, tasks=tasks, limit=limit, task_manager=manager, log_samples=False)
    assert found is not None  # only ranks other than the first get nothing
    # Samples and functions are not JSON; the rest is what the harness's own --output_path writes.
    return {name: found[name] for name in ("results", "versions", "n-shot", "higher_is_better", "n-samples")}
