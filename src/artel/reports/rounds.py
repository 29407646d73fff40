"""The rounds of a run: a few of them, each with its best and worst answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artel.errors import InputError, Problem
from artel.objectives.rollouts import Rollout, list_rounds, load_round, round_file
from artel.printable import escape_line, escape_lines, shorten
from artel.reports.curves import Curves

_MAX_ROUNDS = 4
_MAX_ANSWERS = 40
"""Answers of a round that are read into a report, so that a page stays small."""
_MAX_FAILED = 8
_MAX_TEXT, _MAX_PROMPT, _MAX_REASON = 1500, 500, 300
_MIN_DIFFERENCE = 1e-8
"""Rewards of a prompt that differ by less have no signal (docs/metrics.md)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a round. Its texts are shortened, and their control characters escaped."""

    prompt_number: int
    """Running number of its prompt in the run."""
    prompt: str
    text: str
    tokens: int
    cut_off: bool
    reward: float | None
    rewards: dict[str, float | None]
    failures: dict[str, str]


@dataclass(frozen=True, slots=True)
class RoundView:
    """A round, with some of its answers."""

    number: int
    prompts: int
    answers: int
    """Number of all its answers."""
    reward: float
    """Mean reward. NaN if no answer has one."""
    deviation: float
    """Standard deviation of the rewards."""
    signal: float
    """Fraction of the prompts whose answers have different rewards."""
    cut_off: float
    """Fraction of the answers that reached the maximum length."""
    mean_length: float
    """Tokens of an answer."""
    failed: int
    """Answers for which a reward failed."""
    reward_names: tuple[str, ...]
    shown: tuple[Answer, ...]
    """Its best and worst answers, best first; last the ones without a reward."""

    @property
    def has_reward(self) -> bool:
        """True if at least one answer has a reward."""
        return not math.isnan(self.reward)

    @property
    def best(self) -> Answer:
        return self.shown[0]

    @property
    def worst(self) -> Answer:
        """The answer with the lowest reward, if any answer has one."""
        return next((answer for answer in reversed(self.shown) if answer.reward is not None), self.shown[-1])


class RoundsReader:
    """Reads rounds of a run repeatedly. Reads a file again only if it was replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rounds: dict[int, tuple[tuple[int, int], RoundView | None]] = {}

    def read(self) -> tuple[int, list[RoundView]]:
        """Return the number of rounds and some of them: the newest first, some in between, and the first.

        Of these, rounds without answers are left out.

        Raise InputError with every file that is damaged.
        """
        numbers = list_rounds(self._folder)
        last = len(numbers) - 1
        positions = sorted({round(index * last / (_MAX_ROUNDS - 1)) for index in range(_MAX_ROUNDS)}, reverse=True)
        chosen = [numbers[position] for position in positions] if numbers else []
        self._rounds = {number: self._rounds[number] for number in chosen if number in self._rounds}
        problems: list[Problem] = []
        for number in chosen:
            try:
                self._read_file(number)
            except InputError as error:
                problems += error.problems
            except FileNotFoundError:  # just removed, since the run starts over
                continue
            except OSError as error:
                file = str(round_file(self._folder, number))
                problems.append(Problem(file, f"cannot be read: {error.strerror}", "it must be a file"))
        if problems:
            raise InputError(problems)
        views = (self._rounds[number][1] for number in chosen if number in self._rounds)
        return len(numbers), [view for view in views if view is not None]

    def _read_file(self, number: int) -> None:
        status = round_file(self._folder, number).stat()
        state = status.st_mtime_ns, status.st_size
        if number not in self._rounds or self._rounds[number][0] != state:
            rollouts = load_round(self._folder, number).rollouts
            self._rounds[number] = state, _summarize(number, rollouts) if rollouts else None


def _summarize(number: int, rollouts: Sequence[Rollout]) -> RoundView:
    rewards = np.array([rollout.reward for rollout in rollouts if rollout.reward is not None], dtype=np.float64)
    by_prompt: dict[int, list[float]] = {}
    for rollout in rollouts:
        by_prompt.setdefault(rollout.number, []).extend([] if rollout.reward is None else [rollout.reward])
    spreads = [max(values) - min(values) for values in by_prompt.values() if values]
    return RoundView(
        number=number,
        prompts=len(by_prompt),
        answers=len(rollouts),
        reward=float(rewards.mean()) if len(rewards) else math.nan,
        deviation=float(rewards.std()) if len(rewards) else math.nan,
        signal=sum(spread > _MIN_DIFFERENCE for spread in spreads) / len(by_prompt),
        cut_off=float(np.mean([rollout.cut_off for rollout in rollouts])),
        mean_length=float(np.mean([rollout.length for rollout in rollouts])),
        failed=sum(map(_has_failed_reward, rollouts)),
        reward_names=tuple(dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)),
        shown=tuple(map(_shorten_answer, _choose(rollouts))),
    )


def _has_failed_reward(rollout: Rollout) -> bool:
    return any(name != "tools" for name in rollout.failures)


def _choose(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return all answers, or of many the best, the worst, and some for which a reward failed. The best come first."""
    order = sorted(rollouts, key=lambda rollout: -math.inf if rollout.reward is None else rollout.reward, reverse=True)
    if len(order) <= _MAX_ANSWERS:
        return order
    chosen = {index for index, rollout in enumerate(order) if _has_failed_reward(rollout) or rollout.reward is None}
    chosen = set(sorted(chosen)[:_MAX_FAILED])
    scored = [index for index, rollout in enumerate(order) if index not in chosen and rollout.reward is not None]
    free = _MAX_ANSWERS - len(chosen)
    chosen |= {*scored[: (free + 1) // 2], *scored[max(0, len(scored) - free // 2) :]}
    return [order[index] for index in sorted(chosen)]


def _shorten_answer(rollout: Rollout) -> Answer:
    return Answer(
        prompt_number=rollout.number,
        prompt=_keep_end(rollout.prompt),
        text=escape_lines(shorten(rollout.text, _MAX_TEXT)),
        tokens=rollout.length,
        cut_off=rollout.cut_off,
        reward=rollout.reward,
        rewards=rollout.rewards,
        failures={name: escape_lines(shorten(reason, _MAX_REASON)) for name, reason in rollout.failures.items()},
    )


def _keep_end(prompt: str) -> str:
    """Return the end of a long prompt: the question comes last."""
    return escape_lines(prompt if len(prompt) <= _MAX_PROMPT else f"…{prompt[-_MAX_PROMPT:]}")


def learns_from_rewards(curves: Curves, rounds: Sequence[RoundView]) -> bool:
    """Return True if the run computes rewards. On-policy distillation has rounds without them."""
    return "signal" in curves.training or any(round_.has_reward for round_ in rounds)


def describe_round(round_: RoundView) -> str:
    """Return a line about a round, for a terminal."""
    return (
        f"round {round_.number}: reward {round_.reward:.4f} ± {round_.deviation:.4f}, signal {round_.signal:.0%}, "
        f"{round_.mean_length:,.0f} tokens, {round_.cut_off:.0%} cut off"
        + (f", failed rewards: {round_.failed:,}" if round_.failed else "")
    )


def answer_lines(round_: RoundView, width: int) -> list[str]:
    """Return the best and the worst answer of a round, in a line each of at most `width` characters."""
    lines = []
    for title, answer in (("best", round_.best), ("worst", round_.worst)):
        reward = "none" if answer.reward is None else f"{answer.reward:.4g}"
        text = " ".join(answer.text.split()) or "(empty)"
        lines.append(shorten(escape_line(f"{title:<5} {reward:>8}  {text}"), width))
    return lines
