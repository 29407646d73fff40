"""What file names tell: the last part of an address, and the suffixes of compressed files."""

from __future__ import annotations

from urllib.parse import urlsplit

COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


def with_compressed(*suffixes: str) -> tuple[str, ...]:
    """The suffixes, then each of them followed by each suffix of a compressed file."""
    return (*suffixes, *(suffix + compressed for suffix in suffixes for compressed in COMPRESSED))


def is_url(path: str) -> bool:
    return path.lower().startswith(("http://", "https://"))


def file_name(origin: str) -> str:
    """The last part of a path or URL in lower case; its suffixes tell the format."""
    return (urlsplit(origin).path if is_url(origin) else origin).lower().rsplit("/", 1)[-1]


def uncompressed_name(origin: str) -> str:
    """`file_name` without the suffix of a compressed file: `a.csv` for `b/a.csv.gz`."""
    name = file_name(origin)
    return next((name.removesuffix(suffix) for suffix in COMPRESSED if name.endswith(suffix)), name)
