"""Writes answers to prompts and scores them: for the rounds of a run, and for a validation by rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import xxhash
from transformers import PreTrainedModel

from artel.config import RewardTerm
from artel.errors import InputError
from artel.generation import GenerationPrompt
from artel.generation.answers import SampledAnswer, sample_answers
from artel.host import usable_cores
from artel.messages import logger
from artel.objectives import Objective
from artel.objectives.hooks import RoundSettings
from artel.objectives.rollouts import Rollout
from artel.parallel import ParallelStrategy, World
from artel.registry import REWARDS
from artel.rewards import Completion, RewardPool
from artel.tokens import Sample
from artel.training.drafts import Draft, Question
from artel.training.heartbeat import heartbeat
from artel.training.interaction import Interaction
from artel.training.remote_engine import RemoteEngine

MAX_REWARD_PROCESSES = 4
"""Maximum number of reward processes per process of the run."""
_ACTIVITIES = {
    "writing": "writing answers",
    "running": "running tools",
    "recomputing": "computing log-probabilities",
    "scoring": "scoring answers",
}


class Prompts(Protocol):
    """Prompts by their index: a split of a token store, or records that are not stored."""

    def sample(self, index: int) -> Sample:
        """Return the ids of a prompt."""
        ...

    def reference(self, index: int) -> dict[str, Any]:
        """Return `prompt`, a text or messages, and `columns`."""
        ...


@dataclass(slots=True)
class AnswerWriter:
    """Writes and scores answers to the prompts of a split. All ranks must call its methods together."""

    objective: Objective
    split: Prompts
    strategy: ParallelStrategy
    world: World
    pool: RewardPool | None
    """None if answers are not scored."""
    seed: int
    show_progress: Callable[[str, float], None]
    """Called with the activity and the finished fraction."""
    engine: RemoteEngine | None = None
    """Server that writes the answers; None: the model of `strategy` does."""
    is_training: bool = True
    """False for a validation: answers then have no penalty."""
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
            return self._score(self._write_drafts(local_questions, answers), answers)

        if self.strategy.holds_full_model:
            return self.world.map_over_ranks(write_and_score, questions)
        # A forward pass needs the weights of all ranks, so all ranks write every answer. The first rank scores them.
        drafts = self._write_drafts(questions, answers)
        return self.world.call_on_first(lambda: self._score(drafts, answers))

    @contextmanager
    def _measure(self, activity: str) -> Iterator[None]:
        self._activity = activity
        self._report(0.0)
        started = time.monotonic()
        yield
        self.seconds[activity] = self.seconds.get(activity, 0.0) + time.monotonic() - started

    def _report(self, fraction: float) -> None:
        heartbeat(_ACTIVITIES[self._activity])
        self.show_progress(_ACTIVITIES[self._activity], fraction)

    def _write_drafts(self, questions: list[Question], answers: int) -> list[Draft]:
        """Write `answers` answers to each question. All unfinished answers get their next reply together."""
        drafts: list[Draft] = []
        for question in questions:
            ids = self.prompt_ids(question)
            reference = self.split.reference(question.index) if self.settings.is_scored else {}
            new_tokens = min(self.settings.sampling.new_tokens, self.objective.config.data.block - len(ids))
            for answer in range(answers):
                dialogue = self.objective.dialogue(reference)
                drafts.append(Draft(question, answer, len(drafts), ids, reference, new_tokens, dialogue))
        interaction = Interaction(
            self.settings, self.strategy, self.world, self.pool, self.objective.tokenizer,
            lambda: self._measure("running"), self._report,
        )  # fmt: skip
        end = self.objective.round_prompt(self.strategy.model, [])
        interaction.open(drafts)
        while active := [draft for draft in drafts if not draft.is_over]:
            with self._measure("writing"):
                self._write_replies(active, end)
            interaction.answer(active, end)
        interaction.close(drafts)
        if self.engine is not None:
            with self._measure("recomputing"):
                self._recompute_log_probs(drafts, answers)
        return drafts

    def _recompute_log_probs(self, drafts: list[Draft], answers: int) -> None:
        """Keep the server's log-probabilities, and compute those of the model in training."""
        groups = [
            [draft.segments for draft in drafts[start : start + answers]] for start in range(0, len(drafts), answers)
        ]

        def compute(model: PreTrainedModel) -> list[list[float]]:
            results = []
            for finished, group in enumerate(groups, start=1):
                results += self.objective.answer_log_probs(model, group, self.world.device)
                self._report(finished / len(groups))
            return results

        log_probs = iter(self.strategy.infer(compute))
        for draft in drafts:
            draft.segments = [segment.with_log_probs(next(log_probs)) for segment in draft.segments]

    def prompt_ids(self, question: Question) -> list[int]:
        """Return the ids of a prompt; [] if its sample cannot be answered."""
        return self.objective.round_prompt_ids(self.split.sample(question.index))

    def _write_replies(self, drafts: list[Draft], end: GenerationPrompt) -> None:
        if self.engine is not None:
            self._request_replies(drafts, end)
            return
        with self.strategy.generating():
            replies = sample_answers(
                self.strategy.model,
                self.objective.tokenizer,
                [replace(end, ids=draft.next_ids) for draft in drafts],
                [[self._seed(draft.question, draft.answer, draft.replies)] for draft in drafts],
                self.settings.sampling,
                limits=[draft.space for draft in drafts],
                together=self.strategy.holds_full_model,
                on_progress=self._report,
            )
        for draft, (reply,) in zip(drafts, replies, strict=True):
            draft.add_reply(reply)

    def _request_replies(self, drafts: list[Draft], end: GenerationPrompt) -> None:
        """Let the server write the replies."""
        engine = self.engine
        assert engine is not None

        def request(local_drafts: list[Draft]) -> list[SampledAnswer]:
            return engine.sample(
                [replace(end, ids=draft.next_ids) for draft in local_drafts],
                [self._seed(draft.question, draft.answer, draft.replies) for draft in local_drafts],
                [draft.space for draft in local_drafts],
                self.settings.sampling,
                self._report,
            )

        # If the model is sharded, all ranks have the same drafts.
        replies = request(drafts) if self.strategy.holds_full_model else self.world.map_over_ranks(request, drafts)
        for draft, reply in zip(drafts, replies, strict=True):
            draft.add_reply(reply)

    def _seed(self, question: Question, answer: int, turn: int = 0) -> int:
        """Return the seed of a reply: a function of run, prompt, attempt, answer and turn."""
        name = f"answer:{self.seed}:{question.number}:{question.attempt}:{answer}" + (f":{turn}" if turn else "")
        return xxhash.xxh3_64_intdigest(name.encode()) >> 1

    def _score(self, drafts: list[Draft], answers: int) -> list[list[Rollout]]:
        """Return the rollouts of drafts, in groups of `answers`."""
        rollouts = [
            Rollout(
                number=draft.question.number, index=draft.question.index, epoch=draft.question.epoch,
                answer=draft.answer, attempt=draft.question.attempt, seed=self._seed(draft.question, draft.answer),
                prompt_ids=draft.segments[0].prompt_ids, ids=draft.segments[0].ids,
                log_probs=draft.segments[0].log_probs,
                engine_log_probs=draft.segments[0].engine_log_probs, text=draft.text, cut_off=draft.cut_off,
                rewards=rewards, reward=reward, failures=draft.failures, messages=draft.messages,
                restarts=draft.segments[1:],
                prompt=self.objective.tokenizer.decode(draft.segments[0].prompt_ids),
            )
            for draft, (rewards, reward) in zip(drafts, self._rewards(drafts), strict=True)
        ]  # fmt: skip
        return [rollouts[start : start + answers] for start in range(0, len(rollouts), answers)]

    def _rewards(self, drafts: list[Draft]) -> list[tuple[dict[str, float | None], float | None]]:
        """Return the rewards of each draft by name, and their sum. Record failures in the drafts."""
        if self.pool is None:
            return [({}, None) for _ in drafts]
        completions = [
            Completion(
                prompt=draft.prompt, text=draft.text, columns=draft.reference["columns"], tokens=draft.written,
                cut_off=draft.cut_off, replies=draft.replies_and_results,
            )
            for draft in drafts
        ]  # fmt: skip
        with self._measure("scoring"):
            scores = self.pool.score(completions, self._report)
        for position, name, reason in scores.failures:
            drafts[position].fail(name, reason)
        results = []
        for position, draft in enumerate(drafts):
            rewards, reward = scores.of(position)
            if self.pool.has_environment_reward:
                rewards["environment"] = draft.reward
                reward = reward if draft.reward is None else (reward or 0.0) + draft.reward
            if self.settings.penalty is not None and self.is_training:
                penalty = self.settings.penalty(draft.used)
                rewards["overlong"], reward = penalty, None if reward is None else reward + penalty
            results.append((rewards, None if "environment" in draft.failures else reward))
        return results


