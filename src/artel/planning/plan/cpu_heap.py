"""How much memory a process takes on a CPU for the tensors of a traced step: the same requests, made once more.

Run as a program of its own: it reads events as lines `number size` (`-number 0` frees) and prints the bytes of all
pages that a tensor ever lay in. Only addresses are asked for; no page is touched but those with glibc's own notes.

While training freed memory stays with the process (training/memory.py), so each page that was ever used
counts. Large tensors lie in a range of addresses of their own, in pages of 2 MB: `Range` says where, as
models/cpu/memory.cpp does. Small ones come from glibc, which is asked. PyTorch asks for multiples of 64 bytes; glibc
2.36 cuts a little off both ends of a larger piece, where small objects then come to lie. Freed, the piece is too short
for the same tensor, and neighbours do not join. So each small tensor comes with `SMALL` objects, as in PyTorch.
"""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_left, insort

SMALL = (24, 40, 56)
"""Bytes of the small objects that come with each tensor; fitted: see benchmarks/plan.md."""
LARGE = 256 << 10
"""Bytes from which on a tensor lies in the range: kLarge of models/cpu/memory.cpp."""
_UNIT, _PAGE, _LARGE_PAGE = 64, 4096, 2 << 20
_ROOM = 8 << 30  # bytes that the heap may grow by for small tensors


class Range:
    """Addresses for large tensors: each takes the smallest free span that holds it, of equal ones the first."""

    def __init__(self) -> None:
        self._spans = [(1 << 62, 0)]  # free ones, as (size, start), sorted
        self._sizes = {0: 1 << 62}  # of the free ones, by start
        self._starts = {1 << 62: 0}  # of the free ones, by end
        self._pages: set[int] = set()

    @property
    def used(self) -> int:
        """Bytes of all pages that a tensor ever lay in."""
        return len(self._pages) * _LARGE_PAGE

    def take(self, size: int) -> tuple[int, int]:
        """(start, size) of a span for a tensor of `size` bytes."""
        size = -(-size // _UNIT) * _UNIT
        length, start = self._spans[bisect_left(self._spans, (size, 0))]
        self._remove(start, length)
        if length > size:
            self._add(start + size, length - size)
        self._pages.update(range(start // _LARGE_PAGE, -(-(start + size) // _LARGE_PAGE)))
        return start, size

    def give(self, start: int, size: int) -> None:
        """Free a span, and join it with its free neighbours."""
        if start in self._starts:
            before = self._starts[start]
            self._remove(before, start - before)
            start, size = before, size + start - before
        if (length := self._sizes.get(start + size)) is not None:
            self._remove(start + size, length)
            size += length
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._spans, (size, start))
        self._sizes[start], self._starts[start + size] = size, start

    def _remove(self, start: int, size: int) -> None:
        del self._spans[bisect_left(self._spans, (size, start))], self._sizes[start], self._starts[start + size]


class Heap:
    """glibc's, for small tensors, set as cpu_allocator.py sets it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.malloc.restype, self._library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self._library.free.restype, self._library.free.argtypes = None, [ctypes.c_void_p]
        self._library.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
        self._library.mallopt(-1, -1)
        self._library.mallopt(-4, 0)
        self._first = self._library.malloc(_ROOM)
        self._library.free(self._first)
        self._pages = bytearray(_ROOM // _PAGE)

    @property
    def used(self) -> int:
        """Bytes of all pages that a tensor ever lay in."""
        return self._pages.count(1) * _PAGE

    def take(self, size: int) -> tuple[int, ...]:
        """The addresses of a tensor of `size` bytes and of the objects that come with it."""
        pointer = ctypes.c_void_p()
        self._library.posix_memalign(ctypes.byref(pointer), _UNIT, max(16, size))
        address = pointer.value or 0
        begin, end = (address - self._first) // _PAGE, -(-(address + size - self._first) // _PAGE)
        if begin >= 0 and end <= len(self._pages):
            self._pages[begin:end] = b"\1" * (end - begin)
        return *(self._library.malloc(each) for each in SMALL), address

    def give(self, addresses: tuple[int, ...]) -> None:
        for each in addresses:
            self._library.free(each)


def main() -> None:
    span, heap = Range(), Heap()
    large: dict[int, tuple[int, int]] = {}
    small: dict[int, tuple[int, ...]] = {}
    for line in sys.stdin:
        number, size = map(int, line.split())
        if number > 0 and size >= LARGE:
            large[number] = span.take(size)
        elif number > 0:
            small[number] = heap.take(size)
        elif -number in large:
            span.give(*large.pop(-number))
        else:
            heap.give(small.pop(-number))
    print(span.used + heap.used)


if __name__ == "__main__":
    main()
