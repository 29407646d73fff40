"""Finished folders on S3: a token store that other machines pull, checkpoints that outlive a machine.

S3 has no rename, so one file is the commit: it is written last, and a folder without it is unfinished. Files of a
folder that was pushed in part stay there, and the next push skips them. If the upload of one large file was
interrupted, its parts stay invisible until the bucket's lifecycle rule (AbortIncompleteMultipartUpload) removes them.
Two processes that push to one address at the same time must push the same content. Otherwise pulling fails at the
checksums of the manifest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from artel.errors import InputError, WorkError
from artel.integers import ceil_div
from artel.storage.atomic import new_folder
from artel.storage.http.resume import UNFINISHED, remove_stale
from artel.storage.locks import lock
from artel.storage.regular_files import checksum
from artel.storage.remote.access import (
    LIST,
    READ,
    WRITE,
    error_kind,
    normalize_address,
    open_remote,
    remote_errors,
    scheme,
)
from artel.storage.remote.files import RemoteFile, fetch_remote, remote_file

MANIFEST = "manifest.json"
# Four parts of 16 MiB are uploaded at a time: 64 MiB of memory for any file. S3 allows 10,000 parts.
_PART_BYTES = 16 << 20
_CONCURRENT_PARTS = 4
_MAX_PARTS = 10_000
# With a hyphen: proxies drop headers with underscores.
_CHECKSUM = "xxh3-128"


def exists(address: str) -> bool:
    """True if there is a file (an object) at the address; for a finished folder, pass its manifest.json.

    Raise InputError (no such bucket, no permission), WorkError (the network or the server fails).
    """
    address = normalize_address(address)
    with remote_errors(address, LIST, READ), open_remote(address) as files:
        return _exists(files, address)


def read_bytes(address: str) -> bytes:
    """Return the content of a small file. Raise as `exists` does, and InputError if there is none."""
    address = normalize_address(address)
    with remote_errors(address, READ), open_remote(address) as files:
        return bytes(files.cat_file(address))


def write_bytes(address: str, data: bytes) -> None:
    """Write a small file to S3 atomically.

    Raise InputError (no such bucket, no permission, not on S3), WorkError (the network or the server fails).
    """
    address = normalize_address(address)
    _check_writable(address)
    with remote_errors(address, WRITE), open_remote(address) as files:
        files.pipe_file(address, data)


def push_folder(folder: Path, address: str, commit: str = MANIFEST) -> list[str]:
    """Upload a finished local folder to s3://BUCKET/PREFIX, its file `commit` last; return the uploaded names.

    Files of an earlier push with equal size and checksum are skipped. If `commit` exists already, nothing is done. S3
    checks every upload (Content-MD5, and a checksum for each part of a large file), and its size is checked before
    `commit` is written. Raise InputError (not on S3, no bucket, no permission), WorkError (network, server, a damaged
    upload).
    """
    address = normalize_address(address)
    _check_writable(address)
    local_files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    if commit not in local_files:
        raise InputError.at(str(folder), f"has no {commit}: it is not finished", "make it again")
    commit_file = local_files.pop(commit)
    pushed_names = []
    with remote_errors(address, LIST, READ), open_remote(address) as files:
        if _exists(files, f"{address}/{commit}"):
            return []
        remote = _list_folder(files, address)
        for name, file in local_files.items():
            digest = checksum(file)
            target = f"{address}/{name}"
            has_size = name in remote and remote[name].size == file.stat().st_size
            if not has_size or files.metadata(target).get(_CHECKSUM) != digest:
                _upload(files, file, target, digest)
                pushed_names.append(name)
        remote = _list_folder(files, address)
        for name, file in local_files.items():
            size = remote[name].size if name in remote else 0
            if name not in remote or size != file.stat().st_size:
                what = f"has {size:,} bytes there and {file.stat().st_size:,} here"
                raise WorkError.at(f"{address}/{name}", what, "start again: it resumes from there")
        _upload(files, commit_file, f"{address}/{commit}", checksum(commit_file))
    return [*pushed_names, commit]


def finished_folders(address: str, commit: str = MANIFEST) -> list[str]:
    """Return the names of the finished folders directly under an address, sorted. Raise as `exists` does."""
    address = normalize_address(address)
    with remote_errors(address, LIST, READ), open_remote(address) as files:
        names = _list_folder(files, address)
    return sorted(name[: -len(commit) - 1] for name in names if name.count("/") == 1 and name.endswith(f"/{commit}"))


def remove_remote_folder(address: str, commit: str = MANIFEST) -> None:
    """Remove a finished folder, `commit` first: if interrupted, it is unfinished. Raise as `write_bytes` does."""
    address = normalize_address(address)
    _check_writable(address)
    with remote_errors(address, LIST, WRITE), open_remote(address) as files:
        names = _list_folder(files, address)
        files.rm_file(f"{address}/{commit}")
        for name in names.keys() - {commit}:
            files.rm_file(f"{address}/{name}")


def pull_folder(
    address: str, into: Path, expected: Iterable[tuple[str, int, str]] | None = None, commit: str = MANIFEST
) -> None:
    """Download a folder that was pushed to `address` as `into`, atomically; if `into` exists, do nothing.

    A pull that was interrupted, also by a kill, is resumed; other processes that pull the same folder wait for it.

    Args:
        expected: facts from its manifest, (name within the folder, bytes, xxh3-128), which the files must match.

    Raise InputError (never finished, no permission), WorkError (network, server, a file that does not match).
    """
    into = Path(into)
    address = normalize_address(address)
    if into.is_dir():
        return
    remove_stale(into.parent)
    staging = into.parent / UNFINISHED / f"{into.name}.folder"
    with lock(into.parent / UNFINISHED / f"{into.name}.lock", keep=False):
        if into.is_dir():
            return
        with remote_errors(address, LIST, READ), open_remote(address) as files:
            remote = _list_folder(files, address)
        if commit not in remote:
            fix = "check the address, or push it again: it resumes from there"
            raise InputError.at(address, f"has no {commit}: no folder was finished there", fix)
        facts = {name: (size, digest) for name, size, digest in expected or ()}
        for name, (size, _) in facts.items():
            if name not in remote or remote[name].size != size:
                what = f"has {remote[name].size:,} bytes" if name in remote else "is missing"
                raise _damage_error(address, name, f"{what}, but its manifest says {size:,}")
        bodies = {name: _fetch_checked(file, name, facts, address, staging) for name, file in remote.items()}
        with new_folder(into) as partial:
            for name, body in bodies.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                body.rename(partial / name)
        shutil.rmtree(staging)


def _fetch_checked(file: RemoteFile, name: str, facts: dict[str, tuple[int, str]], address: str, staging: Path) -> Path:
    body = fetch_remote(file, staging)
    digest = json.loads(body.with_name("headers.json").read_bytes())["digest"]  # computed during the download
    if name in facts and digest != facts[name][1]:
        shutil.rmtree(body.parent)
        raise _damage_error(address, name, "does not match the checksum of its manifest")
    return body


def _list_folder(files: Any, address: str) -> dict[str, RemoteFile]:
    """Return all files under an address, by their names relative to it."""
    files_by_name = {}
    for entry in files.find(address, detail=True).values():
        if entry["type"] != "file" or entry["name"].endswith("/"):  # the second: a folder as some tools create it
            continue
        file = remote_file(entry, address)
        name = file.address.removeprefix(f"{address}/")
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise InputError.at(file.address, "has a name that leads out of the folder", "remove it there")
        files_by_name[name] = file
    return files_by_name


def _upload(files: Any, file: Path, address: str, digest: str) -> None:
    size = file.stat().st_size
    part_bytes = max(_PART_BYTES, ceil_div(size, _MAX_PARTS))
    options: dict[str, Any] = {
        "chunksize": part_bytes,
        "max_concurrency": _CONCURRENT_PARTS,
        "Metadata": {_CHECKSUM: digest},
    }
    if size < 2 * part_bytes:  # one request
        md5 = hashlib.md5(file.read_bytes(), usedforsecurity=False).digest()
        options["ContentMD5"] = base64.b64encode(md5).decode()
    # Not `with files.open(…, "wb")`: an error inside it commits what was written so far.
    with remote_errors(address, WRITE):
        files.put_file(str(file), address, **options)


def _exists(files: Any, address: str) -> bool:
    try:
        return bool(files.info(address)["type"] == "file")
    except Exception as error:
        if error_kind(error) == "absent":
            return False
        raise


def _check_writable(address: str) -> None:
    bucket, _, key = address.partition("://")[2].partition("/")
    if scheme(address) != "s3" or not bucket or not key:
        raise InputError.at(address, "is not writable", "write s3://BUCKET/PREFIX")


def _damage_error(address: str, name: str, what: str) -> WorkError:
    fix = f"prepare it again after: aws s3 rm --recursive {address}"
    return WorkError.at(f"{address}/{name}", what, fix)
