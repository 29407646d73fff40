"""The device of a process that computes by itself, and a device's precisions: native ones and supported ones."""

from __future__ import annotations

from pathlib import Path

import torch

from artel.errors import InputError, missing_extra

_KEY = "train.precision"
_FLOAT8_CAPABILITY = (8, 9)  # of Ada and Hopper, the first with tensor cores for float8


def own_device() -> torch.device:
    """What this process computes on by itself: its current GPU, or the CPU where there is none.

    Of a process of several, `parallel.local_device` says by its number which GPU that is to be.
    """
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_named(name: str) -> torch.device:
    """The device of that name, as cuda:1. Raises InputError where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError.at("device", f"{name!r} is no device", "write cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError.at("device", f"{name} is not supported", "write cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        what = f"there is no {name}: this machine has {torch.cuda.device_count()} GPUs that PyTorch can use"
        raise InputError.at("device", what, "write cpu, or leave it out")
    return device


def autocast_is_on(kind: str) -> bool:
    """Whether autocast is on for devices of a kind. PyTorch has none for meta, and raises when it is asked."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def bf16_is_native(device: torch.device) -> bool:
    """Whether matrix products in bf16 run in hardware.

    On a CPU without the instructions PyTorch emulates them at 0.3 GFLOP/s, where float32 reaches 115 (two cores of a
    server processor with AVX2 only).
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


def pick_precision(requested: str, device: torch.device, weights: str = "fp32") -> str:
    """What layers compute in: fp32, bf16, fp16 or fp8. `auto` is bf16 where the device multiplies it or `weights` are
    it.

    Every device supports bf16 and fp16, if need be by emulation. Raises InputError where fp8 is not supported.
    """
    if requested == "auto":
        return "bf16" if weights == "bf16" or bf16_is_native(device) else "fp32"
    if requested == "fp8":
        _check_float8(device)
    return requested


def autocast_dtype(precision: str) -> torch.dtype | None:
    """torch.autocast's dtype for a precision; None for fp32. What is not float8 in fp8 is bf16."""
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}[precision]


def _check_float8(device: torch.device) -> None:
    if device.type != "cuda":
        raise InputError.at(_KEY, f"fp8 needs a GPU and this is {device.type}", "write auto, bf16 or fp32")
    capability = torch.cuda.get_device_capability(device)
    if capability < _FLOAT8_CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (capability, _FLOAT8_CAPABILITY))
        what = f"fp8 needs a GPU of compute capability {needs} or higher and this one has {has}"
        raise InputError.at(_KEY, what, "write bf16 or auto")
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        raise missing_extra("torchao", "fp8", f"{_KEY}: fp8") from None
