"""Advantages of answers, and the loss of a micro-batch as sums.

The loss is PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) or CISPO's weighted log-probability, with
an optional KL divergence; or the cross-entropy of the best answers; or DPO's loss of pairs of a best and a worst
answer. `PRESETS` in `config.py` names the papers. Losses and gradients equal TRL's, with these
exceptions:

- With every preset the KL divergence is the k3 estimator in the loss (DeepSeekMath). By default TRL also multiplies it
  by the ratio (`use_bias_correction_kl`), and its RLOO subtracts log ratios from the rewards.
- A masked answer does not count in any denominator. TRL counts it for `answers` and `longest`, so that masking there
  lowers the learning rate.
- `tokens` are those of the step's global batch. With several steps per round, TRL divides the loss of each step by the
  tokens of the round divided by the number of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from artel.config.schema.engine import Correction
from artel.objectives.policy.config import Advantage, PolicySettings
from artel.objectives.rollouts import MIN_SPREAD

if TYPE_CHECKING:
    import torch

_EPSILON = 1e-4
"""Added to the standard deviation of a group. The papers specify neither this value nor the kind of deviation. Both are
TRL's, so that the losses are equal: 1e-4, and the sample standard deviation (divided by count - 1)."""
_MAX_LOG_RATIO = 20.0
"""Larger log ratios are clamped, as in verl, because exp overflows at 88. The gradient beyond is 0."""


def has_signal(rewards: torch.Tensor) -> torch.Tensor:
    """Return bool (prompts,): True if the rewards of a prompt's answers differ. Arguments as for `advantages`."""
    import torch

    missing = rewards.isnan()
    highest = rewards.masked_fill(missing, -torch.inf).amax(dim=1)
    lowest = rewards.masked_fill(missing, torch.inf).amin(dim=1)
    return highest - lowest > MIN_SPREAD


def best_and_worst(rewards: torch.Tensor) -> torch.Tensor:
    """Return the index of the best and of the worst answer to each prompt, int64 (prompts, 2); -1 without signal.

    Of several equal ones, the first. Arguments as for `advantages`.
    """
    import torch

    missing = rewards.isnan()
    highest = rewards.masked_fill(missing, -torch.inf).amax(dim=1, keepdim=True)
    lowest = rewards.masked_fill(missing, torch.inf).amin(dim=1, keepdim=True)
    is_best, is_worst = rewards >= highest - MIN_SPREAD, rewards <= lowest + MIN_SPREAD
    indices = torch.stack([is_best.int().argmax(dim=1), is_worst.int().argmax(dim=1)], dim=1)
    return indices.where(has_signal(rewards)[:, None], -1)


def advantages(rewards: torch.Tensor, kind: Advantage) -> torch.Tensor:
    """Return the advantage of each answer, float64 (prompts, answers).

    rewards float64 (prompts, answers). NaN: the answer has no reward. It is left out of its group's statistics, and its
    advantage is 0. All advantages of a group without signal are exactly 0.
    """
    import torch

    present = ~rewards.isnan()
    counts = present.sum(dim=1, keepdim=True)
    differences = rewards - rewards.nanmean(dim=1, keepdim=True)
    learns = present & has_signal(rewards)[:, None]  # then there are at least two rewards
    if kind == "deviation":
        variances = differences.square().nansum(dim=1, keepdim=True) / (counts - 1)
        differences = differences / (variances.sqrt() + _EPSILON)
    elif kind == "leave_one_out":
        differences = differences * counts / (counts - 1)
    elif kind == "best":
        differences = (torch.arange(rewards.shape[1]) == best_and_worst(rewards)[:, :1]).to(rewards.dtype)
    return differences.where(learns, 0.0)


