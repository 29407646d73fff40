"""Of several answers to a prompt the one that a reward model gives the highest score (best-of-n).

Stiennon et al. 2020, "Learning to summarize from human feedback"; Nakano et al. 2021, "WebGPT".
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from artel.errors import InputError, Problem
from artel.inference.batch.answers import Tell, answers
from artel.inference.batch.prompts import Prompt, refuse
from artel.inference.open import OpenedModel
from artel.models.generate import Sampling

_TASK = "score"
_FIELDS = ("score", "answers")
"""What a result has beside a text."""


def check_reward(opened: OpenedModel, reward: OpenedModel) -> None:
    """Raise InputError where a model writes no answers, or the other one gives answers no score."""
    if not opened.objective.generates:
        raise InputError.at("--best-of", f"{opened.name} writes no answers to choose from", "leave it out")
    if _TASK not in reward.objective.tasks:
        learned = reward.objective.config.objective
        what = f"{reward.name} is a model for {learned}, which gives answers no score"
        raise InputError.at("--reward", what, "give a model of objective reward")


def best_answers(
    opened: OpenedModel,
    reward: OpenedModel,
    prompts: Sequence[Prompt],
    start: int,
    count: int,
    sampling: Sampling,
    tell: Tell,
) -> Generator[dict[str, Any], None, None]:
    """The results of the prompts from number `start` on, in order: the best of `count` answers, its score, and all.

    Answer j to prompt i is sampled with the seed `sampling.seed + i * count + j`. Of equal scores the first is best.
    Raises InputError as `answers` does, and where a prompt has a field that the result is to have.
    """
    refuse(
        [
            Problem(prompt.place, f"has a field {name!r}, which the result is to have", "call it otherwise")
            for prompt in prompts[start:]
            for name in _FIELDS
            if name in prompt.fields
        ]
    )
    repeated = [prompt for prompt in prompts for _ in range(count)]
    with closing(answers(opened, repeated, start * count, sampling, tell)) as made:
        for number, prompt in enumerate(prompts[start:], start):
            written = list(islice(made, count))
            asked = prompt.text if prompt.messages is None else prompt.messages
            pairs = [(asked, answer["text"]) for answer in written]
            try:
                scored = reward.objective.answers(reward.model, _TASK, pairs)
            except InputError as error:
                raise InputError([Problem(prompt.place, one.what, one.fix) for one in error.problems]) from None
            scores = [answer["score"] for answer in scored]
            best = max(range(count), key=scores.__getitem__)
            yield prompt.fields | {
                "text": written[best]["text"],
                "score": scores[best],
                "finish_reason": written[best]["finish_reason"],
                "tokens": sum(answer["tokens"] for answer in written),
                "answers": [
                    {
                        "text": answer["text"],
                        "score": score,
                        "seed": sampling.seed + number * count + place,
                        "finish_reason": answer["finish_reason"],
                    }
                    for place, (answer, score) in enumerate(zip(written, scores, strict=True))
                ],
            }
