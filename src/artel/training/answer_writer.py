"""Writes answers to prompts and scores them: for the rounds of a run, and for a validation by rewards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash

from artel.generation.answers import SampledAnswer, sample_answers
from artel.host import usable_cores
from artel.messages import logger
from artel.objectives import Objective
from artel.objectives.hooks import RoundSettings
from artel.objectives.rollouts import Rollout
from artel.parallel import ParallelStrategy, World
from artel.rewards import Completion, RewardPool
from artel.tokens import StoreSplit
from artel.training.heartbeat import heartbeat

MAX_REWARD_PROCESSES = 4
"""Maximum number of reward processes per process of the run."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of a round."""

    number: int
    """Running number of the prompt in the run."""
    index: int
    """Index in its split."""
    epoch: int
    attempt: int = 0


@dataclass(slots=True)
class AnswerWriter:
    """Writes and scores answers to the prompts of a split. All ranks must call its methods together."""

    objective: Objective
    split: StoreSplit
    strategy: ParallelStrategy
    world: World
    pool: RewardPool
    seed: int
    show_progress: Callable[[str, float], None]
    """Called with the activity and the finished fraction."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that this process spent on each activity."""
    _activity: str = "writing"

    @property
    def settings(self) -> RoundSettings:
        settings = self.objective.rounds
        assert settings is not None
        return settings

    def write(self, questions: list[Question], answers: int) -> list[list[Rollout]]:
        """Return `answers` answers to each question, with their rewards."""

        def write_and_score(local_questions: list[Question]) -> list[list[Rollout]]:
            with self._measure("writing"):
                sampled = self._sample(local_questions, answers)
            with self._measure("scoring"):
                return self._score(local_questions, sampled)

        if self.strategy.holds_full_model:
            return self.world.map_over_ranks(write_and_score, questions)
        # A forward pass needs the weights of all ranks, so all ranks write every answer. The first rank scores them.
        groups = None
        if self.world.first:
            groups = write_and_score(questions)
        else:
            self._sample(questions, answers)
        first_groups = self.world.all_gather(groups)[0]
        assert first_groups is not None
        return first_groups

    @contextmanager
    def _measure(self, activity: str) -> Iterator[None]:
        self._activity = activity
        self._report(0.0)
        started = time.monotonic()
        yield
        self.seconds[activity] = self.seconds.get(activity, 0.0) + time.monotonic() - started

    def _report(self, fraction: float) -> None:
        heartbeat(f"{self._activity} answers")
        self.show_progress(f"{self._activity} answers", fraction)

    def _sample(self, questions: list[Question], answers: int) -> list[list[SampledAnswer]]:
        model, tokenizer = self.strategy.model, self.objective.tokenizer
        prompts = [
            self.objective.round_prompt(model, self.split.sample(question.index).ids.tolist()) for question in questions
        ]
        seeds = [[self._seed(question, answer) for answer in range(answers)] for question in questions]
        with self.strategy.generating():
            return sample_answers(
                model, tokenizer, prompts, seeds, self.settings.sampling,
                together=self.strategy.holds_full_model, on_progress=self._report,
            )  # fmt: skip

    def _seed(self, question: Question, answer: int) -> int:
        """Return the seed of an answer: a function of run, prompt, attempt and answer."""
        name = f"answer:{self.seed}:{question.number}:{question.attempt}:{answer}"
        return xxhash.xxh3_64_intdigest(name.encode()) >> 1

    def _score(self, questions: list[Question], sampled: list[list[SampledAnswer]]) -> list[list[Rollout]]:
        completions = []
        for question, group in zip(questions, sampled, strict=True):
            reference = self.split.reference(question.index)
            completions += [
                Completion(
                    prompt=reference["prompt"], text=answer.text, columns=reference["columns"],
                    tokens=len(answer.ids), cut_off=answer.cut_off,
                )
                for answer in group
            ]  # fmt: skip
        scores = self.pool.score(completions, self._report)
        failures: dict[int, dict[str, str]] = {}
        for position, name, reason in scores.failures:
            failures.setdefault(position, {})[name] = reason
        groups, position = [], 0
        for question, group in zip(questions, sampled, strict=True):
            ids = self.split.sample(question.index).ids.tolist()
            prompt = self.objective.tokenizer.decode(ids)
            rollouts = []
            for index, answer in enumerate(group):
                rewards = dict(zip(scores.names, map(_nan_to_none, scores.values[position]), strict=True))
                rollouts.append(
                    Rollout(
                        number=question.number, index=question.index, epoch=question.epoch, answer=index,
                        attempt=question.attempt, seed=self._seed(question, index), prompt_ids=ids, ids=answer.ids,
                        log_probs=answer.log_probs, text=answer.text, cut_off=answer.cut_off, rewards=rewards,
                        reward=_nan_to_none(scores.totals[position]), failures=failures.get(position, {}),
                        prompt=prompt,
                    )
                )  # fmt: skip
                position += 1
            groups.append(rollouts)
        return groups


def _nan_to_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def open_rewards(settings: RoundSettings, plugins: Sequence[str]) -> RewardPool:
    """Start the reward processes. Raise InputError if a reward function cannot be used."""
    pool = RewardPool(
        settings.rewards,
        plugins=plugins,
        seconds=settings.reward_seconds,
        memory_bytes=settings.reward_bytes,
        workers=min(MAX_REWARD_PROCESSES, usable_cores()),
    )
    logger.info("starting the reward functions: %s", ", ".join(pool.names))
    pool.check()
    return pool
