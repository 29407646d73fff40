"""Rounds: the model writes answers, rewards score them, a file stores them, and the next steps learn from them.

A round serves `policy.steps` steps. Its prompts are the samples of these steps, so a round is a function of its number
and of the weights at its start (principle 1). The seed of an answer depends only on the run, the prompt and
the answer's index. A run that is killed while it writes or scores repeats both with the same seeds. Once the file is
written, the run reads it, so it ends like an uninterrupted run even if a reward function is not deterministic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from artel.config import RunConfig
from artel.errors import InputError
from artel.generation.answers import SampledAnswer, sample_answers
from artel.host import usable_cores
from artel.messages import logger
from artel.objectives import Objective
from artel.objectives.hooks import RoundSettings
from artel.objectives.rollouts import Rollout, Round, read_round
from artel.parallel import ParallelStrategy, World
from artel.rewards import Completion, RewardPool
from artel.tokens import StoreSplit, step_positions
from artel.training.evaluation import Validation
from artel.training.heartbeat import heartbeat
from artel.training.run import Run

_MAX_REWARD_PROCESSES = 4
"""Maximum number of reward processes per process of the run."""


@dataclass(frozen=True, slots=True)
class _Question:
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

    def write(self, questions: list[_Question], answers: int) -> list[list[Rollout]]:
        """Return `answers` answers to each question, with their rewards."""

        def write_and_score(local_questions: list[_Question]) -> list[list[Rollout]]:
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

    def _sample(self, questions: list[_Question], answers: int) -> list[list[SampledAnswer]]:
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

    def _seed(self, question: _Question, answer: int) -> int:
        """Return the seed of an answer: a function of run, prompt, attempt and answer."""
        name = f"answer:{self.seed}:{question.number}:{question.attempt}:{answer}"
        return xxhash.xxh3_64_intdigest(name.encode()) >> 1

    def _score(self, questions: list[_Question], sampled: list[list[SampledAnswer]]) -> list[list[Rollout]]:
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
            rollouts = []
            for index, answer in enumerate(group):
                rewards = dict(zip(scores.names, map(_nan_to_none, scores.values[position]), strict=True))
                rollouts.append(
                    Rollout(
                        number=question.number, index=question.index, epoch=question.epoch, answer=index,
                        attempt=question.attempt, seed=self._seed(question, index), prompt_ids=ids, ids=answer.ids,
                        log_probs=answer.log_probs, text=answer.text, cut_off=answer.cut_off, rewards=rewards,
                        reward=_nan_to_none(scores.totals[position]), failures=failures.get(position, {}),
                    )
                )  # fmt: skip
                position += 1
            groups.append(rollouts)
        return groups


def _nan_to_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


class Rounds:
    """Creates the round of each step of a run, and passes it to the objective."""

    def __init__(self, run: Run, split: StoreSplit, pool: RewardPool) -> None:
        """`split`: the training split, whose samples are prompts."""
        self._run = run
        self._writer = AnswerWriter(
            run.objective, split, run.strategy, run.world, pool, run.config.seed, run.trackers.show_progress
        )
        self._folder = run.folder.rollouts
        self._round: Round | None = None

    def prepare(self, step: int) -> None:
        """Create the round of a step, or read its file if that exists. All ranks must call this together.

        Raise InputError if no prompt of the run's first round has signal: such a run cannot learn.
        """
        run, steps = self._run, self._writer.settings.steps
        number = step // steps
        if self._round is None or self._round.number != number:
            self._round = self._read_or_write(number)
            if step == 0 and not any(map(_has_signal, self._round.groups().values())):
                raise _no_signal_error(self._round)
        run.objective.set_round(self._round, is_fresh=step % steps == 0, seconds=self._writer.seconds)

    def _read_or_write(self, number: int) -> Round:
        run, steps = self._run, self._writer.settings.steps
        numbers = np.concatenate(
            [
                step_positions(step, run.length.batch, run.length.total_samples)
                for step in range(number * steps, (number + 1) * steps)
            ]
        )
        indices, epochs = run.order.at(numbers), numbers // run.length.samples
        questions = [_Question(*map(int, values)) for values in zip(numbers, indices, epochs, strict=True)]
        prompts = {question.number: self._writer.split.sample(question.index).ids.tolist() for question in questions}
        self._writer.seconds.clear()
        existing = read_round(self._folder, number, prompts)
        if run.strategy.all_reduce_min(int(existing is not None)):
            assert existing is not None
            return existing
        groups = self._write(questions)
        round_ = Round(number, tuple(rollout for group in groups for rollout in group))
        if run.world.first:
            run.check_folder()
            round_.write(self._folder)
        run.world.barrier()  # so that every rank finds it if the run is killed from now on
        return round_

    def _write(self, questions: list[_Question]) -> list[list[Rollout]]:
        """Write answers to all questions. Replace those without signal, at most `resample` times."""
        settings = self._writer.settings
        groups = self._writer.write(questions, settings.answers)
        for attempt in range(1, settings.resample + 1):
            positions = [position for position, group in enumerate(groups) if not _has_signal(group)]
            if not positions:
                break
            retries = [replace(questions[position], attempt=attempt) for position in positions]
            for position, group in zip(positions, self._writer.write(retries, settings.answers), strict=True):
                groups[position] = group
        return groups


def _has_signal(group: Sequence[Rollout]) -> bool:
    rewards = {rollout.reward for rollout in group if rollout.reward is not None}
    return len(rewards) > 1


def _no_signal_error(round_: Round) -> InputError:
    rewards = sorted({rollout.reward for rollout in round_.rollouts if rollout.reward is not None})
    example = round_.rollouts[0]
    count = len(round_.rollouts) // (1 + max(rollout.answer for rollout in round_.rollouts))
    what = f"all answers to each of {count} prompts earned the same reward"
    what += f" ({rewards[0]:g})" if len(rewards) == 1 else ""
    failures = next((rollout.failures for rollout in round_.rollouts if rollout.failures), {})
    if failures:
        name, reason = next(iter(failures.items()))
        what += f", and {name} failed: {reason}"
    fix = (
        "use easier prompts, more answers (policy.answers), a reward for parts of the answer, or train on examples "
        f"first (objective: chat). An answer was: {example.text[:200]!r}"
    )
    return InputError.at("policy.rewards", what, fix)


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
        questions = [_Question(index, index, -1) for index in range(self.num_samples(limit))]
        rollouts = [group[0] for group in writer.write(questions, 1)]
        values = {"reward": [rollout.reward for rollout in rollouts]}
        if len(self.pool.names) > 1:
            values |= {f"reward/{name}": [rollout.rewards[name] for rollout in rollouts] for name in self.pool.names}
        metrics = {name: _mean(rewards) for name, rewards in values.items()}
        metrics["length_mean"] = _mean([len(rollout.ids) for rollout in rollouts])
        return {name: mean for name, mean in metrics.items() if not math.isnan(mean)}, np.empty((len(rollouts), 0))

    def close(self) -> None:
        self.pool.close()


def make_validation(objective: Objective, split: StoreSplit, config: RunConfig, world: World) -> Validation:
    """Return a split's validation, by rewards if the objective has rounds. Raise InputError as `open_rewards` does."""
    if objective.rounds is None:
        return Validation(objective, split)
    pool = open_rewards(objective.rounds, config.plugins)
    return RewardValidation(objective, split, world, pool, config.seed)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def open_rewards(settings: RoundSettings, plugins: Sequence[str]) -> RewardPool:
    """Start the reward processes. Raise InputError if a reward function cannot be used."""
    pool = RewardPool(
        settings.rewards,
        plugins=plugins,
        seconds=settings.reward_seconds,
        memory_bytes=settings.reward_bytes,
        workers=min(_MAX_REWARD_PROCESSES, usable_cores()),
    )
    logger.info("starting the reward functions: %s", ", ".join(pool.names))
    pool.check()
    return pool
