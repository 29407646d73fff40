"""/v1/embeddings, /v1/fill-mask, /v1/answers, /v1/classify, /v1/entities, /v1/rerank, /v1/score."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch

from artel.config import RunConfig
from artel.errors import InputError
from artel.generation.generate import Sampling
from artel.inference.serve.api_errors import ApiError
from artel.inference.serve.chat import as_record
from artel.inference.serve.schema import (
    AnswerRequest,
    ClassifyRequest,
    EmbeddingRequest,
    EntitiesRequest,
    FillMaskRequest,
    Message,
    RerankRequest,
    ScoreRequest,
)
from artel.inference.serve.served import ServedModel
from artel.objectives.masked import fill_masks
from artel.registry import FORMATS

_BATCH = 16
"""Texts in a forward pass."""


def embeddings(served: ServedModel, body: EmbeddingRequest) -> dict[str, Any]:
    """Return the vector of each text. Raise ApiError for a text of unsupported length, and for an unknown id or option.

    A model that learned vectors computes them by its objective. Otherwise the vector is the normalized mean of the last
    layer over the tokens of a text (Reimers and Gurevych 2019).
    """
    inputs = body.input if isinstance(body.input, list) else [body.input]
    texts: list[Any] = [inputs] if isinstance(inputs[0], int) else inputs
    vocabulary = served.opened.model.get_input_embeddings().weight.shape[0]
    for index, text in enumerate(texts):
        if not isinstance(text, str) and max(text) >= vocabulary:
            raise ApiError(400, f"text {index}: the model has no embedding for id {max(text)}", "input")
    vectors, tokens = (_embed_by_objective if served.can("embed") else _embed_by_mean)(served, texts, body)
    return {
        "object": "list",
        "model": served.name,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encode_vector(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _embed_by_objective(served: ServedModel, texts: list[Any], body: EmbeddingRequest) -> tuple[list[np.ndarray], int]:
    """Return (vectors, number of tokens), computed by the objective of an embedding model."""
    input_type = (body.input_type or "").removeprefix("search_")
    inputs = [{"text": text, "input_type": input_type, "dimensions": body.dimensions} for text in texts]
    opened = served.opened
    try:
        answers = opened.decoding.run_task(opened.model, "embed", inputs)
    except InputError as error:
        (problem,) = error.problems
        raise ApiError(400, problem.what, problem.where) from None
    for index, answer in enumerate(answers):
        if answer["truncated"]:
            message = f"text {index} has over {answer['tokens']:,} tokens, the limit of the model"
            raise ApiError(400, message, "input")
    vectors = [np.array(answer["embedding"], dtype=np.float32) for answer in answers]
    return vectors, sum(answer["tokens"] for answer in answers)


def _embed_by_mean(served: ServedModel, texts: list[Any], body: EmbeddingRequest) -> tuple[list[np.ndarray], int]:
    """Return (vectors, number of tokens) of an encoder that did not learn vectors."""
    for name in ("dimensions", "input_type"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is for models that learned it (objective embedding)", name)
    hf = served.opened.tokenizer.hf
    rows = [hf(text)["input_ids"] if isinstance(text, str) else text for text in texts]
    for index, row in enumerate(rows):
        if not 0 < len(row) <= served.context:
            raise ApiError(
                400, f"text {index} has {len(row):,} tokens; the model supports 1 to {served.context:,}", "input"
            )
    vectors = [
        vector
        for start in range(0, len(rows), _BATCH)
        for vector in _compute_mean_vectors(served, rows[start : start + _BATCH])
    ]
    return vectors, sum(map(len, rows))


@torch.no_grad()
def _compute_mean_vectors(served: ServedModel, rows: list[list[int]]) -> np.ndarray:
    """Return the normalized mean of the last layer for each row, float32 (rows, width)."""
    model = served.opened.model
    longest = max(map(len, rows))
    pad = served.opened.tokenizer.pad_id
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    hidden = model.eval().base_model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


def _encode_vector(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]


def fill(served: ServedModel, body: FillMaskRequest) -> dict[str, Any]:
    """Return each text with its masks filled. Raise ApiError for a text without a mask, or too long."""
    opened = served.opened
    texts = [body.input] if isinstance(body.input, str) else body.input
    data = []
    for index, text in enumerate(texts):
        try:
            filled = fill_masks(opened.model, opened.tokenizer, text, body.top_k)
        except InputError as error:
            raise ApiError(400, f"text {index} {error.problems[0].what}", "input") from None
        masks = [[{"token": token, "score": score} for token, score in mask] for mask in filled.candidates]
        data.append({"index": index, "text": filled.text, "masks": masks})
    return {"object": "list", "model": served.name, "mask_token": opened.tokenizer.hf.mask_token, "data": data}


def answer(served: ServedModel, body: AnswerRequest) -> dict[str, Any]:
    """Return the answer to a question from a document. Raise ApiError if the model cannot read them."""
    opened = served.opened
    try:
        reply = opened.decoding.reply(opened.model, body.question, body.context, Sampling())
    except InputError as error:
        raise ApiError(400, str(error.problems[0].what), "context") from None
    result = reply.to_json or {}
    score = result.get("score")
    return {
        "object": "answer",
        "model": served.name,
        "answer": result.get("answer") or "",
        "start": result.get("start"),
        "end": result.get("end"),
        "score": score if score is not None and math.isfinite(score) else None,
        "kind": result.get("class"),
    }


def classify(served: ServedModel, body: ClassifyRequest) -> dict[str, Any]:
    """Return the label of each input, with probabilities. Raise ApiError for an empty text or an unsupported pair."""
    inputs: list[Any] = [body.input] if isinstance(body.input, str) else body.input
    reads_pairs = _reads_pairs(served.opened.run)
    for index, entry in enumerate(inputs):
        path = "input" if isinstance(body.input, str) else f"input.{index}"
        if isinstance(entry, str):
            _check_not_empty(entry, path)
            continue
        if not reads_pairs:
            message = f"{path} is a pair of texts, but the model was trained on single texts"
            raise ApiError(400, message, "input")
        for position, text in enumerate(entry):
            _check_not_empty(text, f"{path}.{position}")
    return _list_response(served, run_task(served, "classify", inputs))


def entities(served: ServedModel, body: EntitiesRequest) -> dict[str, Any]:
    """Return the entities of each text, as spans of characters. Raise ApiError for an unusable text."""
    inputs = [body.input] if isinstance(body.input, str) else body.input
    return _list_response(served, run_task(served, "entities", inputs))


def rerank(served: ServedModel, body: RerankRequest) -> dict[str, Any]:
    """Return the documents, best first. Raise ApiError if the query is empty, or all documents are.

    Single documents may be empty, as with Cohere's server.
    """
    documents = body.texts
    _check_not_empty(body.query, "query")
    if not any(document.strip() for document in documents):
        raise ApiError(400, "documents are all empty", "documents")
    answers = run_task(served, "rerank", [[body.query, document] for document in documents])
    scores = [float(answer["score"]) for answer in answers]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if body.return_documents else {})
        for index in order
    ]
    return {"model": served.name, "results": results}


def score(served: ServedModel, body: ScoreRequest) -> dict[str, Any]:
    """Return the score of each pair of texts. Raise ApiError if the numbers of texts do not match."""
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    first = _first_texts(body.text_1)
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise ApiError(400, f"has {len(first)} texts, but text_2 has {len(second)}: use one, or equally many", "text_1")
    answers = run_task(served, "score", list(zip(first, second, strict=True)))
    return _list_response(served, [{"object": "score", **answer} for answer in answers])


def _first_texts(text_1: str | list[str] | list[Message]) -> list[Any]:
    """Return the first text of each pair, or a conversation. Raise ApiError if a tool call is invalid."""
    if isinstance(text_1, str):
        return [text_1]
    messages = [as_record(index, item) for index, item in enumerate(text_1) if isinstance(item, Message)]
    return [messages] if messages else list(text_1)


def run_task(served: ServedModel, task: str, inputs: list[Any], param: str = "input") -> list[dict[str, Any]]:
    """Return the answers of the model's objective. Raise ApiError for `param` if it rejects the inputs."""
    opened = served.opened
    try:
        return opened.decoding.run_task(opened.model, task, inputs)
    except InputError as error:
        raise ApiError(400, error.problems[0].what, param) from None


def _reads_pairs(run: RunConfig | None) -> bool:
    """True unless the run file shows that the model was trained on single texts only."""
    if run is None or run.data.from_store:
        return True
    return any(source.second or FORMATS.get_module(source.format) for source in run.data.sources)


def _check_not_empty(text: str, path: str) -> None:
    """Raise ApiError for a blank text. `path`: its path in the body."""
    if not text.strip():
        raise ApiError(400, f"{path} is empty", path.partition(".")[0])


def _list_response(served: ServedModel, answers: list[dict[str, Any]]) -> dict[str, Any]:
    data = [{"index": index, **answer} for index, answer in enumerate(answers)]
    return {"object": "list", "model": served.name, "data": data}
