"""How many tokens of all answers have room in memory."""

from __future__ import annotations

import torch

from artel.errors import InputError
from artel.host import memory

_SHARE = 0.25
"""Of free memory, for the keys and values of all requests at most."""


def tokens_in_memory(device: torch.device, token_bytes: int, context: int) -> int:
    """The tokens whose keys and values have room. Raises InputError where those of one `context` do not."""
    free = memory().free if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    room = int(free * _SHARE / token_bytes)
    if room < context:
        what = f"{context:,} tokens of context need {context * token_bytes / 2**30:.1f} GiB for keys and values"
        raise InputError.at("--context", what, f"write at most {max(1, room)}")
    return room
