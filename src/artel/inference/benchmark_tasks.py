"""`artel evaluate --tasks`: runs tasks of lm-evaluation-harness, or of MTEB for embedders and rerankers.

MTEB (Muennighoff et al. 2023) needs the extra `mteb`. The data of a task come from the hub or its cache (HF_HOME).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.errors import InputError, Problem, missing_extra
from artel.inference.open import OpenedModel
from artel.training import task_harness

if TYPE_CHECKING:
    import torch


def run_tasks(opened: OpenedModel, tasks: list[str], folder: str | None, limit: int | None) -> dict[str, Any]:
    """Run `tasks`, given as names or YAML files, and return the results in the harness's format.

    A model that embeds or reranks runs MTEB's tasks, by name. `folder`: the user's task files. `limit`: number of
    examples per task. Raise InputError for an unknown task, for a model that neither package can evaluate, or if the
    package is not installed.
    """
    if {"embed", "rerank"} & set(opened.decoding.tasks):
        for value, key in ((folder, "--task-folder"), (limit, "--limit")):
            if value is not None:
                raise InputError.at(key, "is for lm-evaluation-harness; MTEB's tasks are run in full", "remove it")
        return run_mteb(opened, tasks)
    if not opened.objective.generates:
        raise InputError.at(
            "--tasks",
            f"{opened.name} generates neither text nor vectors, so neither harness can evaluate it",
            "evaluate it by the metrics of its objective, without --tasks",
        )
    task_harness.check_known(tasks, "--tasks", folder)
    return task_harness.run_tasks(opened.model, opened.tokenizer, tasks, folder=folder, limit=limit)


# MTEB


_EMPTY_TEXT = "."
"""Replacement for empty texts, which some tasks have."""


def run_mteb(opened: OpenedModel, names: Sequence[str]) -> dict[str, Any]:
    """Return metrics of a model that embeds or reranks: {"results": {task: {metric: value}}}.

    A task's main metric comes first, under its name in MTEB, then the metrics of its splits and languages. Raise
    InputError for unknown tasks, tasks with images or sound, and missing data.
    """
    if find_spec("mteb") is None:
        raise missing_extra("mteb", "mteb", "--tasks")
    return {"results": {task.metadata.name: task_metrics(opened, task) for task in _find_tasks(names)}}


def _find_tasks(names: Sequence[str]) -> list[Any]:
    """Return tasks by name. Raise InputError with all tasks that are unknown or not about text."""
    import mteb

    tasks, problems = [], []
    for name in names:
        try:
            task = mteb.get_task(name)
        except KeyError as error:
            hint = str(error).rpartition("not found")[2].strip("\"'. ")
            problems.append(Problem("--tasks", f"MTEB has no task {name}", hint or "see docs.mteb.org for their names"))
            continue
        if set(task.metadata.modalities) != {"text"}:
            message = f"{name} is about {', '.join(sorted(task.metadata.modalities))}"
            problems.append(Problem("--tasks", message, "use a text task"))
        tasks.append(task)
    if problems:
        raise InputError(problems)
    return tasks


def task_metrics(opened: OpenedModel, task: Any) -> dict[str, Any]:
    """Return MTEB's metrics of a model on a task (an `mteb.AbsTask`). Raise InputError without its data."""
    import mteb

    name = task.metadata.name
    try:
        task.load_data()
    except Exception as error:  # the hub, its cache and readers of data raise all types
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = "run it once with network access; its data is then cached in HF_HOME"
        raise InputError.at("--tasks", f"the data of {name} cannot be read: {detail}", fix) from None
    model = _Encoder(opened) if "embed" in opened.decoding.tasks else _CrossEncoder(opened)
    try:
        results = mteb.evaluate(model, tasks=[task], cache=None, overwrite_strategy="always", show_progress_bar=False)
    except TypeError as error:
        if "cross" not in str(error).lower():
            raise
        fix = "use a task of retrieval or reranking, or a model of objective embedding"
        raise InputError.at("--tasks", f"{name} is not a task for a reranker", fix) from None
    (result,) = results.task_results
    metrics: dict[str, Any] = {task.metadata.main_score: float(result.get_score())}
    return metrics | {"splits": result.scores}


class _MtebModel:
    """The attributes that MTEB requires of every model."""

    def __init__(self, opened: OpenedModel) -> None:
        from mteb.models.model_meta import ModelMeta

        self._opened = opened
        name = f"artel/{opened.name.strip('/').replace('/', '_') or 'model'}"
        self.mteb_model_meta = ModelMeta.create_empty(overwrites={"name": name, "revision": "here"})

    def _compute_answers(self, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        return self._opened.decoding.run_task(self._opened.model, task, inputs)


class _Encoder(_MtebModel):
    """An `mteb.EncoderProtocol`."""

    def encode(self, inputs: Iterable[Any], *, prompt_type: Any = None, **_: Any) -> np.ndarray:
        """Return float32 (texts, size). Queries and documents get their prefixes; texts of other tasks have none."""
        input_type = "" if prompt_type is None else str(prompt_type.value)
        vectors = []
        for batch in inputs:
            texts = [{"text": text, "input_type": input_type} for text in _read_texts(batch)]
            vectors.append(
                np.array([answer["embedding"] for answer in self._compute_answers("embed", texts)], dtype=np.float32)
            )
        return np.concatenate(vectors)

    def similarity(self, first: Any, second: Any) -> torch.Tensor:
        """Return the cosines of all pairs: (n, size), (m, size) -> (n, m)."""
        return _normalize(first) @ _normalize(second).T

    def similarity_pairwise(self, first: Any, second: Any) -> torch.Tensor:
        """Return the cosine of each pair of rows, (n,)."""
        return (_normalize(first) * _normalize(second)).sum(dim=-1)


class _CrossEncoder(_MtebModel):
    """An `mteb.CrossEncoderProtocol`."""

    def predict(self, inputs1: Iterable[Any], inputs2: Iterable[Any], **_: Any) -> np.ndarray:
        """Return the relevance of each document to its query, (pairs,)."""
        queries, documents = (
            [text for batch in inputs for text in _read_texts(batch)] for inputs in (inputs1, inputs2)
        )
        pairs = list(zip(queries, documents, strict=True))
        return np.array([answer["score"] for answer in self._compute_answers("rerank", pairs)])


def _read_texts(batch: Any) -> list[str]:
    return [text if text.strip() else _EMPTY_TEXT for text in batch["text"]]


def _normalize(vectors: Any) -> torch.Tensor:
    import torch

    vectors = torch.atleast_2d(torch.as_tensor(vectors, dtype=torch.float32))
    return torch.nn.functional.normalize(vectors, dim=-1)
