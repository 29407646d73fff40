"""Files on S3 and on the Hugging Face hub: listed by name or glob, downloaded once into a cache, atomically."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import xxhash

from artel.errors import ArtelError, InputError, WorkError
from artel.messages import logger
from artel.storage.atomic import write_file
from artel.storage.http.resume import PartialDownload, fetch_once
from artel.storage.locations import cache_folder
from artel.storage.remote.access import (
    READ,
    OfflineError,
    ServiceUnreachable,
    endpoint,
    fix_address,
    normalize_address,
    open_remote,
    remote_errors,
    scheme,
)

_logged_listings: set[tuple[Path, str]] = set()

# S3 sends about 80 MB/s per request: eight ranges at a time, in 64 MiB of memory, fill a fast line.
_RANGE_BYTES = 8 << 20
_CONCURRENT_RANGES = 8


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A remote file: address, size in bytes, and a version that changes with its content (ETag, or git blob)."""

    address: str
    size: int
    version: str


def list_remote(path: str) -> list[RemoteFile]:
    """Return the file at an address, or the files that a glob matches, sorted by name.

    The cache folder keeps the last listing. It is used, with a note in the log, if the service does not answer or
    HF_HUB_OFFLINE is set: nodes without a network train on what was downloaded before. Raise InputError (no such file,
    no permission, offline, a missing package), WorkError (the network or the server fails).
    """
    path = normalize_address(path)
    key = xxhash.xxh3_128_hexdigest(f"{endpoint(path)}\n{path}".encode())
    record = cache_folder() / "listings" / f"{key}.json"
    try:
        remote_files = _list_files(path)
    except (ServiceUnreachable, OfflineError) as error:
        if (last_listing := _read_record(record)) is None:
            raise
        remote_files, time = last_listing
        # Logged once, not each time that the sources are listed.
        if (record, time) not in _logged_listings and logger.isEnabledFor(logging.INFO):
            _logged_listings.add((record, time))
            logger.info("%s %s; the listing of %s is used", path, error.problems[0].what.split(":")[0], time)
        return remote_files
    content: dict[str, Any] = {"path": path, "asked": datetime.now().astimezone().isoformat(" ", "minutes")}
    with suppress(ArtelError):  # the cache cannot be written: nothing is lost while there is a network
        content["files"] = [asdict(file) for file in remote_files]
        write_file(record, json.dumps(content, ensure_ascii=False))
    return remote_files


def fetch_remote(file: RemoteFile, cache: Path | str) -> Path:
    """Download a listed file, or return it from `cache` if that version was downloaded before.

    A download that was interrupted, also by a kill, is resumed. Raise as `list_remote` does, and WorkError if the file
    changed since it was listed.
    """
    key = f"{endpoint(file.address)}\n{file.address}\n{file.version}\n{file.size}"
    digest = xxhash.xxh3_128_hexdigest(key.encode())
    return fetch_once(Path(cache), digest, lambda partial: _download(file, partial)) / "body"


def remote_file(entry: dict[str, Any], path: str) -> RemoteFile:
    """Return the RemoteFile of an fsspec entry."""
    version = entry.get("ETag") or entry.get("blob_id")
    if not version:
        raise WorkError.at(path, "is listed without a version (ETag)", "download it yourself, and use the file")
    return RemoteFile(f"{scheme(path)}://{entry['name']}", int(entry["size"]), str(version).strip('"'))


def _list_files(path: str) -> list[RemoteFile]:
    is_glob = any(mark in path for mark in "*?[")
    with remote_errors(path), open_remote(path) as files:
        files.retries = 1  # s3fs retries 5 times botocore's 5: without a network that would take half a minute
        entries = files.glob(path, detail=True).values() if is_glob else [files.info(path)]
        remote_files = [remote_file(entry, path) for entry in entries if entry["type"] == "file"]
    if remote_files:
        return sorted(remote_files, key=lambda file: file.address)
    if is_glob:
        raise InputError.at(path, "no file matches", fix_address(path))
    raise InputError.at(path, "is a folder", f"write a glob: {path}/*")


def _read_record(record: Path) -> tuple[list[RemoteFile], str] | None:
    try:
        content = json.loads(record.read_bytes())
        return [RemoteFile(**file) for file in content["files"]], str(content["asked"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _download(file: RemoteFile, partial: PartialDownload) -> dict[str, Any]:
    metadata = {"address": file.address, "version": file.version}
    with remote_errors(file.address, READ), open_remote(file.address) as files:
        if partial.metadata != metadata:
            partial.start(metadata)
        else:
            _check_version(files, file, partial)  # the bytes of another version may be at other positions
        for data in _read_from(files, file, partial.size):
            partial.write(data)
        _check_version(files, file, partial)
        if partial.size != file.size:
            raise _change_error(file, partial)
    return metadata


def _read_from(files: Any, file: RemoteFile, start: int) -> Iterator[bytes]:
    """Yield the content from byte `start` on; memory does not grow with the size of the file."""
    if scheme(file.address) == "s3":
        for first in range(start, file.size, _RANGE_BYTES * _CONCURRENT_RANGES):
            starts = list(range(first, min(first + _RANGE_BYTES * _CONCURRENT_RANGES, file.size), _RANGE_BYTES))
            ends = [min(start + _RANGE_BYTES, file.size) for start in starts]
            for data in files.cat_ranges([file.address] * len(starts), starts, ends):
                if isinstance(data, Exception):
                    raise data
                yield data
    elif start < file.size:
        with files.open(file.address, "rb", block_size=_RANGE_BYTES, cache_type="none") as stream:
            stream.seek(start)
            while data := stream.read(_RANGE_BYTES):
                yield data


def _check_version(files: Any, file: RemoteFile, partial: PartialDownload) -> None:
    if remote_file(files.info(file.address), file.address).version != file.version:
        raise _change_error(file, partial)


def _change_error(file: RemoteFile, partial: PartialDownload) -> WorkError:
    what = f"changed while it was fetched ({partial.size:,} bytes came of {file.size:,})"
    partial.start({})
    return WorkError.at(file.address, what, "try again when it is complete")
