"""What the device does well: which precision it multiplies natively."""

from __future__ import annotations

from pathlib import Path

import torch


def bf16_is_native(device: torch.device) -> bool:
    """Whether matrix products in bf16 run in hardware.

    On a CPU without the instructions PyTorch emulates them: 0.3 GFLOP/s were measured where float32 reaches 115
    (two cores of a server processor with AVX2 only), so this is not a matter of taste.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        try:
            flags = Path("/proc/cpuinfo").read_text().split()
        except OSError:
            return False
        return "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags  # the last is Arm's
    return False


def pick_precision(asked: str, device: torch.device) -> str:
    """`auto` becomes bf16 where the device has it, else fp32."""
    if asked != "auto":
        return asked
    return "bf16" if bf16_is_native(device) else "fp32"
