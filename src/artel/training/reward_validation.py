"""Validation by the rewards of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from artel.config import RunConfig
from artel.objectives import Objective
from artel.parallel import ParallelStrategy, World
from artel.rewards import RewardPool
from artel.tokens import StoreSplit
from artel.training.answer_writer import AnswerWriter, open_rewards
from artel.training.drafts import Question
from artel.training.evaluation import Validation


class RewardValidation(Validation):
    """Validation by the mean reward of one answer to each validation prompt."""

    def __init__(self, objective: Objective, split: StoreSplit, world: World, pool: RewardPool, seed: int) -> None:
        super().__init__(objective, split)
        self.pool, self._world, self._seed = pool, world, seed

    def evaluate(
        self,
        strategy: ParallelStrategy,
        micro_batch: int,
        limit: int | None = None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> tuple[dict[str, float], np.ndarray]:
        """Write and score an answer to each of the first `limit` prompts. Return their mean rewards."""
        writer = AnswerWriter(
            self._objective, self.split, strategy, self._world, self.pool, self._seed, lambda _, done: progress(done)
        )
        questions = [Question(index, index, -1) for index in range(self.num_samples(limit))]
        rollouts = [group[0] for group in writer.write(questions, 1)]
        values = {"reward": [rollout.reward for rollout in rollouts]}
        names = list(rollouts[0].rewards)
        if len(names) > 1:
            values |= {f"reward/{name}": [rollout.rewards[name] for rollout in rollouts] for name in names}
        metrics = {name: _mean(rewards) for name, rewards in values.items()}
        metrics["length_mean"] = _mean([rollout.length for rollout in rollouts])
        return {name: mean for name, mean in metrics.items() if not math.isnan(mean)}, np.empty((len(rollouts), 0))

    def close(self) -> None:
        self.pool.close()


def make_validation(objective: Objective, split: StoreSplit, config: RunConfig, world: World) -> Validation:
    """Return a split's validation, by rewards if the objective has any. Raise InputError as `open_rewards` does."""
    if objective.rounds is None or not objective.rounds.is_scored:
        return Validation(objective, split)
    pool = open_rewards(objective.rounds, config.plugins)
    return RewardValidation(objective, split, world, pool, config.seed)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
