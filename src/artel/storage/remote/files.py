"""Files on S3 and on the Hugging Face hub: listed by name or glob, fetched once into a cache, whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import xxhash

from artel.errors import ArtelError, InputError, WorkError
from artel.storage.atomic import write_file
from artel.storage.http.resume import Unfinished, fetch_once
from artel.storage.locations import cache_folder
from artel.storage.remote.access import (
    READ,
    Offline,
    OutOfReach,
    endpoint,
    fix_address,
    normal,
    open_remote,
    remote_errors,
    scheme,
)

# S3 gives one reader about 80 MB/s: eight pieces at a time, in 64 MiB of memory, fill a fast line.
_PIECE = 8 << 20
_PIECES = 8


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file far away: its address, its size in bytes, and what changes with its content (S3's ETag, git's blob)."""

    address: str
    size: int
    version: str


def list_remote(path: str, tell: Callable[[str], None] | None = None) -> list[RemoteFile]:
    """The file of that address, or those that a glob matches, sorted by name.

    What was listed last is recorded in the cache folder. A service that does not answer, or HF_HUB_OFFLINE, is then
    as good as one that says the same again, and `tell` is told so: nodes without a network train on what was fetched
    before. Raises InputError (no such file, no right to it, offline, a package that is missing), WorkError (the
    network or the server fails).
    """
    path = normal(path)
    key = xxhash.xxh3_128_hexdigest(f"{endpoint(path)}\n{path}".encode())
    record = cache_folder() / "listings" / f"{key}.json"
    try:
        listed = _ask(path)
    except (OutOfReach, Offline) as error:
        if (recorded := _recorded(record)) is None:
            raise
        listed, asked = recorded
        if tell is not None:
            tell(f"{path} {error.problems[0].what.split(':')[0]}; the listing of {asked} is used")
        return listed
    content = {"path": path, "asked": datetime.now().astimezone().isoformat(" ", "minutes")}
    with suppress(ArtelError):  # a cache that cannot be written to: there is a network, and nothing is lost
        write_file(record, json.dumps({**content, "files": [asdict(file) for file in listed]}, ensure_ascii=False))
    return listed


def fetch_remote(file: RemoteFile, cache: Path | str) -> Path:
    """The content of a listed file, from `cache` if that version of it was fetched before.

    A fetch that was cut, also by a kill, goes on where it was. Raises what `list_remote` does, and WorkError when the
    file has changed since it was listed.
    """
    key = f"{endpoint(file.address)}\n{file.address}\n{file.version}\n{file.size}"
    digest = xxhash.xxh3_128_hexdigest(key.encode())
    return fetch_once(Path(cache), digest, lambda unfinished: _download(file, unfinished)) / "body"


def described(entry: dict[str, Any], path: str) -> RemoteFile:
    """A file as its file system tells of it."""
    version = entry.get("ETag") or entry.get("blob_id")
    if not version:
        raise WorkError.at(path, "is listed without a version (ETag)", "fetch it yourself, and give the file")
    return RemoteFile(f"{scheme(path)}://{entry['name']}", int(entry["size"]), str(version).strip('"'))


def _ask(path: str) -> list[RemoteFile]:
    is_glob = any(mark in path for mark in "*?[")
    with remote_errors(path), open_remote(path) as files:
        files.retries = 1  # s3fs' five times botocore's five would be half a minute before a node is known to be alone
        found = files.glob(path, detail=True).values() if is_glob else [files.info(path)]
        listed = [described(entry, path) for entry in found if entry["type"] == "file"]
    if listed:
        return sorted(listed, key=lambda file: file.address)
    if is_glob:
        raise InputError.at(path, "no file matches", fix_address(path))
    raise InputError.at(path, "is a folder", f"write a glob: {path}/*")


def _recorded(record: Path) -> tuple[list[RemoteFile], str] | None:
    try:
        content = json.loads(record.read_bytes())
        return [RemoteFile(**file) for file in content["files"]], str(content["asked"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _download(file: RemoteFile, unfinished: Unfinished) -> dict[str, Any]:
    about = {"address": file.address, "version": file.version}
    with remote_errors(file.address, READ), open_remote(file.address) as files:
        if unfinished.about != about:
            unfinished.start(about)
        else:
            _check_version(files, file, unfinished)  # the parts of another version need not have the same places
        for piece in _pieces(files, file, unfinished.size):
            unfinished.write(piece)
        _check_version(files, file, unfinished)
        if unfinished.size != file.size:
            raise _changed(file, unfinished)
    return about


def _pieces(files: Any, file: RemoteFile, start: int) -> Iterator[bytes]:
    """The content from byte `start` on; memory does not grow with the size of the file."""
    if scheme(file.address) == "s3":
        for first in range(start, file.size, _PIECE * _PIECES):
            starts = list(range(first, min(first + _PIECE * _PIECES, file.size), _PIECE))
            ends = [min(piece + _PIECE, file.size) for piece in starts]
            for piece in files.cat_ranges([file.address] * len(starts), starts, ends):
                if isinstance(piece, Exception):
                    raise piece
                yield piece
    elif start < file.size:
        with files.open(file.address, "rb", block_size=_PIECE, cache_type="none") as stream:
            stream.seek(start)
            while piece := stream.read(_PIECE):
                yield piece


def _check_version(files: Any, file: RemoteFile, unfinished: Unfinished) -> None:
    if described(files.info(file.address), file.address).version != file.version:
        raise _changed(file, unfinished)


def _changed(file: RemoteFile, unfinished: Unfinished) -> WorkError:
    what = f"changed while it was fetched ({unfinished.size:,} bytes came of {file.size:,})"
    unfinished.start({})
    return WorkError.at(file.address, what, "start again when it is no longer written")
