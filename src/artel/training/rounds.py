"""Rounds: the model writes answers, rewards score them, a file stores them, and the next steps learn from them.

A round serves `policy.steps` steps. Its prompts are the samples of these steps, so a round is a function of its number
and of the weights at its start (principle 1). The seed of an answer depends only on the run, the prompt and
the answer's index. A run that is killed while it writes or scores repeats both with the same seeds. Once the file is
written, the run reads it, so it ends like an uninterrupted run even if a reward function is not deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from artel.errors import InputError
from artel.objectives.rollouts import Rollout, Round, read_round
from artel.rewards import RewardPool
from artel.tokens import StoreSplit, step_positions
from artel.training.answer_writer import AnswerWriter, Question
from artel.training.run import Run


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
            run.trackers.doing = ""
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
        questions = [Question(*map(int, values)) for values in zip(numbers, indices, epochs, strict=True)]
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

    def _write(self, questions: list[Question]) -> list[list[Rollout]]:
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
