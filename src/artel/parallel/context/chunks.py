"""Which part of each sequence a process holds, where several share it.

Under a causal mask late tokens see more than early ones. So the sequence is cut into twice as many chunks as there are
processes, and each holds one from either end: chunk i and chunk 2n - 1 - i, which together see as much as any other
two. Without a causal mask each holds one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """The part of process `rank` of `size`."""

    rank: int
    size: int
    balanced: bool
    """Whether it is a chunk from either end, as a causal mask wants it."""

    @property
    def multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return 2 * self.size if self.balanced else self.size

    def spans(self, part: int) -> Sequence[range]:
        """The places in the sequence of the `part` tokens that each process holds, in pieces one after another."""
        if not self.balanced:
            return (range(self.rank * part, (self.rank + 1) * part),)
        chunk = part // 2
        first, last = self.rank, 2 * self.size - 1 - self.rank
        return range(first * chunk, (first + 1) * chunk), range(last * chunk, (last + 1) * chunk)

    def places(self, part: int, device: torch.device | None = None) -> torch.Tensor:
        """int64 (part,): the same as a tensor."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans(part)])

    def joined(self, parts: torch.Tensor) -> torch.Tensor:
        """All processes' parts, (size, rows, heads, part, width) -> the sequence, (rows, heads, length, width)."""
        if self.balanced:
            early, late = parts.unflatten(3, (2, -1)).unbind(3)
            parts = torch.cat([early, late.flip(0)])
        return parts.movedim(0, 2).flatten(2, 3)

    def cut(self, sequence: torch.Tensor) -> torch.Tensor:
        """The other way: (rows, heads, length, width) -> (size, rows, heads, part, width)."""
        chunks = sequence.unflatten(2, (self.multiple, -1)).movedim(2, 0)
        if not self.balanced:
            return chunks
        early, late = chunks.chunk(2)
        return torch.stack([early, late.flip(0)], dim=3).flatten(3, 4)
