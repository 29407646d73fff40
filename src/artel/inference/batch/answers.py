"""What a model makes of many prompts: written by the engine, many at once; by an encoder, one after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from artel.errors import InputError, Problem
from artel.inference.batch.prompts import RESERVED, Prompt, refuse
from artel.inference.engine.base import Engine
from artel.inference.engine.make import make_engine
from artel.inference.engine.many import WrittenText, write_texts
from artel.inference.engine.sequential import SequentialEngine
from artel.inference.open import OpenedModel
from artel.models.generate import Sampling, check_embedded
from artel.models.loading.structure import position_limit
from artel.objectives.types import GenerationPrompt
from artel.tokens.tokenizer.chat_template import TemplateRefuses, prompt_ids

Tell = Callable[[str], None]
_AT_ONCE, _AT_ONCE_ON_CPU = 64, 16
_TASK = "generate"


def answers(
    opened: OpenedModel, prompts: Sequence[Prompt], start: int, sampling: Sampling, tell: Tell
) -> Generator[dict[str, Any], None, None]:
    """The results of the prompts from number `start` on, in order: their own fields and what was made of them.

    Prompt i is sampled with the seed `sampling.seed + i`, so that its text does not depend on those beside it.
    Raises InputError, with all prompts that the model cannot take where that can be told beforehand.
    """
    _check_kinds(opened, prompts[start:])
    if _TASK in opened.objective.tasks:
        yield from _written_for(opened, prompts[start:], start, sampling)
        return
    begin = _beginnings(opened, prompts[start:])
    if begin is None:
        for number, prompt in enumerate(prompts[start:], start):
            yield _reply(opened, prompt, replace(sampling, seed=sampling.seed + number))
        return
    with closing(write_beginnings(opened, begin, sampling, tell, first=start)) as texts:
        for prompt, written in zip(prompts[start:], texts, strict=True):
            text = written.text
            if prompt.messages is not None:
                text = text.strip()  # as `artel chat` does: white space around an answer belongs to the template
            elif not opened.objective.continues:
                text = text.lstrip()
            yield prompt.fields | {"text": text, "finish_reason": written.finish_reason, "tokens": written.tokens}


def write_beginnings(
    opened: OpenedModel, begin: Sequence[GenerationPrompt], sampling: Sampling, tell: Tell, first: int = 0
) -> Generator[WrittenText, None, None]:
    """What the model writes at each beginning, in order; beginning i is sampled with the seed of prompt `first` + i."""
    window = position_limit(opened.model)
    at_once = _AT_ONCE_ON_CPU if opened.model.device.type == "cpu" else _AT_ONCE
    longest = max(len(one.ids) for one in begin) + sampling.new_tokens
    engine = _engine(opened, at_once, longest if window is None else min(longest, window + 1))
    tell(engine.note)
    with closing(engine):
        texts = write_texts(engine, opened.tokenizer, begin, sampling, window, at_once, first=first)
        with closing(texts):
            yield from texts


def _written_for(
    opened: OpenedModel, prompts: Sequence[Prompt], start: int, sampling: Sampling
) -> Generator[dict[str, Any], None, None]:
    """What a model writes for texts, some of which it reads together."""
    for first in range(0, len(prompts), _AT_ONCE):
        chunk = prompts[first : first + _AT_ONCE]
        asked = []
        for number, prompt in enumerate(chunk, start + first):
            seed = sampling.seed + number if sampling.temperature else sampling.seed
            asked.append({"text": prompt.text, "sampling": replace(sampling, seed=seed)})
        written = opened.objective.answers(opened.model, _TASK, asked)
        for prompt, answer in zip(chunk, written, strict=True):
            yield prompt.fields | {name: answer[name] for name in RESERVED}


def _engine(opened: OpenedModel, at_once: int, context: int) -> Engine:
    try:
        return make_engine(opened.model, opened.tokenizer, at_once, context)
    except InputError as error:  # keys and values of so long a text in a share of the free memory
        return SequentialEngine(opened.model, opened.tokenizer, f"one prompt after another: {error.problems[0].what}")


def _check_kinds(opened: OpenedModel, prompts: Sequence[Prompt]) -> None:
    """Raise InputError for prompts of a kind that the model does nothing with."""
    problems = []
    for prompt in prompts:
        if opened.objective.needs_context and prompt.context is None:
            what = f"{opened.name} answers questions about texts"
            problems.append(Problem(prompt.place, what, 'write {"question": "…", "context": "…"}'))
        elif prompt.context is not None and not (opened.objective.needs_context or opened.objective.takes_context):
            problems.append(Problem(prompt.place, f"{opened.name} answers no questions", 'write {"prompt": "…"}'))
        elif prompt.messages is not None and not opened.objective.generates:
            problems.append(Problem(prompt.place, f"{opened.name} does not talk", 'write {"prompt": "…"}'))
    refuse(problems)


def _beginnings(opened: OpenedModel, prompts: Sequence[Prompt]) -> list[GenerationPrompt] | None:
    """What the model continues at each prompt; None for a model that makes something else of it."""
    talk = _Talk(opened) if any(prompt.messages for prompt in prompts) else None
    found, problems = [], []
    for prompt in prompts:
        try:
            if prompt.messages is not None and talk is not None:
                begin: GenerationPrompt | None = talk.beginning(prompt.messages)
            else:
                begin = opened.objective.generation_prompt(opened.model, prompt.text)
            if begin is None:
                return None
            check_embedded(opened.model, opened.tokenizer, begin.ids)
            found.append(begin)
        except TemplateRefuses as refusal:
            what = f"the chat template refuses the conversation: {refusal}"
            problems.append(Problem(prompt.place, what, "write it as the template expects"))
        except InputError as error:
            problems += [Problem(prompt.place, problem.what, problem.fix) for problem in error.problems]
    refuse(problems)
    return found


class _Talk:
    """Conversations, as `artel chat` writes them."""

    def __init__(self, opened: OpenedModel) -> None:
        self._tokenizer = opened.tokenizer
        self._template = opened.chat_template()
        self._end = opened.turn_end(self._template)

    def beginning(self, messages: list[dict[str, str]]) -> GenerationPrompt:
        """Raises TemplateRefuses, InputError."""
        return GenerationPrompt(prompt_ids(self._tokenizer, self._template, list(messages)), self._end)


def _reply(opened: OpenedModel, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
    try:
        reply = opened.objective.reply(opened.model, prompt.text, prompt.context or "", sampling)
        made = reply.to_json or {"text": "".join(reply.pieces)}
    except InputError as error:
        problems = [Problem(prompt.place, problem.what, problem.fix) for problem in error.problems]
        raise InputError(problems) from None
    for name, value in prompt.fields.items():
        if made.get(name, value) != value:
            raise InputError.at(prompt.place, f"has a field {name!r}, which the result is to have", "call it otherwise")
    return prompt.fields | made
