"""Downloads that go on where they were cut, also by a kill or a power failure.

    CACHE/KEY/body, headers.json     a finished download, whole or absent; the headers tell its checksum (`digest`)
    CACHE/unfinished/KEY.body        what has come so far of another
    CACHE/unfinished/KEY.json        how many of its bytes are surely on the disk, their checksum, and what they are of
    CACHE/unfinished/KEY.lock        held by the process that downloads it

What nobody has gone on with for a week is removed.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from artel.errors import ArtelError
from artel.storage.atomic import new_folder, remove_leftovers, write_file
from artel.storage.locations import disk_errors
from artel.storage.locks import lock

UNFINISHED = "unfinished"
# A kill loses at most this much: 32 MiB are a third of a second at 1 Gbit/s, and a sync costs a hundredth.
_MARK_BYTES = 32 << 20
_MARK_SECONDS = 5.0
_STALE_SECONDS = 7 * 24 * 3600
_CHUNK = 1 << 20


class Unfinished:
    """The body of a download as far as it has come: `size` bytes, and what its maker must know `about` it to go on.

    With nothing known about it, it cannot be gone on with, and goes away when its download fails.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.path, self._mark_path = folder / f"{key}.body", folder / f"{key}.json"
        self._folder = folder
        with disk_errors(folder):
            self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        self.about: dict[str, Any] = {}
        self.size = self._marked = 0
        self._marked_at = time.monotonic()
        self._digest = xxhash.xxh3_128()
        if not self._go_on():
            self.start({})

    @property
    def digest(self) -> str:
        """xxh3-128 of what has come, as `checksum` tells it of a file."""
        return str(self._digest.hexdigest())

    def start(self, about: dict[str, Any]) -> None:
        """Begin anew; what had come is thrown away."""
        with disk_errors(self._folder):
            self._mark_path.unlink(missing_ok=True)
            self._file.seek(0)
            self._file.truncate()
        self.about, self.size, self._marked = about, 0, 0
        self._digest = xxhash.xxh3_128()

    def write(self, piece: bytes) -> None:
        """Add the next bytes. Raises what `disk_errors` does."""
        with disk_errors(self._folder):
            rest = memoryview(piece)
            while rest:
                rest = rest[self._file.write(rest) :]
        self._digest.update(piece)
        self.size += len(piece)
        now = time.monotonic()
        if self.about and (self.size - self._marked >= _MARK_BYTES or now - self._marked_at >= _MARK_SECONDS):
            self._mark()
            self._marked_at = now

    def close(self, *, keep: bool) -> None:
        """Let go of the file; to `keep` it, all that has come is marked."""
        keep = keep and bool(self.about) and self.size > 0
        if keep and not self._file.closed:
            with suppress(ArtelError):  # a full disk: the last mark counts
                self._mark()
        self._file.close()
        if not keep:
            self.path.unlink(missing_ok=True)
            self._mark_path.unlink(missing_ok=True)

    def move(self, target: Path) -> None:
        """Give the finished body its place, on the same disk."""
        self._file.close()
        # Which content it is stands in the cache: fetched anew, it is the same file to those who compare times.
        os.utime(self.path, (0, 0))
        self.path.rename(target)

    def _go_on(self) -> bool:
        """Take what was marked, if it is still so; what came after the mark may not have reached the disk."""
        try:
            mark = json.loads(self._mark_path.read_bytes())
            about, size, digest = dict(mark["about"]), int(mark["bytes"]), str(mark["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        with disk_errors(self._folder):
            left = size
            while left and (piece := self._file.read(min(left, _CHUNK))):
                self._digest.update(piece)
                left -= len(piece)
            if left or self.digest != digest:
                return False
            self._file.truncate(size)
        self.about, self.size, self._marked = about, size, size
        return True

    def _mark(self) -> None:
        with disk_errors(self._folder):
            os.fsync(self._file.fileno())
            write_file(self._mark_path, json.dumps({"about": self.about, "bytes": self.size, "digest": self.digest}))
        self._marked = self.size


def fetch_once(cache: Path, key: str, download: Callable[[Unfinished], dict[str, Any]]) -> Path:
    """The folder CACHE/KEY with `body` and `headers.json`; when it is not there, `download` fetches the body.

    `download` goes on with the unfinished body that it is given, and returns the headers. One process does it at a
    time; others that want the same wait for it. Raises what `download` and `disk_errors` do.
    """
    folder = cache / key
    if folder.is_dir():
        return folder
    remove_stale(cache)
    with lock(cache / UNFINISHED / f"{key}.lock", keep=False):
        if folder.is_dir():
            return folder
        unfinished = Unfinished(cache / UNFINISHED, key)
        finished = False
        try:
            headers = {**download(unfinished), "bytes": unfinished.size, "digest": unfinished.digest}
            with new_folder(folder) as partial:
                (partial / "headers.json").write_text(json.dumps(headers, ensure_ascii=False), encoding="utf-8")
                unfinished.move(partial / "body")
            finished = True
        finally:
            unfinished.close(keep=not finished)
    return folder


@functools.cache
def remove_stale(cache: Path) -> None:
    """Remove what killed downloads left in a cache folder a week ago or earlier; looked for once a process."""
    folder = cache / UNFINISHED
    remove_leftovers(cache)
    remove_leftovers(folder)
    files: dict[str, list[Path]] = {}
    for file in folder.iterdir() if folder.is_dir() else []:
        files.setdefault(file.stem, []).append(file)
    for key, theirs in files.items():
        with suppress(OSError, ArtelError):  # another process is at it, or was faster
            if time.time() - max(file.stat().st_mtime for file in theirs) < _STALE_SECONDS:
                continue
            with lock(folder / f"{key}.lock", wait=False, keep=False):
                for file in theirs:
                    if file.is_dir():
                        shutil.rmtree(file)
                    elif file.suffix != ".lock":
                        file.unlink()
