"""Rows of logits and their exact cross-entropy."""

import torch
import torch.nn.functional as F

from artel.models import IGNORED


def some(count, vocabulary, dtype):
    """Logits and targets with ties, positions that do not count and values that are large."""
    random = torch.Generator().manual_seed(count)
    logits = 3 * torch.randn(count, vocabulary, generator=random)
    targets = torch.randint(vocabulary, (count,), generator=random)
    targets[1::3] = IGNORED
    logits[0, vocabulary // 2 :] = 11.0  # ties
    logits[2:3] *= 30  # a target that has next to none of the sum
    return logits.to(dtype), targets


def exact(logits, targets, factors=None, soft_cap=0.0):
    """Losses, gradient, guesses and entropies in float64."""
    leaf = logits.double().requires_grad_()
    scores = soft_cap * torch.tanh(leaf / soft_cap) if soft_cap else leaf
    losses = F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="none")
    (losses * (1 if factors is None else factors)).sum().backward()
    log_probs = scores.detach().log_softmax(dim=-1)
    entropies = -(log_probs.exp() * log_probs.clamp(min=-1e9)).sum(dim=-1)
    return losses.detach(), leaf.grad, scores.max(dim=1).indices, entropies


def assert_exact(actual, grad, expected, dtype):
    losses, expected_grad, guesses, entropies = expected
    torch.testing.assert_close(actual.losses.double(), losses, rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(actual.entropies.double(), entropies, rtol=1e-5, atol=5e-6)
    assert torch.equal(actual.guesses, guesses)
    # bf16: triton's interpreter truncates where a GPU rounds.
    relative = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), expected_grad, rtol=relative, atol=1e-6)
