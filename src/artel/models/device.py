"""The device of a process: its precisions, its row multiple, and its CPU threads.

Only one thread of a process computes on all cores. Each thread that computes gets its own OpenMP workers, one for each
other core, and keeps them until it ends. Once a process has more workers than cores, those of GNU OpenMP sleep
instead of spinning between operations (gomp_managed_threads in libgomp/team.c). Waking them made a training step on two
cores 1.4 to 1.5 times as long (benchmarks/NOTES.md). So one thread computes; all other threads stay on one core
or release their workers.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from artel.errors import InputError, missing_extra

_KEY = "train.precision"
_FLOAT8_CAPABILITY = (8, 9)  # Ada; with Hopper the first to have tensor cores for float8
_ROW_MULTIPLE = 32
_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0: keeps the number of threads that was set


def current_device() -> torch.device:
    """Return the current GPU of this process, or the CPU if there is no GPU.

    With several processes, `parallel.local_device` picks the GPU by rank.
    """
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def parse_device(name: str) -> torch.device:
    """Return the device of that name (cuda:1). Raise InputError if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError.at("device", f"{name!r} is not a device", "write cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError.at("device", f"{name} is not supported", "write cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        what = f"{name} does not exist: PyTorch can use {torch.cuda.device_count()} GPUs here"
        raise InputError.at("device", what, "use cpu, or remove it")
    return device


def autocast_is_on(device_type: str) -> bool:
    """True if autocast is on for this type of device. PyTorch would raise for meta."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def bf16_is_native(device: torch.device) -> bool:
    """True if matmuls in bf16 run in hardware.

    On a CPU without such instructions PyTorch emulates them at 0.3 GFLOP/s, where float32 reaches 115 (two cores of a
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
    """Return the precision in which layers compute: fp32, bf16, fp16 or fp8.

    `auto` is bf16 if the device multiplies it natively or the `weights` are bf16, else fp32. Every device supports bf16
    and fp16, some by emulation. Raise InputError if fp8 is not supported.
    """
    if requested == "auto":
        return "bf16" if weights == "bf16" or bf16_is_native(device) else "fp32"
    if requested == "fp8":
        _check_float8(device)
    return requested


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype for torch.autocast; None for fp32. With fp8, everything that is not float8 is bf16."""
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}[precision]


def _check_float8(device: torch.device) -> None:
    if device.type != "cuda":
        raise InputError.at(_KEY, f"fp8 needs a GPU, but the device is {device.type}", "write auto, bf16 or fp32")
    capability = torch.cuda.get_device_capability(device)
    if capability < _FLOAT8_CAPABILITY:
        capability_text, required = (".".join(map(str, version)) for version in (capability, _FLOAT8_CAPABILITY))
        what = f"fp8 needs a GPU of compute capability {required} or higher, but this one has {capability_text}"
        raise InputError.at(_KEY, what, "write bf16 or auto")
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        raise missing_extra("torchao", "fp8", f"{_KEY}: fp8") from None


def row_multiple(device_type: str, dtype: torch.dtype) -> int:
    """Return the multiple to which matmuls pad their rows if the row count changes every step; 1 for no padding.

    In bf16 on a CPU oneDNN compiles a kernel for each shape and keeps the last 1,024. Without padding, a step with a
    mixture's groups of tokens took a third longer, and each new number of targets cost the three matmuls of the output
    head 1.8 MiB and 10 ms once (512 wide, 8,000 ids; benchmarks/NOTES.md).
    """
    return _ROW_MULTIPLE if device_type == "cpu" and dtype == torch.bfloat16 else 1


def compute_on_one_core() -> None:
    """Make this thread, and threads started later, compute on one core. Threads that already compute are unaffected."""
    torch.set_num_threads(1)


def release_helpers() -> None:
    """Release this thread's OpenMP workers, before another thread computes. Its next operation starts new ones."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:  # OpenMP 5.0; PyTorch for Linux loads it for all libraries
        pause(_PAUSE_SOFT)
