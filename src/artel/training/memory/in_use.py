"""The memory that a process of a run holds now."""

from __future__ import annotations

import torch

from artel.host import process_memory


def memory_in_use(device: torch.device) -> int:
    """Bytes: what the allocator of a GPU has reserved; of a process on a CPU, its resident size."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return process_memory("VmRSS")
