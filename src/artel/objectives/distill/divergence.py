"""How far a student's distributions are from a teacher's, over all ids or over the teacher's likeliest ones.

Of a teacher's distribution the k likeliest ids are kept, and the probability of all others together as that of one
more class ("ghost token", Anshumann et al. 2025, "Sparse Logit Sampling"). The student's distribution is summed up in
the same k + 1 classes, so nothing is renormalized: a divergence of the classes is never above that of the whole
distributions, and the student is told how likely the other ids are together, not which of them.
"""

from __future__ import annotations

import math

import torch


def kl_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) in nats, (count,), of log-probabilities (count, classes)."""
    return (p.exp() * (p - q)).sum(dim=-1)


def divergence(teacher: torch.Tensor, student: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    """The divergence of each position in nats, (count,), of log-probabilities (count, classes), T and S.

    forward_kl: KL(T || S) (Hinton et al. 2015). reverse_kl: KL(S || T) (Gu et al. 2024, "MiniLLM"). js: the generalized
    Jensen-Shannon divergence, beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S (Agarwal et al.
    2024, "On-Policy Distillation of Language Models", section 2).
    """
    if kind == "forward_kl":
        return kl_divergence(teacher, student)
    if kind == "reverse_kl":
        return kl_divergence(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)


def at_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities, float32 (count, vocabulary), of logits of that shape divided by the temperature."""
    return (logits if temperature == 1 else logits / temperature).log_softmax(dim=1)


def in_classes(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some ids and of all others together, (count, k + 1), of those of all, (count, vocabulary).

    `ids`, int64 (count, k), are fewer than all.
    """
    others = log_probs.scatter(1, ids, -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], dim=1)


def mapped_classes(
    log_probs: torch.Tensor, ids: torch.Tensor, vocabulary: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A teacher's likeliest ids as a student's, int64 (count, k), and log-probabilities of these and of all others
    together, (count, k + 1).

    `log_probs` (count, teacher's vocabulary). `ids`, int64 (teacher's vocabulary,), are the student's that the
    teacher's count as, of `vocabulary`; -1: as none, which is one of the others.
    """
    has_id = ids >= 0
    probabilities = log_probs.exp()
    shared = probabilities.new_zeros(len(log_probs), vocabulary).index_add(1, ids[has_id], probabilities[:, has_id])
    likeliest = shared.topk(top_k, dim=1).indices
    others = shared.scatter(1, likeliest, 0).sum(dim=1, keepdim=True)
    others = others + probabilities[:, ~has_id].sum(dim=1, keepdim=True)
    classes = torch.cat([shared.gather(1, likeliest), others], dim=1)
    return likeliest, classes.clamp(min=torch.finfo(classes.dtype).tiny).log()  # log(0) would rule reverse KL