def open_round_rewards(
    settings: RoundSettings, plugins: Sequence[str], terms: Sequence[RewardTerm] | None = None, key: str = REWARDS.key
) -> RewardPool:
    """Start the processes of a round's rewards, tools and environments, as `open_rewards`.

    `terms`: other rewards than those of the round; `key`: their key in the run file.
    """
    pool = open_rewards(
        settings.rewards if terms is None else terms, plugins, settings.reward_seconds, settings.reward_bytes, key,
        tools=settings.tools, environment=settings.environment,
    )  # fmt: skip
    if not pool.names and not pool.has_environment_reward:
        pool.close()
        what = f"is empty, and {settings.environment} has no reward()"
        raise InputError.at(key, what, "write a reward, or the method reward of the class")
    return pool


def open_rewards(
    terms: Sequence[RewardTerm],
    plugins: Sequence[str],
    seconds: float,
    memory_bytes: int,
    key: str = REWARDS.key,
    *,
    tools: str | None = None,
    environment: str | None = None,
) -> RewardPool:
    """Start the processes of the rewards at `key`, with their limits. Raise InputError if one cannot be used."""
    workers = min(MAX_REWARD_PROCESSES, usable_cores())
    pool = RewardPool(
        terms, plugins=plugins, seconds=seconds, memory_bytes=memory_bytes, workers=workers, key=key, tools=tools,
        environment=environment,
    )  # fmt: skip
    logger.info("starting the reward functions: %s", ", ".join([*pool.names, *filter(None, [tools, environment])]))
    pool.check()
    return pool