def corrections(log_ratios: np.ndarray, kind: Correction, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return factors that correct the loss of an answer's tokens for the server that wrote them, and True if limited.

    log_ratios (tokens,): log-probability under the model in training minus that of the server, at the start of the
    round. The factors, (tokens,), are importance ratios of single tokens, or one of the whole answer, truncated or
    masked above `limit`, as in TRL (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training").
    """
    if kind.startswith("sequence"):
        log_ratios = np.full(len(log_ratios), log_ratios.sum())
    ratios = np.exp(np.minimum(log_ratios, _MAX_LOG_RATIO))
    is_limited = ratios > limit
    return np.where(is_limited, 0.0 if kind.endswith("mask") else limit, ratios), is_limited


class PolicySums(NamedTuple):
    """Sums over a micro-batch, float32. The loss of a global batch is the sum of `loss` divided by that of `targets`.

    Only `loss` has a gradient.
    """

    loss: torch.Tensor
    targets: torch.Tensor
    """The denominator: `PolicySettings.targets`."""
    tokens: torch.Tensor
    answers: torch.Tensor
    """Number of answers that have tokens."""
    clipped_low: torch.Tensor
    """Tokens whose loss the lower bound of the ratio changes."""
    clipped_high: torch.Tensor
    """Tokens whose loss the upper bound of the ratio changes."""
    kl: torch.Tensor
    """Sum of the k3 estimates of KL(policy || reference) over tokens, in nats; 0 without a reference."""
    difference: torch.Tensor
    """Sum of |log_prob - old_log_prob| over tokens, in nats."""


def policy_sums(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    reference_log_probs: torch.Tensor | None,
    advantages: torch.Tensor,
    answer_targets: torch.Tensor,
    settings: PolicySettings,
    corrections: torch.Tensor | None = None,
) -> PolicySums:
    """Return the loss and the metrics of a micro-batch, as sums.

    log_probs float32 (count,), with gradient, as `target_log_probs` returns them; old_log_probs (count,) of the policy
    that wrote the answers; reference_log_probs (count,) of the model before training. advantages (samples, answers).
    answer_targets int64 (samples, answers, longest), as `answer_tensors` returns it. An answer without targets is
    missing or masked, and does not count. Of a pair, the better answer is first. corrections (count,): factors of the
    loss of each token, without its KL divergence.
    """
    import torch.nn.functional as F

    is_token = answer_targets < len(log_probs)
    lengths = is_token.sum(dim=-1)
    tokens, answers = lengths.sum(), (lengths > 0).sum()

    def by_answer(values: torch.Tensor) -> torch.Tensor:
        """Arrange values per token, (count,), as (samples, answers, longest), padded with 0."""
        return F.pad(values, (0, 1))[answer_targets]

    log_ratios = by_answer(log_probs - old_log_probs)
    difference = log_ratios.detach().abs().sum()
    kl = divergences = log_probs.new_zeros(())
    if reference_log_probs is not None:
        differences = by_answer((reference_log_probs - log_probs).clamp(max=_MAX_LOG_RATIO))
        divergences = differences.exp() - differences - 1  # 0 in the padding
        kl = divergences.detach().sum()
    if settings.learns_pairs:
        assert reference_log_probs is not None
        losses = _pair_losses(by_answer(log_probs - reference_log_probs), lengths, settings)
        is_low = is_high = is_token & False
    else:
        by_token = by_answer(log_probs)
        losses, is_low, is_high = _token_losses(log_ratios, by_token, lengths, advantages, settings)
        if corrections is not None:
            losses = losses * by_answer(corrections)
        losses = (losses + settings.kl * divergences) * is_token
        if settings.divide_by == "answers":
            losses = losses / lengths.clamp(min=1)[..., None]
    targets = settings.targets(tokens=tokens, answers=answers)
    return PolicySums(
        loss=losses.sum(),
        targets=targets.float(),
        tokens=tokens.float(),
        answers=answers.float(),
        clipped_low=(is_low & is_token).sum().float(),
        clipped_high=(is_high & is_token).sum().float(),
        kl=kl,
        difference=difference,
    )


def _pair_losses(log_ratios: torch.Tensor, lengths: torch.Tensor, settings: PolicySettings) -> torch.Tensor:
    """Return the loss of each pair, (samples,), from the log-ratios to the reference, (samples, 2, longest)."""
    from artel.objectives.preference import dpo_losses

    best, worst = log_ratios.sum(dim=-1).unbind(dim=1)
    return dpo_losses(best - worst, settings.beta) * (lengths > 0).all(dim=1)


def _token_losses(
    log_ratios: torch.Tensor,
    log_probs: torch.Tensor,
    lengths: torch.Tensor,
    advantages: torch.Tensor,
    settings: PolicySettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (losses, True where the lower bound changes them, True where the upper one does).

    Each has a shape that broadcasts to that of log_ratios and log_probs, (samples, answers, longest).
    """
    import torch

    weights = advantages.to(log_probs.dtype)[..., None]
    if settings.ratio == "none":
        is_clipped = torch.zeros_like(weights, dtype=torch.bool)
        return -weights * log_probs, is_clipped, is_clipped
    if settings.ratio != "token":  # one ratio for all tokens of an answer
        log_ratios = log_ratios.sum(dim=-1, keepdim=True)
        if settings.ratio == "sequence":
            log_ratios = log_ratios / lengths.clamp(min=1)[..., None]
    ratios = log_ratios.clamp(max=_MAX_LOG_RATIO).exp()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    clipped = ratios.clamp(low, high)
    if settings.clips_weight:
        losses = -clipped.detach() * weights * log_probs
        return losses, (ratios < low) & (weights != 0), (ratios > high) & (weights != 0)
    losses = -torch.minimum(ratios * weights, clipped * weights)
    return losses, (ratios < low) & (weights < 0), (ratios > high) & (weights > 0)
