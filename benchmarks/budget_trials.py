"""The small runs that benchmarks/budget_fits.py trains, those first that decide most."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

KILO = 1024


@dataclass(frozen=True, slots=True)
class Trial:
    """One run at a constant rate, and where copies of it decay."""

    group: str
    width: int = 128
    layers: int = 2
    tokens: tuple[int, ...] = (256 * KILO,)
    """Lengths of the whole runs, decay included; powers of two times the first."""
    text: str = "novel"
    share: float = 1.0
    """Of the training text that is there; the rest is never seen."""
    family: str = "nanochat"
    tied: bool = False
    softcap: bool = False
    """nanochat: bound the logits, which keeps artel from computing head and loss together."""
    init: float = 0.02
    vocab: int = 4096
    block: int = 256
    batch: int = 8
    """Blocks."""
    optimizer: str = "muon"
    rate: float = 8e-3
    """Peak learning rate of AdamW: embeddings, head, norms."""
    muon_rate: float = 0.02
    weight_decay: float = 0.1
    dropout: float = 0.0
    decay: float = 0.5
    seed: int = 0

    @property
    def key(self) -> str:
        """Tells finished runs apart; the group is only a heading."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "group"}, sort_keys=True)


SIZES = {64: 2, 128: 2, 192: 3, 256: 4, 320: 5, 384: 6}
"""Layers by width."""


def powers(first: int, last: int) -> tuple[int, ...]:
    """Tokens from 1,024 doubled `first` times to 1,024 doubled `last` times."""
    return tuple(KILO << power for power in range(first, last + 1))


def trials() -> Iterator[Trial]:
    """All trials, those first that decide most."""
    first = Trial("family", 256, 4, rate=2e-3)
    for family, tied in (("llama", True), ("gpt2", True), ("llama", False), ("qwen3", True)):
        yield replace(first, family=family, tied=tied, softcap=True)
    yield replace(first, softcap=True)
    yield first
    for adam in (0.5, 1, 2, 4):
        yield Trial("rate", rate=2e-3 * adam)
    for width, last in ((64, 8), (128, 7), (192, 7)):
        yield Trial("size", width, SIZES[width], powers(5, last))
    yield Trial("family-rate", family="llama", tied=True, softcap=True)
    for muon in (0.5, 2):
        yield Trial("rate", muon_rate=0.02 * muon)
    yield Trial("rate", rate=1.6e-2)
    yield Trial("size", 64, 2, powers(7, 10))
    yield Trial("size", 128, 2, powers(7, 10))
    yield Trial("size", 192, 3, powers(7, 9))
    for batch in (2, 4, 16, 32):
        yield Trial("batch", batch=batch)
    for width, last in ((192, 12), (256, 12)):
        yield Trial("passes", width, SIZES[width], powers(9, last))
    for width, last in ((128, 11), (192, 11), (256, 10), (64, 11), (384, 9)):
        yield Trial("repeat", width, SIZES[width], powers(7, last), share=1 / 4)
    for weight_decay in (0.4, 1.6):
        yield Trial("regularize", 256, 4, powers(9, 10), share=1 / 4, weight_decay=weight_decay)
    for width, last, weight_decay in ((256, 10, 3.2), (192, 11, 1.6), (256, 10, 6.4), (192, 11, 3.2)):
        trial = Trial("regularize", width, SIZES[width], powers(8, last), share=1 / 4)
        yield replace(trial, weight_decay=weight_decay)
    for width, last in ((256, 11), (192, 12), (320, 11)):
        yield Trial("regularize-novel", width, SIZES[width], powers(10, last), weight_decay=0.4)
    yield Trial("regularize-novel", 256, 4, powers(10, 11), weight_decay=0.8)
    yield Trial("repeat", 128, 2, powers(7, 10), share=1 / 8)
    yield Trial("size", 256, 4, powers(7, 9))
    yield Trial("repeat", 64, 2, powers(7, 10), share=1 / 8)
    for weight_decay in (0.0, 0.4):
        yield Trial("regularize", tokens=powers(9, 9), share=1 / 8, weight_decay=weight_decay)
    for adam in (0.25, 0.5, 1, 2):
        yield Trial("rate-width", 256, 4, powers(7, 7), rate=8e-3 * adam)
    for muon in (0.5, 2):
        yield Trial("rate-width", 256, 4, powers(7, 7), muon_rate=0.02 * muon)
    for decay in (0.25, 0.75):
        yield Trial("decay", decay=decay)
    yield Trial("family", tied=True)
    yield Trial("size", 128, 2, powers(7, 10), text="pile")
    for muon in (0.5, 2):
        yield Trial("rate-length", tokens=powers(10, 10), muon_rate=0.02 * muon)
    for rate in (2e-3, 4e-3, 8e-3):
        yield Trial("adamw", optimizer="adamw", rate=rate)
    for layers in (1, 4):
        yield Trial("depth", 128, layers)
    for init in (0.01, 0.04):
        yield Trial("init", init=init)
    yield Trial("repeat", 256, 4, powers(7, 9), share=1 / 8)
    for batch in (2, 4, 16):
        yield Trial("batch-width", 256, 4, powers(8, 8), batch=batch)
    yield Trial("size", 384, 6, powers(7, 9))
    for vocab in (1024, 2048, 8192):
        yield Trial("vocab", vocab=vocab)
    for batch in (2, 32):
        yield Trial("batch-length", tokens=powers(10, 10), batch=batch)
    for width in (64, 192):
        yield Trial("size", width, SIZES[width], powers(7, 10), text="other-novel")
    for width in (64, 192):
        yield Trial("size", width, SIZES[width], powers(7, 10), text="pile")
    yield Trial("size", 64, 2, powers(7, 13))
    yield Trial("size", 128, 2, powers(7, 12))
    yield Trial("size", 256, 4, powers(7, 11))
    yield Trial("size", 384, 6, powers(7, 10))
