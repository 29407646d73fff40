"""Rows of a product in bf16 on a CPU are filled up to a multiple of 32 where their count differs from step to step.

oneDNN, which multiplies there, compiles a kernel for each shape and keeps the last 1,024. With the groups of tokens of
a mixture's experts as they fell, a step took a third longer. Each new number of targets cost the output head's three
products 1.8 MiB and 10 ms once (512 wide, 8,000 ids; benchmarks/NOTES.md).
"""

from __future__ import annotations

import torch

_ROWS = 32


def row_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """The rows of a product in `dtype` on `device` should be a multiple of this; 1 where any count will do."""
    return _ROWS if device.type == "cpu" and dtype == torch.bfloat16 else 1
