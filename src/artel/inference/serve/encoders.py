"""/v1/embeddings, /v1/fill-mask, /v1/answers: what encoders are asked."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch

from artel.errors import InputError
from artel.inference.serve.errors import ApiError
from artel.inference.serve.schema import AnswerRequest, EmbeddingRequest, FillMaskRequest
from artel.inference.serve.served import ServedModel
from artel.models.generate import Sampling
from artel.objectives.masked import fill_masks

_ROWS = 16
"""Texts of a forward pass."""


def embeddings(served: ServedModel, body: EmbeddingRequest) -> dict[str, Any]:
    """The vector of each text, by the objective of a model that learned vectors; else the mean of the last layer over a
    text's tokens, of length 1 (Reimers and Gurevych 2019). Raises ApiError.
    """
    given = body.input if isinstance(body.input, list) else [body.input]
    texts: list[Any] = [given] if isinstance(given[0], int) else given
    vocabulary = served.opened.model.get_input_embeddings().weight.shape[0]
    for number, text in enumerate(texts):
        if not isinstance(text, str) and max(text) >= vocabulary:
            raise ApiError(400, f"text {number}: the model has no embedding for id {max(text)}", "input")
    vectors, tokens = (_learned if served.can("embed") else _means)(served, texts, body)
    return {
        "object": "list",
        "model": served.name,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _learned(served: ServedModel, texts: list[Any], body: EmbeddingRequest) -> tuple[list[np.ndarray], int]:
    """(vectors, tokens) of a model that learned vectors."""
    kind = (body.input_type or "").removeprefix("search_")
    inputs = [{"text": text, "input_type": kind, "dimensions": body.dimensions} for text in texts]
    opened = served.opened
    try:
        answers = opened.objective.answers(opened.model, "embed", inputs)
    except InputError as error:
        (problem,) = error.problems
        raise ApiError(400, problem.what, problem.where) from None
    for number, answer in enumerate(answers):
        if answer["truncated"]:
            what = f"text {number} has over {answer['tokens']:,} tokens, which is what the model takes"
            raise ApiError(400, what, "input")
    vectors = [np.array(answer["embedding"], dtype=np.float32) for answer in answers]
    return vectors, sum(answer["tokens"] for answer in answers)


def _means(served: ServedModel, texts: list[Any], body: EmbeddingRequest) -> tuple[list[np.ndarray], int]:
    """(vectors, tokens) of another encoder."""
    for name in ("dimensions", "input_type"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is for models that learned it (objective embedding)", name)
    hf = served.opened.tokenizer.hf
    rows = [hf(text)["input_ids"] if isinstance(text, str) else text for text in texts]
    for number, row in enumerate(rows):
        if not 0 < len(row) <= served.context:
            raise ApiError(
                400, f"text {number} has {len(row):,} tokens; the model takes 1 to {served.context:,}", "input"
            )
    vectors = [vector for at in range(0, len(rows), _ROWS) for vector in _vectors(served, rows[at : at + _ROWS])]
    return vectors, sum(map(len, rows))


@torch.no_grad()
def _vectors(served: ServedModel, rows: list[list[int]]) -> np.ndarray:
    """float32 (rows, width)."""
    model = served.opened.model
    longest = max(map(len, rows))
    pad = served.opened.tokenizer.pad_id
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    hidden = model.eval().base_model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


def _encoded(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]


def fill(served: ServedModel, body: FillMaskRequest) -> dict[str, Any]:
    """Each text with its masks filled. Raises ApiError."""
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
    """The answer to a question from a document. Raises ApiError."""
    opened = served.opened
    try:
        reply = opened.objective.reply(opened.model, body.question, body.context, Sampling())
    except InputError as error:
        raise ApiError(400, str(error.problems[0].what), "context") from None
    found = reply.to_json or {}
    score = found.get("score")
    return {
        "object": "answer",
        "model": served.name,
        "answer": found.get("answer") or "",
        "start": found.get("start"),
        "end": found.get("end"),
        "score": score if score is not None and math.isfinite(score) else None,
        "kind": found.get("class"),
    }
