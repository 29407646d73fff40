"""Answers to many prompts: generated concurrently by an engine, one after another by an encoder, or the best of n."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

from artel.errors import InputError, Problem
from artel.generation import GenerationPrompt
from artel.generation.generate import Sampling, check_embedded
from artel.generation.make import SequentialEngine, make_engine
from artel.generation.write import GeneratedText, write_texts
from artel.inference.batch.files import RESERVED, Prompt, raise_if_any
from artel.inference.open import OpenedModel
from artel.messages import logger
from artel.models.loading.structure import position_limit
from artel.tokens.tokenizer.chat_template import TemplateRejection, prompt_ids

_CONCURRENT, _CONCURRENT_ON_CPU = 64, 16
_GENERATE = "generate"


def generate_answers(
    opened: OpenedModel, prompts: Sequence[Prompt], start: int, sampling: Sampling
) -> Generator[dict[str, Any], None, None]:
    """Yield the results of the prompts from index `start` on, in order: their fields and the answer.

    Prompt i is sampled with the seed `sampling.seed + i`, so that its answer does not depend on other prompts. Raise
    InputError for prompts that the model cannot take, if possible for all of them before the first answer.
    """
    _check_prompt_types(opened, prompts[start:])
    if _GENERATE in opened.decoding.tasks:
        yield from _generate_task_answers(opened, prompts[start:], start, sampling)
        return
    generation_prompts = _make_generation_prompts(opened, prompts[start:])
    if generation_prompts is None:
        for index, prompt in enumerate(prompts[start:], start):
            yield _answer_prompt(opened, prompt, replace(sampling, seed=sampling.seed + index))
        return
    with closing(continue_prompts(opened, generation_prompts, sampling, first_index=start)) as texts:
        for prompt, generated in zip(prompts[start:], texts, strict=True):
            text = generated.text
            if prompt.messages is not None:
                text = text.strip()  # like `artel chat`, since whitespace around an answer belongs to the template
            elif not opened.decoding.continues:
                text = text.lstrip()
            yield prompt.fields | {"text": text, "finish_reason": generated.finish_reason, "tokens": generated.tokens}


def continue_prompts(
    opened: OpenedModel, prompts: Sequence[GenerationPrompt], sampling: Sampling, first_index: int = 0
) -> Generator[GeneratedText, None, None]:
    """Yield the text generated for each prompt, in order, the i-th with the seed of prompt `first_index` + i."""
    window = position_limit(opened.model)
    concurrency = _CONCURRENT_ON_CPU if opened.model.device.type == "cpu" else _CONCURRENT
    longest = max(len(prompt.ids) for prompt in prompts) + sampling.new_tokens
    context = longest if window is None else min(longest, window + 1)
    try:
        engine = make_engine(opened.model, opened.tokenizer, concurrency, context)
    except InputError as error:  # too little memory for keys and values
        note = f"one prompt after another: {error.problems[0].what}"
        engine = SequentialEngine(opened.model, opened.tokenizer, note)
    logger.info(engine.note)
    with closing(engine):
        texts = write_texts(engine, opened.tokenizer, prompts, sampling, window, concurrency, first_index)
        with closing(texts):
            yield from texts


def _generate_task_answers(
    opened: OpenedModel, prompts: Sequence[Prompt], start: int, sampling: Sampling
) -> Generator[dict[str, Any], None, None]:
    """Yield the results of an objective that generates text itself, a batch of prompts at a time."""
    for chunk_start in range(0, len(prompts), _CONCURRENT):
        chunk = prompts[chunk_start : chunk_start + _CONCURRENT]
        inputs = []
        for index, prompt in enumerate(chunk, start + chunk_start):
            seed = sampling.seed + index if sampling.temperature else sampling.seed
            inputs.append({"text": prompt.text, "sampling": replace(sampling, seed=seed)})
        answers = opened.decoding.run_task(opened.model, _GENERATE, inputs)
        for prompt, answer in zip(chunk, answers, strict=True):
            yield prompt.fields | {name: answer[name] for name in RESERVED}


def _check_prompt_types(opened: OpenedModel, prompts: Sequence[Prompt]) -> None:
    """Raise InputError for prompts of a type that the model does not accept: questions, messages or plain text."""
    problems = []
    for prompt in prompts:
        if opened.decoding.needs_context and prompt.context is None:
            message = f"{opened.name} answers questions about texts"
            problems.append(Problem(prompt.location, message, 'write {"question": "…", "context": "…"}'))
        elif prompt.context is not None and not (opened.decoding.needs_context or opened.decoding.takes_context):
            problems.append(
                Problem(prompt.location, f"{opened.name} does not answer questions", 'write {"prompt": "…"}')
            )
        elif prompt.messages is not None and not opened.objective.generates:
            problems.append(Problem(prompt.location, f"{opened.name} is not a chat model", 'write {"prompt": "…"}'))
    raise_if_any(problems)


def _make_generation_prompts(opened: OpenedModel, prompts: Sequence[Prompt]) -> list[GenerationPrompt] | None:
    """Return the token ids to continue for each prompt, or None if the model does not continue text."""
    template = opened.chat_template() if any(prompt.messages for prompt in prompts) else None
    end = None if template is None else opened.turn_end(template)
    generation_prompts, problems = [], []
    for prompt in prompts:
        try:
            if prompt.messages is not None and template is not None and end is not None:
                ids = prompt_ids(opened.tokenizer, template, list(prompt.messages))
                generation_prompt: GenerationPrompt | None = GenerationPrompt(ids, end)
            else:
                generation_prompt = opened.decoding.generation_prompt(opened.model, prompt.text)
            if generation_prompt is None:
                return None
            check_embedded(opened.model, opened.tokenizer, generation_prompt.ids)
            generation_prompts.append(generation_prompt)
        except TemplateRejection as refusal:
            message = f"the chat template raises an error: {refusal}"
            problems.append(Problem(prompt.location, message, "change the messages to what the template expects"))
        except InputError as error:
            problems += [Problem(prompt.location, problem.what, problem.fix) for problem in error.problems]
    raise_if_any(problems)
    return generation_prompts


def _answer_prompt(opened: OpenedModel, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
    try:
        reply = opened.decoding.reply(opened.model, prompt.text, prompt.context or "", sampling)
        result = reply.to_json or {"text": "".join(reply.pieces)}
    except InputError as error:
        problems = [Problem(prompt.location, problem.what, problem.fix) for problem in error.problems]
        raise InputError(problems) from None
    for name, value in prompt.fields.items():
        if result.get(name, value) != value:
            raise InputError.at(prompt.location, f"has a field {name!r}, which is reserved for the result", "rename it")
    return prompt.fields | result


# Best of n


_SCORE = "score"
_BEST_FIELDS = ("score", "answers")
"""Fields of a result in addition to RESERVED."""


def check_reward(opened: OpenedModel, reward: OpenedModel) -> None:
    """Raise InputError if the model does not generate answers, or the reward model does not score them."""
    if not opened.objective.generates:
        raise InputError.at("--best-of", f"{opened.name} does not generate answers to choose from", "remove it")
    if _SCORE not in reward.decoding.tasks:
        objective = reward.objective.config.objective
        message = f"{reward.name} is a model for {objective}, which does not score answers"
        raise InputError.at("--reward", message, "use a model of objective reward")


def best_answers(
    opened: OpenedModel, reward: OpenedModel, prompts: Sequence[Prompt], start: int, best_of: int, sampling: Sampling
) -> Generator[dict[str, Any], None, None]:
    """Yield the results of the prompts from index `start` on, in order: the best of `best_of` answers, and all.

    A reward model scores the answers (Stiennon et al. 2020, "Learning to summarize from human feedback"; Nakano et al.
    2021, "WebGPT"). Of equal scores the first wins. Answer j to prompt i is sampled with the seed `sampling.seed + i *
    best_of + j`. Raise InputError as `generate_answers` does, and for a prompt with a field that the result will have.
    """
    raise_if_any(
        [
            Problem(prompt.location, f"has a field {name!r}, which is reserved for the result", "rename it")
            for prompt in prompts[start:]
            for name in _BEST_FIELDS
            if name in prompt.fields
        ]
    )
    repeated = [prompt for prompt in prompts for _ in range(best_of)]
    with closing(generate_answers(opened, repeated, start * best_of, sampling)) as results:
        for prompt_index, prompt in enumerate(prompts[start:], start):
            answers = list(islice(results, best_of))
            question = prompt.text if prompt.messages is None else prompt.messages
            pairs = [(question, answer["text"]) for answer in answers]
            try:
                rewards = reward.decoding.run_task(reward.model, _SCORE, pairs)
            except InputError as error:
                raise InputError(
                    [Problem(prompt.location, problem.what, problem.fix) for problem in error.problems]
                ) from None
            scores = [answer["score"] for answer in rewards]
            best = max(range(best_of), key=scores.__getitem__)
            yield prompt.fields | {
                "text": answers[best]["text"],
                "score": scores[best],
                "finish_reason": answers[best]["finish_reason"],
                "tokens": sum(answer["tokens"] for answer in answers),
                "answers": [
                    {
                        "text": answer["text"],
                        "score": score,
                        "seed": sampling.seed + prompt_index * best_of + index,
                        "finish_reason": answer["finish_reason"],
                    }
                    for index, (answer, score) in enumerate(zip(answers, scores, strict=True))
                ],
            }
