"""The numbers that tell if a model can learn from the answers of a round, and the error if it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from artel.errors import InputError
from artel.objectives.rollouts import MIN_SPREAD, Rollout


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """Statistics of the answers to several prompts. Rewards are NaN if no answer has one."""

    prompts: int
    answers: int
    """Number of answers to all prompts."""
    reward: float
    """Mean reward."""
    deviation: float
    """Standard deviation of the rewards of all answers."""
    signal: float
    """Fraction of prompts whose answers have different rewards."""
    cut_off: float
    """Fraction of answers that reached the maximum length."""

    def describe(self) -> str:
        return (
            f"{self.prompts:,} prompts, {self.answers:,} answers: reward {self.reward:.4g} on average, "
            f"{self.deviation:.4g} standard deviation; different rewards in {self.signal:.0%} of the prompts; "
            f"{self.cut_off:.0%} of the answers cut off"
        )


def summarize(groups: Sequence[Sequence[Rollout]]) -> RoundSummary:
    """Summarize the answers to each prompt."""
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None] or [np.nan]
    return RoundSummary(
        prompts=len(groups),
        answers=len(rollouts),
        reward=float(np.mean(rewards)),
        deviation=float(np.std(rewards)),
        signal=float(np.mean([has_signal(group) for group in groups])),
        cut_off=float(np.mean([rollout.cut_off for rollout in rollouts])),
    )


def has_signal(group: Sequence[Rollout]) -> bool:
    """True if the answers to a prompt have different rewards. Only then can a model learn from them."""
    rewards = [rollout.reward for rollout in group if rollout.reward is not None]
    return bool(rewards) and max(rewards) - min(rewards) > MIN_SPREAD


def check_signal(groups: Sequence[Sequence[Rollout]]) -> None:
    """Raise InputError if the answers to no prompt have different rewards."""
    if any(map(has_signal, groups)):
        return
    rollouts = [rollout for group in groups for rollout in group]
    rewards = sorted({rollout.reward for rollout in rollouts if rollout.reward is not None})
    what = f"all answers to each of {len(groups)} prompts earned the same reward"
    what += f" ({rewards[0]:g})" if len(rewards) == 1 else ""
    if not rewards:
        what = f"no answer to any of {len(groups)} prompts has a reward"
    fixes = ["easier prompts", "more answers (policy.answers)", "a reward for parts of the answer"]
    num_cut_off = sum(rollout.cut_off for rollout in rollouts)
    if num_cut_off:
        what += f"; {num_cut_off} of {len(rollouts)} answers were cut off"
        fixes.insert(0, "a larger policy.new_tokens")
    fix = f"try {', '.join(fixes)}, or train on examples first (objective: chat)"
    failed = Counter(name for rollout in rollouts for name in rollout.failures)
    if failed:
        name, count = failed.most_common(1)[0]
        reason = next(rollout.failures[name] for rollout in rollouts if name in rollout.failures)
        what = f"{name} failed on {count} of {len(rollouts)} answers: {reason}; {what}"
        fix = f"fix {name}, and start again" if count == len(rollouts) else fix
    raise InputError.at("policy.rewards", what, f"{fix}. An answer was: {rollouts[0].text[:200]!r}")
