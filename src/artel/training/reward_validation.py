"""Validation by the rewards of answers: the only metrics of a policy, added to the loss for other objectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from artel.config import RunConfig
from artel.config.schema.rewards import REWARD_BYTES, REWARD_SECONDS
from artel.errors import InputError
from artel.generation import GenerationPrompt
from artel.generation.answers import SampledAnswer, sample_answers
from artel.generation.generate import Sampling
from artel.messages import logger
from artel.objectives import Objective
from artel.objectives.types import AnswerPrompt
from artel.parallel import ParallelStrategy, World
from artel.rewards import Completion, RewardPool
from artel.tokens import StoreSplit
from artel.training.answer_writer import AnswerWriter, open_rewards, open_round_rewards
from artel.training.drafts import Question
from artel.training.evaluation import Validation
from artel.training.heartbeat import heartbeat

_KEY = "validate.rewards"


class _Score(NamedTuple):
    """The score of an answer."""

    reward: float | None
    """Weighted sum; None if no reward applies."""
    rewards: dict[str, float | None]
    tokens: int
    failures: dict[str, str]
    """The reason of each reward that failed."""


class RewardValidation(Validation):
    """Validation by the mean reward of one answer to each prompt, for an objective with rounds."""

    def __init__(
        self,
        objective: Objective,
        split: StoreSplit,
        world: World,
        pool: RewardPool,
        seed: int,
        max_prompts: int | None = None,
    ) -> None:
        """`max_prompts`: maximum number of prompts to answer; None for all."""
        super().__init__(objective, split)
        self._pool, self._world, self._seed, self._max_prompts = pool, world, seed, max_prompts

    def num_samples(self, limit: int | None) -> int:
        samples = super().num_samples(limit)
        return samples if self._max_prompts is None else min(samples, self._max_prompts)

    def evaluate(
        self,
        strategy: ParallelStrategy,
        micro_batch: int,
        limit: int | None = None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> tuple[dict[str, float], np.ndarray]:
        """Write and score an answer to each of the first `limit` prompts. Return their mean rewards."""
        writer = AnswerWriter(
            self._objective, self.split, strategy, self._world, self._pool, self._seed, lambda _, done: progress(done),
            is_training=False,
        )  # fmt: skip
        questions = [Question(index, index, -1) for index in range(self.num_samples(limit))]
        rollouts = [group[0] for group in writer.write(questions, 1)]
        scores = [_Score(rollout.reward, rollout.rewards, rollout.length, rollout.failures) for rollout in rollouts]
        return _reward_metrics(scores), np.empty((len(rollouts), 0))

    def close(self) -> None:
        self._pool.close()


class LossAndRewardValidation(Validation):
    """Validation by the metrics of the objective and by the mean reward of one answer to each prompt."""

    def __init__(self, objective: Objective, split: StoreSplit, config: RunConfig, world: World) -> None:
        """Raise InputError if no record of the split can be answered, or as `open_rewards` does."""
        super().__init__(objective, split)
        self._world, self._config = world, config.validate_
        self._prompts, num_skipped = objective.answer_prompts(split, config.validate_.answers)
        if num_skipped:
            logger.info(
                "%s: %s validation records are not answered: they have no prompt, or it leaves no space for %s tokens "
                "(validate.new_tokens) in data.block",
                _KEY, f"{num_skipped:,}", config.validate_.new_tokens,
            )  # fmt: skip
        if not self._prompts:
            what = f"none of {split.documents:,} validation records leaves space for an answer in data.block"
            fix = f"write validate.new_tokens below {config.validate_.new_tokens}, or a larger data.block"
            if not num_skipped:
                what, fix = "the prepared text has no answers", "prepare it again: artel prepare, with this key"
            raise InputError.at(_KEY, what, fix)
        self._pool = open_rewards(config.validate_.rewards, config.plugins, REWARD_SECONDS, REWARD_BYTES, _KEY)

    def evaluate(
        self,
        strategy: ParallelStrategy,
        micro_batch: int,
        limit: int | None = None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> tuple[dict[str, float], np.ndarray]:
        """Evaluate the first `limit` samples, and answer the same fraction of the prompts."""
        metrics, outputs = super().evaluate(strategy, micro_batch, limit, lambda done: progress(done / 2))
        part = self.num_samples(limit) / max(1, self.num_samples(self._config.blocks))
        prompts = self._prompts[: math.ceil(len(self._prompts) * part)]
        answers = self._objective.generated_answers(strategy.model, outputs)
        if answers is None:
            answers = self._write(strategy, prompts, lambda done: progress(0.5 + done / 2))
        # Evaluations with a limit may have generated fewer answers than there are prompts.
        scores = self._world.map_over_ranks(self._score, list(zip(prompts, answers, strict=False)))
        return metrics | _reward_metrics(scores), outputs

    def _write(
        self, strategy: ParallelStrategy, prompts: list[AnswerPrompt], progress: Callable[[float], None]
    ) -> list[SampledAnswer]:
        """Return the most likely answer to each prompt."""
        model, tokenizer = strategy.model, self._objective.tokenizer
        empty_prompt = self._objective.decoding.generation_prompt(model, "")
        assert empty_prompt is not None
        sampling = Sampling(self._config.new_tokens, temperature=0.0)

        def report(fraction: float) -> None:
            heartbeat("writing answers")
            progress(fraction)

        def write(local_prompts: list[AnswerPrompt]) -> list[SampledAnswer]:
            generation_prompts = [
                GenerationPrompt(prompt.ids, empty_prompt.end, empty_prompt.special_tokens) for prompt in local_prompts
            ]
            with strategy.generating():
                groups = sample_answers(
                    model, tokenizer, generation_prompts, [[0]] * len(generation_prompts), sampling,
                    together=strategy.holds_full_model, on_progress=report,
                )  # fmt: skip
            return [answer for (answer,) in groups]

        # A forward pass of a sharded model needs the weights of all ranks, so all ranks write every answer.
        return self._world.map_over_ranks(write, prompts) if strategy.holds_full_model else write(prompts)

    def _score(self, answers: list[tuple[AnswerPrompt, SampledAnswer]]) -> list[_Score]:
        completions = [
            # With some templates the model writes the space before an answer.
            Completion(prompt.prompt, answer.text.lstrip(), prompt.columns, len(answer.ids), answer.cut_off)
            for prompt, answer in answers
        ]
        scores = self._pool.score(completions, lambda _: heartbeat("scoring answers"))
        failures: list[dict[str, str]] = [{} for _ in answers]
        for index, name, reason in scores.failures:
            failures[index][name] = reason
        results = []
        for index, completion in enumerate(completions):
            rewards, reward = scores.of(index)
            results.append(_Score(reward, rewards, completion.tokens, failures[index]))
        return results

    def close(self) -> None:
        self._pool.close()


def make_validation(
    objective: Objective, split: StoreSplit, config: RunConfig, world: World, pool: RewardPool | None = None
) -> Validation:
    """Return a split's validation: by the objective's metrics, by rewards, or by both.

    `pool`: the open rewards that the run learns from. They validate, too, unless the run has `validate.rewards`. Raise
    InputError as `open_rewards` does, or if there is nothing to answer.
    """
    rounds, rewards = objective.rounds, config.validate_.rewards
    if rounds is None or not rounds.is_scored:
        if not rewards or not split.samples:
            return Validation(objective, split)
        return LossAndRewardValidation(objective, split, config, world)
    max_prompts = None
    if rewards and split.samples:
        pool = open_round_rewards(rounds, config.plugins, rewards, _KEY)
        max_prompts = config.validate_.answers
    elif pool is None:
        pool = open_round_rewards(rounds, config.plugins)
    return RewardValidation(objective, split, world, pool, config.seed, max_prompts)


def _reward_metrics(scores: Sequence[_Score]) -> dict[str, float]:
    """Return the mean reward, that of each function if there are several, and the mean length; note failures."""
    names = list(scores[0].rewards) if scores else []
    values = {"reward": [score.reward for score in scores]}
    if len(names) > 1:
        values |= {f"reward/{name}": [score.rewards[name] for score in scores] for name in names}
    metrics = {name: _mean(rewards) for name, rewards in values.items()}
    metrics["length_mean"] = _mean([score.tokens for score in scores])
    failed = Counter(name for score in scores for name in score.failures)
    for name, count in failed.items():
        reason = next(score.failures[name] for score in scores if name in score.failures)
        logger.info("the reward %s failed on %s of %s validation answers: %s", name, count, len(scores), reason)
    return {name: mean for name, mean in metrics.items() if not math.isnan(mean)}


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
