"""On-policy distillation: the student writes answers, and learns the teacher's distributions on them.

GKD (Agarwal et al. 2024, arXiv:2306.13649). In each step the student answers a fraction of the conversations itself,
up to their last learned turn, in a round like those of `objective: policy` but without rewards (`training/rounds.py`).
The other conversations are learned as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from artel.config import RunConfig
from artel.errors import Problem
from artel.generation import GenerationPrompt
from artel.objectives.base import Objective
from artel.objectives.decoding import writing_problems
from artel.objectives.hooks import RoundSettings
from artel.objectives.length_groups import as_tensors
from artel.objectives.rollouts import Rollout, Round
from artel.objectives.types import Batch
from artel.tokens import Rows, Sample, SampleList, Tokenizer, training_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WRITTEN = "written_by_student"
"""Name of the tensor that marks the targets the student wrote, bool (rows, length)."""


class OnPolicy(Objective):
    """Mixin that replaces answers of a chat distillation by the student's own."""

    packs_samples = False  # answers are written between steps, so they cannot be packed beforehand

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._answers: dict[tuple[int, int], Rollout] | None = None
        self._round_metrics: dict[str, float] = {}

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        return [*super().problems(config), *writing_problems(config)]

    # Rounds

    @property
    def rounds(self) -> RoundSettings:
        from artel.generation.generate import Sampling

        distill = self.config.distill
        sampling = Sampling(distill.new_tokens, temperature=1.0)  # the student's own distribution
        return RoundSettings(steps=1, answers=1, sampling=sampling, rewards=[], fraction=distill.on_policy)

    def round_prompt_ids(self, sample: Sample) -> list[int]:
        """Return the conversation up to its last learned turn; [] if it begins with that turn."""
        assert sample.flags is not None
        learned = np.flatnonzero(sample.flags)
        starts = learned[np.diff(learned, prepend=-2) > 1]
        ids: list[int] = sample.ids[: starts[-1]].tolist()
        return ids

    def round_prompt(self, model: PreTrainedModel, ids: list[int]) -> GenerationPrompt:
        empty_prompt = self.decoding.generation_prompt(model, "")
        assert empty_prompt is not None
        return replace(empty_prompt, ids=ids)

    def set_round(self, round_: Round, *, is_fresh: bool, seconds: Mapping[str, float]) -> None:
        self._answers = {(rollout.index, rollout.epoch): rollout for rollout in round_.rollouts}
        metrics: dict[str, float] = {"answers": len(round_.rollouts)}
        if round_.rollouts:
            metrics["length_mean"] = float(np.mean([rollout.length for rollout in round_.rollouts]))
            metrics["cut_off"] = float(np.mean([rollout.cut_off for rollout in round_.rollouts]))
        metrics |= {f"seconds_{activity}": round(duration, 3) for activity, duration in seconds.items()}
        self._round_metrics = metrics

    def training_metrics(self, totals: dict[str, float]) -> dict[str, float]:
        return super().training_metrics(totals) | self._round_metrics

    # Batches

    def batch(self, rows: Rows) -> Batch:
        """Return the batch with the student's answers, and `WRITTEN` if there are any.

        Before the first round, training samples get answers of the maximum length, so that their memory can be
        measured.
        """
        assert rows.flags is not None
        samples, is_written = [], np.zeros(len(rows.valid), dtype=bool)
        for row, length in enumerate(rows.lengths):
            sample = Sample(rows.ids[row, :length], rows.flags[row, :length], tuple(rows.numbers[row].tolist()))
            answer = self._answer(sample, int(rows.indices[row]), int(rows.epochs[row]))
            if answer is not None:
                prompt = self.round_prompt_ids(sample)
                flags = np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), len(answer)])
                sample = Sample(np.array(prompt + answer, dtype=np.int64), flags, sample.numbers)
                is_written[row] = True
            samples.append(sample)
        if not is_written.any():
            return super().batch(rows)  # type: ignore[safe-super]
        own_rows = training_rows(SampleList(samples), np.arange(len(samples)), len(samples))
        own_rows = replace(own_rows, valid=rows.valid, indices=rows.indices, epochs=rows.epochs)
        batch = super().batch(own_rows)  # type: ignore[safe-super]
        marks = np.broadcast_to(is_written[:, None], batch.tensors["targets"].shape)
        return Batch(batch.tensors | as_tensors({WRITTEN: marks}), batch.targets, batch.tokens)

    def _answer(self, sample: Sample, index: int, epoch: int) -> list[int] | None:
        """Return the ids of the student's answer to a sample; None if the sample is learned as it is stored."""
        if self._answers is not None:
            rollout = self._answers.get((index, epoch))
            return None if rollout is None else rollout.ids
        prompt = self.round_prompt_ids(sample)
        if epoch < 0 or not prompt:
            return None
        length = min(self.config.distill.new_tokens, self.config.data.block - len(prompt))
        return [0] * max(length, len(sample.ids) - len(prompt))
