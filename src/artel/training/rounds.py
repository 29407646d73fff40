"""Rounds: the model writes answers, rewards score them, a file stores them, and the next steps learn from them.

An objective without rewards learns from the answers as they are. A round serves `policy.steps` steps. Its prompts are
the samples of these steps, so a round is a function of its number and of the weights at its start (principle 1). The
seed of an answer depends only on the run, the prompt and the answer's index. A run that is killed while it writes or
scores repeats both with the same seeds. Once the file is written, the run reads it, so it ends like an uninterrupted
run even if a reward function is not deterministic.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xxhash

from artel.messages import logger
from artel.objectives.rollouts import Rollout, Round, read_round
from artel.rewards import RewardPool
from artel.tokens import StoreSplit, step_positions
from artel.training.answer_writer import AnswerWriter
from artel.training.drafts import Question
from artel.training.remote_engine import RemoteEngine
from artel.training.round_summary import check_signal, has_signal, summarize
from artel.training.run import Run


class Rounds:
    """Creates the round of each step of a run, and passes it to the objective."""

    def __init__(self, run: Run, split: StoreSplit, pool: RewardPool | None) -> None:
        """`split`: the training split, whose samples are prompts. `pool`: None if answers are not scored."""
        self._run, self._pool = run, pool
        settings, self._engine = run.objective.rounds, None
        assert settings is not None
        if settings.engine is not None:
            folder = run.folder.engine
            self._engine = RemoteEngine(settings.engine, folder, run.tokenizer, run.strategy, run.world)
        self._writer = AnswerWriter(
            run.objective,
            split,
            run.strategy,
            run.world,
            pool,
            run.config.seed,
            run.trackers.show_progress,
            self._engine,
        )
        self._folder = run.folder.rollouts
        self._round: Round | None = None

    def prepare(self, step: int) -> None:
        """Create the round of a step, or read its file if that exists. All ranks must call this together.

        Raise InputError if no prompt of the run's first round has signal: such a run cannot learn.
        """
        run, settings = self._run, self._writer.settings
        steps = settings.steps
        number = step // steps
        if self._round is None or self._round.number != number:
            self._round = self._read_or_write(number)
            run.trackers.doing = ""
            if step == 0 and settings.is_scored:
                groups = [*self._round.groups().values()]
                logger.info("first round: %s", summarize(groups).describe())
                check_signal(groups)
        run.objective.set_round(self._round, is_fresh=step % steps == 0, seconds=self._writer.seconds)

    def close(self) -> None:
        """End the processes of the rewards, and delete the weights that a server has loaded."""
        if self._engine is not None:
            self._engine.close()
        if self._pool is not None:
            self._pool.close()

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
        prompts = {
            question.number: ids
            for question in questions
            if self._is_answered(question.number) and (ids := self._writer.prompt_ids(question))
        }
        questions = [question for question in questions if question.number in prompts]
        self._writer.seconds.clear()
        existing = read_round(self._folder, number, prompts)
        if run.strategy.all_reduce_min(int(existing is not None)):
            assert existing is not None
            return existing
        if self._engine is not None:
            run.check_folder()  # otherwise the weights would create a folder that was removed
            run.trackers.show_progress("loading the weights into the server")
            self._engine.load()
        groups = self._write(questions)
        round_ = Round(number, tuple(rollout for group in groups for rollout in group))
        if run.world.first:
            run.check_folder()
            round_.write(self._folder)
        run.world.barrier()  # so that every rank finds it if the run is killed from now on
        return round_

    def _is_answered(self, number: int) -> bool:
        """True if a sample is answered: a function of the run's seed and the sample's running number."""
        key = f"answered:{self._run.config.seed}:{number}"
        return xxhash.xxh3_64_intdigest(key.encode()) < self._writer.settings.fraction * 2**64

    def _write(self, questions: list[Question]) -> list[list[Rollout]]:
        """Write answers to all questions. Replace those without signal, at most `resample` times."""
        settings = self._writer.settings
        groups = self._writer.write(questions, settings.answers)
        for attempt in range(1, settings.resample + 1):
            positions = [position for position, group in enumerate(groups) if not has_signal(group)]
            if not positions:
                break
            retries = [replace(questions[position], attempt=attempt) for position in positions]
            for position, group in zip(positions, self._writer.write(retries, settings.answers), strict=True):
                groups[position] = group
        return groups
