"""`artel evaluate --tasks` of embeddings and rerankers: tasks of MTEB by name (Muennighoff et al. 2023).

Needs the extra `mteb`. A task's data come from the hub, or from its cache (HF_HOME) where it was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.errors import InputError, Problem, missing_extra
from artel.inference.open import OpenedModel

if TYPE_CHECKING:
    import torch

_EMPTY = "."
"""In place of a text without words: tasks have some."""


def run_mteb(opened: OpenedModel, names: Sequence[str]) -> dict[str, Any]:
    """The figures of a model that embeds or reranks on tasks of MTEB: {"results": {task: {figure: value}}}.

    Each task's main figure comes first, under its name in MTEB; the others are those of its splits and languages.
    Raises InputError for unknown tasks, tasks of images and sound, and data that are not here.
    """
    if find_spec("mteb") is None:
        raise missing_extra("mteb", "mteb", "--tasks")
    return {"results": {task.metadata.name: figures_on(opened, task) for task in _known(names)}}


def _known(names: Sequence[str]) -> list[Any]:
    """The tasks of these names. Raises InputError with all that are unknown, or not about texts."""
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
            what = f"{name} is about {', '.join(sorted(task.metadata.modalities))}"
            problems.append(Problem("--tasks", what, "name a task of texts"))
        tasks.append(task)
    if problems:
        raise InputError(problems)
    return tasks


def figures_on(opened: OpenedModel, task: Any) -> dict[str, Any]:
    """What MTEB measures of a model on a task (an `mteb.AbsTask`). Raises InputError."""
    import mteb

    name = task.metadata.name
    try:
        task.load_data()
    except Exception as error:  # of the hub, its cache, or what reads the data
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = "run it once where the hub can be reached; its data stay in HF_HOME"
        raise InputError.at("--tasks", f"the data of {name} cannot be read: {first}", fix) from None
    model = _Encoder(opened) if "embed" in opened.objective.tasks else _CrossEncoder(opened)
    try:
        done = mteb.evaluate(model, tasks=[task], cache=None, overwrite_strategy="always", show_progress_bar=False)
    except TypeError as error:
        if "cross" not in str(error).lower():
            raise
        fix = "name a task of retrieval or reranking, or give a model of objective embedding"
        raise InputError.at("--tasks", f"{name} is no task for a reranker", fix) from None
    (result,) = done.task_results
    figures: dict[str, Any] = {task.metadata.main_score: float(result.get_score())}
    return figures | {"splits": result.scores}


class _Model:
    """What MTEB asks of every model."""

    def __init__(self, opened: OpenedModel) -> None:
        from mteb.models.model_meta import ModelMeta

        self._opened = opened
        name = f"artel/{opened.name.strip('/').replace('/', '_') or 'model'}"
        self.mteb_model_meta = ModelMeta.create_empty(overwrites={"name": name, "revision": "here"})

    def _answers(self, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        return self._opened.objective.answers(self._opened.model, task, inputs)


class _Encoder(_Model):
    """An `mteb.EncoderProtocol`."""

    def encode(self, inputs: Iterable[Any], *, prompt_type: Any = None, **_: Any) -> np.ndarray:
        """float32 (texts, size). Queries and documents get their prompts; texts of other tasks have none."""
        kind = "" if prompt_type is None else str(prompt_type.value)
        found = []
        for batch in inputs:
            asked = [{"text": text, "input_type": kind} for text in _texts(batch)]
            found.append(np.array([each["embedding"] for each in self._answers("embed", asked)], dtype=np.float32))
        return np.concatenate(found)

    def similarity(self, one: Any, other: Any) -> torch.Tensor:
        """The cosines of each of the one (n, size) with each of the other (m, size): (n, m)."""
        return _unit(one) @ _unit(other).T

    def similarity_pairwise(self, one: Any, other: Any) -> torch.Tensor:
        """The cosine of each pair of rows: (n,)."""
        return (_unit(one) * _unit(other)).sum(dim=-1)


class _CrossEncoder(_Model):
    """An `mteb.CrossEncoderProtocol`."""

    def predict(self, inputs1: Iterable[Any], inputs2: Iterable[Any], **_: Any) -> np.ndarray:
        """(pairs,): how well each document answers its query."""
        queries, documents = ([text for batch in inputs for text in _texts(batch)] for inputs in (inputs1, inputs2))
        pairs = list(zip(queries, documents, strict=True))
        return np.array([answer["score"] for answer in self._answers("rerank", pairs)])


def _texts(batch: Any) -> list[str]:
    return [text if text.strip() else _EMPTY for text in batch["text"]]


def _unit(vectors: Any) -> torch.Tensor:
    import torch

    vectors = torch.atleast_2d(torch.as_tensor(vectors, dtype=torch.float32))
    return torch.nn.functional.normalize(vectors, dim=-1)
