"""Building artel's C++ kernels for CPUs: on the machine that runs them, in about two seconds, cached.

Each kernel is built once per type of processor and version of PyTorch, whose headers and functions it may use. If the
build fails, PyTorch's operators are used instead and a warning gives the reason.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import xxhash

from artel.interrupts import delay_interrupts
from artel.storage import cache_folder

_SOURCES = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
# Without -fno-trapping-math the compiler does not vectorize loops with a comparison.
_FLAGS = ("-std=c++20", "-O3", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", f"-I{_TORCH / 'include'}")
_LIBRARIES = (f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10")  # already loaded, so they are found by name
# By PyTorch's name of the CPU capability. Other processors (ARM) vectorize without flags.
_VECTORS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}
_BUILD_TIMEOUT = 120  # seconds
_build_lock = threading.Lock()


def load_library(name: str) -> ctypes.CDLL | None:
    """Load the functions of `name`.cpp, built at the first call. None, with a warning, if the build fails."""
    with _build_lock:
        return _load_library(name)


@contextmanager
def uninterrupted_compilers() -> Iterator[None]:
    """Shield C++ compilers from Ctrl-C: they would leave truncated files in PyTorch's cache.

    Ctrl-C reaches all processes of a terminal. Compilers inherit the signal mask of the thread that starts them. In
    this process, which would otherwise end the compilers, the interrupt is delayed until the block ends.
    """
    with delay_interrupts():
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return the address of the data of `tensor`."""
    return ctypes.c_void_p(tensor.data_ptr())


@cache
def _load_library(name: str) -> ctypes.CDLL | None:
    source = _SOURCES / f"{name}.cpp"
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    compiler = next((path for name in names if (path := shutil.which(name))), "")
    command = [compiler, *_FLAGS, *_VECTORS.get(torch.backends.cpu.get_cpu_capability(), ()), str(source), *_LIBRARIES]
    sources = [source.read_bytes(), *(header.read_bytes() for header in sorted(_SOURCES.glob("*.h")))]
    key = xxhash.xxh3_64_hexdigest(b"".join(sources) + " ".join([torch.__version__, *command]).encode())
    file = cache_folder() / "built" / f"{name}-{key}.so"
    try:
        if not file.is_file():
            if not compiler:
                raise OSError("no C++ compiler is installed (g++ or clang++)")
            _build(command, file)
        try:
            return ctypes.CDLL(str(file))
        except OSError:  # the cached file is damaged
            _build(command, file)
            return ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())[:300]
        warnings.warn(f"{name}.cpp could not be built, PyTorch's slower operators do the same: {reason}", stacklevel=2)
        return None


def _build(command: list[str], file: Path) -> None:
    """Build in a temporary folder and rename: other processes may build the same file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        built_file = Path(folder) / file.name
        with uninterrupted_compilers():
            command = [*command, "-o", str(built_file)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT)
        built_file.replace(file)
