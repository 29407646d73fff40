"""How many answers are computed at once, and how many tokens of all of them have room in memory."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.host import memory

_SHARE = 0.25
"""Of free memory, for the keys and values of all requests at most."""

USUAL = 16
"""Answers at once."""
_MOST = 64
_STEP_SECONDS = 0.5
"""Of a step in which each answer gets a token."""
_FLOPS_OF_A_CORE = 50e9
"""A second, in float32: what SmolLM2-135M reached on one core of an EPYC (benchmarks/results.md)."""


def answers_at_once(model: PreTrainedModel) -> int:
    """As many as have a token each in about half a second on this CPU, 16 to 64.

    An answer that waits for a place waits for its first token. Where a step is slow, more of them would all be late.
    """
    flops = 2 * sum(parameter.numel() for parameter in model.parameters())
    rows = _STEP_SECONDS * _FLOPS_OF_A_CORE * torch.get_num_threads() / flops
    return next((count for count in (_MOST, _MOST // 2) if rows >= count), USUAL)


def tokens_in_memory(device: torch.device, token_bytes: int, context: int) -> int:
    """The tokens whose keys and values have room. Raises InputError where those of one `context` do not."""
    free = memory().free if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    room = int(free * _SHARE / token_bytes)
    if room < context:
        what = f"{context:,} tokens of context need {context * token_bytes / 2**30:.1f} GiB for keys and values"
        raise InputError.at("--context", what, f"write at most {max(1, room)}")
    return room
