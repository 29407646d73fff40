"""What the names of files say: the last part of an address, and the suffixes of compressed files."""

from __future__ import annotations

from urllib.parse import urlsplit

PACKED = (".gz", ".zst", ".xz", ".bz2")


def packed_too(*suffixes: str) -> tuple[str, ...]:
    """The suffixes, and each with that of a compressed file behind it."""
    return (*suffixes, *(suffix + packed for suffix in suffixes for packed in PACKED))


def is_url(path: str) -> bool:
    return path.lower().startswith(("http://", "https://"))


def file_name(origin: str) -> str:
    """The last part of a path or URL, in small letters: it has the suffixes that say what the file holds."""
    return (urlsplit(origin).path if is_url(origin) else origin).lower().rsplit("/", 1)[-1]


def unpacked_name(origin: str) -> str:
    """The same without the suffix of a compressed file: `a.csv` of `b/a.csv.gz`."""
    name = file_name(origin)
    return next((name.removesuffix(suffix) for suffix in PACKED if name.endswith(suffix)), name)
