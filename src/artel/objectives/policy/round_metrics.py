"""Metrics of a round: rewards, lengths, turns, and the difference to a server that wrote it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from artel.objectives.policy.losses import has_signal
from artel.objectives.rollouts import Rollout, Round


def reward_metrics(round_: Round, rewards: torch.Tensor, learned: torch.Tensor) -> dict[str, float]:
    """Return metrics of the answers and their rewards. Tensors: float64 and bool (prompts, answers)."""
    rollouts = round_.rollouts
    lengths = np.array([rollout.length for rollout in rollouts])
    valid = rewards[~rewards.isnan()]
    metrics: dict[str, float] = {}
    if len(valid):
        metrics = {"reward": float(valid.mean()), "reward_deviation": float(valid.std(correction=0))}
    metrics |= {
        "signal": float(has_signal(rewards.masked_fill(~learned, torch.nan)).double().mean()),
        "length_min": float(lengths.min()),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "cut_off": float(np.mean([rollout.cut_off for rollout in rollouts])),
        # Of sampled tokens, the mean of -ln p is an estimate of the entropy without a pass over the logits.
        "entropy": -float(np.concatenate([rollout.written for rollout in rollouts]).mean()),
    }
    for name in rollouts[0].rewards:
        values = [value for rollout in rollouts if (value := rollout.rewards[name]) is not None]
        metrics |= {f"reward/{name}": float(np.mean(values))} if values else {}
    failed = sum(any(name != "tools" for name in rollout.failures) for rollout in rollouts)
    return metrics | ({"failed_rewards": failed} if failed else {})


def turn_metrics(round_: Round) -> dict[str, float]:
    """Return metrics of answers that may have several replies."""
    rollouts = round_.rollouts
    replies = [message["role"] == "assistant" for rollout in rollouts for message in rollout.messages]
    return {
        "turns": sum(replies) / len(rollouts),
        "restarts": sum(max(0, len(rollout.segments) - 1) for rollout in rollouts),
        "failed_calls": sum("tools" in rollout.failures for rollout in rollouts),
    }


def engine_metrics(
    round_: Round, corrections: Callable[[Rollout], tuple[np.ndarray, np.ndarray]] | None
) -> dict[str, float]:
    """Return the difference to the server that wrote the round, and the fraction of limited corrections.

    `corrections` returns `losses.corrections` of an answer; None: the loss corrects nothing.
    """
    differences = [np.abs(np.subtract(rollout.written, rollout.engine_written)) for rollout in round_.rollouts]
    metrics = {"engine_mismatch": float(np.concatenate(differences).mean())}
    if corrections is not None:
        metrics["engine_limited"] = float(np.concatenate([corrections(each)[1] for each in round_.rollouts]).mean())
    return metrics
