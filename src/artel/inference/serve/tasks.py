"""/v1/classify, /v1/entities, /v1/rerank: what models with a head for it are asked."""

from __future__ import annotations

from typing import Any

from artel.errors import InputError
from artel.inference.serve.errors import ApiError
from artel.inference.serve.schema import ClassifyRequest, EntitiesRequest, RerankRequest
from artel.inference.serve.served import ServedModel


def classify(served: ServedModel, body: ClassifyRequest) -> dict[str, Any]:
    """Each input with its label and the probabilities of all. Raises ApiError."""
    inputs = [body.input] if isinstance(body.input, str) else body.input
    return _listed(served, _ask(served, "classify", inputs))


def entities(served: ServedModel, body: EntitiesRequest) -> dict[str, Any]:
    """Each text with what is named in it, as spans of characters. Raises ApiError."""
    inputs = [body.input] if isinstance(body.input, str) else body.input
    return _listed(served, _ask(served, "entities", inputs))


def rerank(served: ServedModel, body: RerankRequest) -> dict[str, Any]:
    """The documents, the best one first. Raises ApiError."""
    answers = _ask(served, "rerank", [[body.query, document] for document in body.documents])
    scores = [float(answer["score"]) for answer in answers]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": body.documents[index]}} if body.return_documents else {})
        for index in order
    ]
    return {"model": served.name, "results": results}


def _ask(served: ServedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
    opened = served.opened
    try:
        return opened.objective.answers(opened.model, task, inputs)
    except InputError as error:
        raise ApiError(400, error.problems[0].what, "input") from None


def _listed(served: ServedModel, answers: list[dict[str, Any]]) -> dict[str, Any]:
    data = [{"index": index, **answer} for index, answer in enumerate(answers)]
    return {"object": "list", "model": served.name, "data": data}
