"""Values of the device that the host reads later, when they have come by themselves.

Reading a tensor of a GPU makes the host wait for all that the GPU has been given to do. Here it is copied behind the
work that makes it, and whoever reads it a step later waits for nothing.
"""

from __future__ import annotations

import torch


class AsyncScalar:
    """One number or truth value."""

    def __init__(self, value: torch.Tensor) -> None:
        """value: a scalar on any device."""
        self._value, self._copied = value, None
        if value.device.type == "cuda":
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> float:
        """The value, once it has come."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._value)
