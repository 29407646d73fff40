"""/v1/classify, /v1/entities, /v1/rerank, /v1/score: what models with a head for it are asked; and /v1/completions of
models that read the whole text first, and then write another for it.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from artel.errors import InputError
from artel.inference.serve.answers import Usage
from artel.inference.serve.chat_prompt import as_record
from artel.inference.serve.completions import event
from artel.inference.serve.errors import ApiError
from artel.inference.serve.metrics import Metrics
from artel.inference.serve.schema import (
    ClassifyRequest,
    CompletionRequest,
    EntitiesRequest,
    Message,
    RerankRequest,
    ScoreRequest,
)
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


def score(served: ServedModel, body: ScoreRequest) -> dict[str, Any]:
    """The score of each pair of texts. Raises ApiError."""
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    first = _firsts(body.text_1)
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise ApiError(400, f"has {len(first)} texts, and text_2 {len(second)}: give one, or as many", "text_1")
    answers = _ask(served, "score", list(zip(first, second, strict=True)))
    return _listed(served, [{"object": "score", **answer} for answer in answers])


_NEUTRAL: dict[str, Any] = {
    "stop": [],
    "logprobs": None,
    "logit_bias": {},
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Settings that choose tokens one by one, with the values that change nothing: these models search a whole text."""


class Patience:
    """How long somebody waits for a text: so many seconds from now, and at most until the context ends."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def __enter__(self) -> Patience:
        return self

    def __exit__(self, *error: object) -> None:
        self._until = -math.inf

    def is_over(self) -> bool:
        return time.monotonic() >= self._until


def completions(body: CompletionRequest) -> int:
    """Texts that a request asks for."""
    return len(_texts(body)) * (body.n or 1)


def complete(served: ServedModel, body: CompletionRequest, metrics: Metrics, patience: Patience) -> dict[str, Any]:
    """The text that the model writes for each prompt, cut off when `patience` is over. Raises ApiError."""
    for name, neutral in _NEUTRAL.items():
        if getattr(body, name) not in (None, neutral):
            raise ApiError(400, f"{served.name} searches a whole text, and knows no {name}", name)
    sampling = served.opened.objective.sampling(
        new_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        repetition_penalty=body.repetition_penalty,
    )
    if sampling.new_tokens > served.context:
        raise ApiError(400, f"a text has {served.context:,} tokens at most", "max_tokens", "context_length_exceeded")
    first = body.seed if body.seed is not None else uuid.uuid4().int % 2**31
    seeds = [(first + number) % 2**63 if sampling.temperature else 0 for number in range(body.n or 1)]
    asked = [
        {"text": text, "sampling": replace(sampling, seed=seed), "is_over": patience.is_over}
        for text in _texts(body)
        for seed in seeds
    ]
    answers = _ask(served, "generate", asked, "prompt")
    usage = Usage(sum(answer["prompt_tokens"] for answer in answers), sum(answer["tokens"] for answer in answers))
    for answer in answers:
        if answer["truncated"]:
            what = f"a prompt has more tokens than the model reads: {answer['prompt_tokens']:,}"
            raise ApiError(400, what, "prompt", "context_length_exceeded")
    metrics.prompt(usage.prompt_tokens)
    metrics.written(usage.completion_tokens)
    choices = [
        {"index": index, "text": answer["text"], "logprobs": None, "finish_reason": answer["finish_reason"]}
        for index, answer in enumerate(answers)
    ]
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.name,
        "choices": choices,
        "usage": usage.to_json(),
    }


def as_events(completion: dict[str, Any], body: CompletionRequest) -> Iterator[str]:
    """The same as server-sent events: each text whole, since it is searched as a whole."""
    usage = body.stream_options is not None and body.stream_options.include_usage
    shared = {name: completion[name] for name in ("id", "object", "created", "model")}
    for choice in completion["choices"]:
        yield event(shared | {"choices": [choice]} | ({"usage": None} if usage else {}))
    if usage:
        yield event(shared | {"choices": [], "usage": completion["usage"]})
    yield "data: [DONE]\n\n"


def _texts(body: CompletionRequest) -> list[str]:
    """Raises ApiError for prompts as ids: special tokens and the prefix belong to the model's own reading."""
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise ApiError(400, "this model is given texts, not ids", "prompt")
    return texts


def _firsts(given: str | list[str] | list[Message]) -> list[Any]:
    """Texts, or one conversation. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    turns = [as_record(number, one) for number, one in enumerate(given) if isinstance(one, Message)]
    return [turns] if turns else list(given)


def _ask(served: ServedModel, task: str, inputs: list[Any], param: str = "input") -> list[dict[str, Any]]:
    opened = served.opened
    try:
        return opened.objective.answers(opened.model, task, inputs)
    except InputError as error:
        raise ApiError(400, error.problems[0].what, param) from None


def _listed(served: ServedModel, answers: list[dict[str, Any]]) -> dict[str, Any]:
    data = [{"index": index, **answer} for index, answer in enumerate(answers)]
    return {"object": "list", "model": served.name, "data": data}
