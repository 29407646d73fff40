"""/v1/classify, /v1/entities, /v1/rerank, /v1/score: what models with a head for it are asked."""

from __future__ import annotations

from typing import Any

from artel.config import RunConfig
from artel.errors import InputError
from artel.inference.serve.chat_prompt import as_record
from artel.inference.serve.errors import ApiError
from artel.inference.serve.schema import (
    ClassifyRequest,
    EntitiesRequest,
    Message,
    RerankRequest,
    ScoreRequest,
)
from artel.inference.serve.served import ServedModel
from artel.registry import FORMATS


def classify(served: ServedModel, body: ClassifyRequest) -> dict[str, Any]:
    """Each input with its label and the probabilities of all. Raises ApiError."""
    inputs: list[Any] = [body.input] if isinstance(body.input, str) else body.input
    reads_pairs = _reads_pairs(served.opened.run)
    for number, entry in enumerate(inputs):
        place = "input" if isinstance(body.input, str) else f"input.{number}"
        if isinstance(entry, str):
            _refuse_empty(entry, place)
            continue
        if not reads_pairs:
            what = f"{place} is a pair of texts, and the model was trained on single texts; give a text"
            raise ApiError(400, what, "input")
        for side, text in enumerate(entry):
            _refuse_empty(text, f"{place}.{side}")
    return _listed(served, ask(served, "classify", inputs))


def entities(served: ServedModel, body: EntitiesRequest) -> dict[str, Any]:
    """Each text with what is named in it, as spans of characters: none in an empty text. Raises ApiError."""
    inputs = [body.input] if isinstance(body.input, str) else body.input
    return _listed(served, ask(served, "entities", inputs))


def rerank(served: ServedModel, body: RerankRequest) -> dict[str, Any]:
    """The documents, the best one first.

    Of many documents some may be empty, as Cohere's server takes them. Raises ApiError.
    """
    documents = body.texts
    _refuse_empty(body.query, "query")
    if not any(document.strip() for document in documents):
        raise ApiError(400, "documents has empty texts alone; give texts with words in them", "documents")
    answers = ask(served, "rerank", [[body.query, document] for document in documents])
    scores = [float(answer["score"]) for answer in answers]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if body.return_documents else {})
        for index in order
    ]
    return {"model": served.name, "results": results}


def score(served: ServedModel, body: ScoreRequest) -> dict[str, Any]:
    """The score of each pair of texts. Raises ApiError."""
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    first = _firsts(body.text_1)
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise ApiError(400, f"has {len(first)} texts, and text_2 {len(second)}: give one, or as many", "text_1")
    answers = ask(served, "score", list(zip(first, second, strict=True)))
    return _listed(served, [{"object": "score", **answer} for answer in answers])


def _firsts(given: str | list[str] | list[Message]) -> list[Any]:
    """Texts, or one conversation. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    turns = [as_record(number, one) for number, one in enumerate(given) if isinstance(one, Message)]
    return [turns] if turns else list(given)


def ask(served: ServedModel, task: str, inputs: list[Any], param: str = "input") -> list[dict[str, Any]]:
    """The answers of its objective. Raises ApiError, of the key `param`."""
    opened = served.opened
    try:
        return opened.objective.answers(opened.model, task, inputs)
    except InputError as error:
        raise ApiError(400, error.problems[0].what, param) from None


def _reads_pairs(run: RunConfig | None) -> bool:
    """False if the model of a run has learned single texts alone, as far as its run file tells."""
    if run is None or run.data.from_store:
        return True
    return any(source.second or FORMATS.module_of(source.format) for source in run.data.sources)


def _refuse_empty(text: str, place: str) -> None:
    """Raise ApiError for a text without a word. `place` is its path in the body."""
    if not text.strip():
        raise ApiError(400, f"{place} is empty; give a text with words in it", place.partition(".")[0])


def _listed(served: ServedModel, answers: list[dict[str, Any]]) -> dict[str, Any]:
    data = [{"index": index, **answer} for index, answer in enumerate(answers)]
    return {"object": "list", "model": served.name, "data": data}
