"""Downloads that resume where they stopped, also after a kill or a power failure.

    CACHE/KEY/body, headers.json     a finished download, complete or absent; the headers have its checksum (`digest`)
    CACHE/unfinished/KEY.body        the bytes received so far
    CACHE/unfinished/KEY.json        a mark: the number of bytes synced to disk, their checksum, and their source
    CACHE/unfinished/KEY.lock        held by the process that downloads it

A partial download that nobody resumed for a week is removed.
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
from artel.storage.atomic import discard, new_folder, remove_leftovers, write_file
from artel.storage.locations import disk_errors
from artel.storage.locks import lock

UNFINISHED = "unfinished"
# A kill loses at most this much: 32 MiB are a third of a second at 1 Gbit/s, and a sync takes a hundredth.
_MARK_BYTES = 32 << 20
_MARK_SECONDS = 5.0
_STALE_SECONDS = 7 * 24 * 3600
_CHUNK_BYTES = 1 << 20


class PartialDownload:
    """The first `size` bytes of a download. It can be resumed if it has `metadata`."""

    def __init__(self, folder: Path, key: str) -> None:
        self.path, self._mark_path = folder / f"{key}.body", folder / f"{key}.json"
        self._folder = folder
        with disk_errors(folder):
            self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        self.metadata: dict[str, Any] = {}
        self.size = self._marked_bytes = 0
        self._marked_at = time.monotonic()
        self._digest = xxhash.xxh3_128()
        if not self._resume():
            self.start({})

    @property
    def digest(self) -> str:
        """xxh3-128 of the bytes so far, in the form of `checksum`."""
        return str(self._digest.hexdigest())

    def start(self, metadata: dict[str, Any]) -> None:
        """Start from the first byte; drop the bytes so far."""
        with disk_errors(self._folder):
            self._mark_path.unlink(missing_ok=True)
            self._file.seek(0)
            self._file.truncate()
        self.metadata, self.size, self._marked_bytes = metadata, 0, 0
        self._digest = xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        """Append bytes. Raise as `disk_errors` does."""
        with disk_errors(self._folder):
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        self._digest.update(data)
        self.size += len(data)
        now = time.monotonic()
        if self.metadata and (self.size - self._marked_bytes >= _MARK_BYTES or now - self._marked_at >= _MARK_SECONDS):
            self._save_mark()
            self._marked_at = now

    def close(self, *, keep: bool) -> None:
        """Close the file. With `keep` all its bytes are marked, else it is removed."""
        keep = keep and bool(self.metadata) and self.size > 0
        if keep and not self._file.closed:
            with suppress(ArtelError):  # the disk is full: the last mark counts
                self._save_mark()
        self._file.close()
        if not keep:
            self.path.unlink(missing_ok=True)
            self._mark_path.unlink(missing_ok=True)

    def move(self, target: Path) -> None:
        """Move the finished body to its final name, on the same disk."""
        self._file.close()
        # A constant time of change: downloaded again, the file is the same to code that compares times.
        os.utime(self.path, (0, 0))
        self.path.rename(target)

    def _resume(self) -> bool:
        """Use the marked bytes if their checksum is right. Later bytes may not have reached the disk."""
        try:
            mark = json.loads(self._mark_path.read_bytes())
            metadata, size, digest = dict(mark["about"]), int(mark["bytes"]), str(mark["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        with disk_errors(self._folder):
            remaining = size
            while remaining and (chunk := self._file.read(min(remaining, _CHUNK_BYTES))):
                self._digest.update(chunk)
                remaining -= len(chunk)
            if remaining or self.digest != digest:
                return False
            self._file.truncate(size)
        self.metadata, self.size, self._marked_bytes = metadata, size, size
        return True

    def _save_mark(self) -> None:
        with disk_errors(self._folder):
            os.fsync(self._file.fileno())
            write_file(self._mark_path, json.dumps({"about": self.metadata, "bytes": self.size, "digest": self.digest}))
        self._marked_bytes = self.size


def fetch_once(cache: Path, key: str, download: Callable[[PartialDownload], dict[str, Any]]) -> Path:
    """Return the folder CACHE/KEY with `body` and `headers.json`, which `download` fills if it does not exist.

    `download` receives the partial download, resumes it and returns the headers. One process downloads a key at a
    time; other processes wait for it. Raise as `download` and `disk_errors` do.
    """
    folder = cache / key
    if _is_complete(folder):
        return folder
    remove_stale(cache)
    with lock(cache / UNFINISHED / f"{key}.lock", keep=False):
        if _is_complete(folder):
            return folder
        if folder.is_dir():  # damaged
            discard(folder)
        download_file = PartialDownload(cache / UNFINISHED, key)
        is_finished = False
        try:
            headers = {**download(download_file), "bytes": download_file.size, "digest": download_file.digest}
            with new_folder(folder) as partial:
                (partial / "headers.json").write_text(json.dumps(headers, ensure_ascii=False), encoding="utf-8")
                download_file.move(partial / "body")
            is_finished = True
        finally:
            download_file.close(keep=not is_finished)
    return folder


def _is_complete(folder: Path) -> bool:
    """True if a download exists with its headers and all its bytes."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        size = (folder / "body").stat().st_size
        return bool(json.loads((folder / "headers.json").read_bytes())["bytes"] == size)
    return False


@functools.cache
def remove_stale(cache: Path) -> None:
    """Remove partial downloads older than a week from a cache folder, once per process."""
    folder = cache / UNFINISHED
    remove_leftovers(cache)
    remove_leftovers(folder)
    files: dict[str, list[Path]] = {}
    for file in folder.iterdir() if folder.is_dir() else []:
        files.setdefault(file.stem, []).append(file)
    for key, key_files in files.items():
        with suppress(OSError, ArtelError):  # another process downloads or removes it
            if time.time() - max(file.stat().st_mtime for file in key_files) < _STALE_SECONDS:
                continue
            with lock(folder / f"{key}.lock", wait=False, keep=False):
                for file in key_files:
                    if file.is_dir():
                        shutil.rmtree(file)
                    elif file.suffix != ".lock":
                        file.unlink()
