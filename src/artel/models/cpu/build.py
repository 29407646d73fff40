"""C++ of artel's own for processors: built where it runs, in about two seconds, and kept in the cache folder.

It is built once for a kind of processor and a version of PyTorch, whose headers and functions it may use. Where it
cannot be built, what it does is done by PyTorch's operators, and a warning says why.
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

from artel.interrupts import interrupted_after
from artel.storage import cache_folder

_SOURCES = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
# Comparisons may be computed where they are not needed, without which loops with one in them are no vectors.
_FLAGS = ("-std=c++20", "-O3", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", f"-I{_TORCH / 'include'}")
_LIBRARIES = (f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10")  # loaded already: they are found by their names
# By what PyTorch has kernels for on this processor; others (ARM) have vectors without being asked.
_VECTORS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}
_LONGEST = 120  # seconds of building
_building = threading.Lock()


def library(name: str) -> ctypes.CDLL | None:
    """The functions of `name`.cpp, built at the first call; None, with a warning, where they cannot be."""
    with _building:
        return _library(name)


@contextmanager
def uninterrupted_compilers() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal, and would end C++ compilers within a file that PyTorch then keeps.

    They have the mask of the thread that starts them. This process, which would end them, is interrupted at the end.
    """
    with interrupted_after():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Where the numbers of `tensor` begin."""
    return ctypes.c_void_p(tensor.data_ptr())


@cache
def _library(name: str) -> ctypes.CDLL | None:
    source = _SOURCES / f"{name}.cpp"
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    compiler = next((found for name in names if (found := shutil.which(name))), "")
    command = [compiler, *_FLAGS, *_VECTORS.get(torch.backends.cpu.get_cpu_capability(), ()), str(source), *_LIBRARIES]
    texts = [source.read_bytes(), *(header.read_bytes() for header in sorted(_SOURCES.glob("*.h")))]
    key = xxhash.xxh3_64_hexdigest(b"".join(texts) + " ".join([torch.__version__, *command]).encode())
    built = cache_folder() / "built" / f"{name}-{key}.so"
    try:
        if not built.is_file():
            if not compiler:
                raise OSError("no C++ compiler is installed (g++ or clang++)")
            _build(command, built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())[:300]
        warnings.warn(f"{name}.cpp could not be built, PyTorch's slower operators do the same: {reason}", stacklevel=2)
        return None


def _build(command: list[str], built: Path) -> None:
    """Build beside `built` and put it there whole: other processes may be about the same."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        with uninterrupted_compilers():
            subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True, timeout=_LONGEST)
        made.replace(built)
