"""How much memory glibc's allocator takes for the tensors of a traced step: the same requests, made of it once more.

Run as a program of its own: it reads events as lines `number size` (`-number 0` frees) and prints the bytes of all
pages that a tensor ever lay in. Only the allocator is asked; no page is touched but those with its own notes.

While training freed memory stays with the process (training/memory/cpu_allocator.py), so each page that was ever used
counts. PyTorch asks for multiples of 64 bytes; glibc 2.36 cuts a little off both ends of a larger piece, where small
objects then come to lie. Freed, the piece is too short for the same tensor, and neighbours do not join. So each tensor
comes with `SMALL` objects, as in PyTorch.
"""

from __future__ import annotations

import ctypes
import sys

SMALL = (24, 40, 56)
"""Bytes of the small objects that come with each tensor; fitted: see benchmarks/plan.md."""
_PAGE = 4096
_ROOM = 8 << 30  # bytes that the heap may grow by; larger runs are scaled down to it


def main() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
    library.mallopt(-1, -1)  # as cpu_allocator.py does
    library.mallopt(-4, 0)
    first = library.malloc(_ROOM)
    library.free(first)
    pages = bytearray(_ROOM // _PAGE)
    tensors: dict[int, tuple[int, list[int]]] = {}
    for line in sys.stdin:
        number, size = map(int, line.split())
        if number < 0:
            address, small = tensors.pop(-number)
            for each in (*small, address):
                library.free(each)
            continue
        pointer = ctypes.c_void_p()
        library.posix_memalign(ctypes.byref(pointer), 64, max(16, size))
        address = pointer.value or 0
        tensors[number] = address, [library.malloc(each) for each in SMALL]
        begin, end = (address - first) // _PAGE, -(-(address + size - first) // _PAGE)
        if begin >= 0 and end <= len(pages):
            pages[begin:end] = b"\1" * (end - begin)
    print(pages.count(1) * _PAGE)


if __name__ == "__main__":
    main()
