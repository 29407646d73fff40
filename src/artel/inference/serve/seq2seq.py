"""/v1/completions of encoder-decoder models, which transform one text into another."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from artel.inference.serve.api_errors import ApiError
from artel.inference.serve.completions import Usage, event
from artel.inference.serve.limits import Deadline
from artel.inference.serve.metrics import Metrics
from artel.inference.serve.schema import CompletionRequest
from artel.inference.serve.served import ServedModel
from artel.inference.serve.tasks import run_task

_NEUTRAL_VALUES: dict[str, Any] = {
    "stop": [],
    "logprobs": None,
    "logit_bias": {},
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Unsupported settings, and the value that turns each one off."""


class Seq2SeqCompletions:
    """The texts of one request, cut off when `deadline` has passed."""

    def __init__(self, served: ServedModel, body: CompletionRequest, metrics: Metrics, deadline: Deadline) -> None:
        """Raise ApiError for settings that the model does not support."""
        self._served, self._body, self._metrics = served, body, metrics
        self._inputs = _make_inputs(served, body, deadline)
        self._usage = Usage()
        self._response_fields = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    async def full_response(self) -> dict[str, Any]:
        """Return the response. Raise ApiError if a prompt is too long."""
        answers = await self._served.work(lambda: run_task(self._served, "generate", self._inputs, "prompt"))
        for answer in answers:
            _check_not_truncated(answer)
        for answer in answers:
            self._count_tokens(answer)
        choices = [_make_choice(index, answer["text"], answer) for index, answer in enumerate(answers)]
        return self._response_fields | {"choices": choices, "usage": self._usage.to_json()}

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events, one text after another: in chunks, or as a whole with beam search.

        Raise ApiError if the first text fails before the first event. Later errors are events.
        """
        options = self._body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        has_started = False
        try:
            async with aclosing(self._iterate_choices()) as choices:
                async for choice in choices:
                    yield event(self._response_fields | {"choices": [choice]} | usage)
                    has_started = True
        except ApiError as error:
            if not has_started:
                raise
            yield event(error.body())
            return
        if usage:
            yield event(self._response_fields | {"choices": [], "usage": self._usage.to_json()})
        yield "data: [DONE]\n\n"

    async def _iterate_choices(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of all texts. Raise ApiError if a prompt is too long."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        client_connected = True

        def put(chunk: dict[str, Any] | None) -> None:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        def generate_all() -> None:
            try:
                for index, item in enumerate(self._inputs):
                    if client_connected:
                        self._generate_text(index, item, put)
            finally:
                put(None)

        generation = asyncio.ensure_future(self._served.work(generate_all))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            await generation
        finally:
            client_connected = False  # start no further text after the client disconnects

    def _generate_text(self, index: int, item: dict[str, Any], put: Callable[[dict[str, Any]], None]) -> None:
        """Generate one text, and `put` its chunks. Raise ApiError if its prompt is too long."""
        sent_text = ""

        def on_text(text: str) -> None:
            nonlocal sent_text
            sent_text += text
            put(_make_choice(index, text))

        (answer,) = run_task(self._served, "generate", [item | {"on_text": on_text}], "prompt")
        _check_not_truncated(answer)
        self._count_tokens(answer)
        put(_make_choice(index, answer["text"].removeprefix(sent_text), answer))

    def _count_tokens(self, answer: dict[str, Any]) -> None:
        self._usage.prompt_tokens += answer["prompt_tokens"]
        self._usage.completion_tokens += answer["tokens"]
        self._metrics.count_prompt(answer["prompt_tokens"])
        self._metrics.count_answer(answer["tokens"])


def _check_not_truncated(answer: dict[str, Any]) -> None:
    """Raise ApiError if the prompt was truncated."""
    if answer["truncated"]:
        message = f"a prompt has {answer['prompt_tokens']:,} tokens, more than the model reads"
        raise ApiError(400, message, "prompt", "context_length_exceeded")


def _make_inputs(served: ServedModel, body: CompletionRequest, deadline: Deadline) -> list[dict[str, Any]]:
    """Return the objective's input for each text. Raise ApiError for unsupported settings."""
    for name, neutral_value in _NEUTRAL_VALUES.items():
        if getattr(body, name) not in (None, neutral_value):
            raise ApiError(400, f"{served.name} is an encoder-decoder model and does not support {name}", name)
    sampling = served.opened.decoding.sampling(
        new_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        repetition_penalty=body.repetition_penalty,
    )
    if sampling.new_tokens > served.context:
        raise ApiError(
            400, f"a text may have at most {served.context:,} tokens", "max_tokens", "context_length_exceeded"
        )
    # The objective adds special tokens and the prefix of a prompt, so ids cannot be prompts.
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    if len(texts) < len(body.prompts):
        raise ApiError(400, "this model accepts texts, not token ids", "prompt")
    first_seed = body.seed if body.seed is not None else uuid.uuid4().int % 2**31
    seeds = [(first_seed + index) % 2**63 if sampling.temperature else 0 for index in range(body.n or 1)]
    return [
        {"text": text, "sampling": replace(sampling, seed=seed), "should_stop": deadline.expired}
        for text in texts
        for seed in seeds
    ]


def _make_choice(index: int, text: str, answer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a choice with a text or a chunk of it. The last chunk has the full `answer`."""
    finish = None if answer is None else answer["finish_reason"]
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
