"""What a source yields, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Record:
    """One text with its origin: `file:line`, the file when it is the whole of it, or a URL."""

    text: str
    origin: str
    set_name: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """What could not be read: why, in one word for the ledger and in a sentence for people."""

    origin: str
    reason: str
    detail: str
    set_name: str


@dataclass(frozen=True, slots=True)
class Document:
    """A cleaned, unique record and the part of the data that it belongs to."""

    record: Record
    part: Literal["train", "validation"]
