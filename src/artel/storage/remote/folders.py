"""Finished folders on S3: a token store that others fetch instead of making it, checkpoints that outlive a machine.

S3 knows no rename, so one file is the commit: it is written last, and what has none is not there. The files of a
folder that was pushed in part wait for the next push, which skips them; where a push of one large file was cut, its
parts stay unseen until the bucket's lifecycle rule (AbortIncompleteMultipartUpload) clears them away. Two that push
to one address at the same time must push the same; where they do not, the checksums of the manifest tell who pulls.
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
from artel.storage.atomic import new_folder
from artel.storage.checksums import checksum
from artel.storage.http.resume import UNFINISHED, remove_stale
from artel.storage.locks import lock
from artel.storage.remote.access import LIST, READ, WRITE, normal, open_remote, reason, remote_errors, scheme
from artel.storage.remote.files import RemoteFile, described, fetch_remote

MANIFEST = "manifest.json"
# Four parts of 16 MiB travel at a time: 64 MiB of memory whatever the file. S3 takes 10,000 parts at most.
_PART = 16 << 20
_PARTS_AT_A_TIME = 4
_MOST_PARTS = 10_000
# Small letters and hyphens: proxies drop headers with underscores.
_CHECKSUM = "xxh3-128"


def exists(address: str) -> bool:
    """Whether there is a file (an object) of that address; of a finished folder, ask for its manifest.json.

    Raises InputError (no such bucket, no right to look), WorkError (the network or the server fails).
    """
    address = normal(address)
    with remote_errors(address, LIST, READ), open_remote(address) as files:
        return _is_there(files, address)


def read_bytes(address: str) -> bytes:
    """The content of a small file. Raises as `exists` does, and InputError when there is none."""
    address = normal(address)
    with remote_errors(address, READ), open_remote(address) as files:
        return bytes(files.cat_file(address))


def write_bytes(address: str, data: bytes, exclusive: bool = False) -> bool:
    """Write a small file to S3, whole or not at all; whether it was written.

    With `exclusive` a file that is there already stays, and the answer is no: of many who ask at once, at most one
    gets yes. (None does when the network loses the answer to the first: then `read_bytes` tells whose it is.)
    Raises InputError (no such bucket, no right to write, not on S3), WorkError (the network or the server fails).
    """
    address = normal(address)
    _check_writable(address)
    with remote_errors(address, WRITE), open_remote(address) as files:
        try:
            files.pipe_file(address, data, mode="create" if exclusive else "overwrite")
        except OSError as error:
            if exclusive and _code(error) == "PreconditionFailed":
                return False
            raise
    return True


def push_folder(folder: Path, address: str, commit: str = MANIFEST) -> list[str]:
    """Copy a finished local folder to s3://BUCKET/PREFIX, its file `commit` last; the names of the files that went.

    Files that an earlier push left there, with equal size and recorded checksum, are skipped; when `commit` is there
    already, nothing is done: theirs is kept. Every file is checked on the way by S3 (Content-MD5, and a
    checksum for each part of a large one) and by its size before the manifest is written.
    Raises InputError (not on S3, no bucket, no right to write), WorkError (network, server, a damaged upload).
    """
    address = normal(address)
    _check_writable(address)
    local = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    if commit not in local:
        raise InputError.at(str(folder), f"has no {commit}: it is not finished", "make it again")
    last = local.pop(commit)
    pushed = []
    with remote_errors(address, LIST, READ), open_remote(address) as files:
        if _is_there(files, f"{address}/{commit}"):
            return []
        there = _listed(files, address)
        for name, file in local.items():
            digest = checksum(file)
            target = f"{address}/{name}"
            as_large = name in there and there[name].size == file.stat().st_size
            if not as_large or files.metadata(target).get(_CHECKSUM) != digest:
                _put(files, file, target, digest)
                pushed.append(name)
        there = _listed(files, address)
        for name, file in local.items():
            size = there[name].size if name in there else 0
            if name not in there or size != file.stat().st_size:
                what = f"has {size:,} bytes there and {file.stat().st_size:,} here"
                raise WorkError.at(f"{address}/{name}", what, "start again; it goes on from there")
        _put(files, last, f"{address}/{commit}", checksum(last))
    return [*pushed, commit]


def finished_folders(address: str, commit: str = MANIFEST) -> list[str]:
    """Names of the finished folders right under an address, sorted. Raises as `exists` does."""
    address = normal(address)
    with remote_errors(address, LIST, READ), open_remote(address) as files:
        names = _listed(files, address)
    return sorted(
        name.removesuffix(f"/{commit}") for name in names if name.count("/") == 1 and name.endswith(f"/{commit}")
    )


def remove_remote_folder(address: str, commit: str = MANIFEST) -> None:
    """Remove a finished folder, its commit first: cut short, it is an unfinished one. Raises as `write_bytes` does."""
    address = normal(address)
    _check_writable(address)
    with remote_errors(address, LIST, WRITE), open_remote(address) as files:
        names = _listed(files, address)
        files.rm_file(f"{address}/{commit}")
        for name in names.keys() - {commit}:
            files.rm_file(f"{address}/{name}")


def pull_folder(
    address: str, into: Path, wanted: Iterable[tuple[str, int, str]] | None = None, commit: str = MANIFEST
) -> None:
    """Make `into` a copy of a folder that was pushed to `address`, whole or absent; when it is there, nothing is done.

    `wanted` are facts from its manifest, (name within the folder, bytes, xxh3-128): those files must be there and be
    so. A pull that was cut, also by a kill, goes on where it was; others that want the same folder wait for it.
    Raises InputError (never finished, no right to read), WorkError (network, server, a file that is not as it was).
    """
    into, address = Path(into), normal(address)
    if into.is_dir():
        return
    remove_stale(into.parent)
    staging = into.parent / UNFINISHED / f"{into.name}.folder"
    with lock(into.parent / UNFINISHED / f"{into.name}.lock", keep=False):
        if into.is_dir():
            return
        with remote_errors(address, LIST, READ), open_remote(address) as files:
            there = _listed(files, address)
        if commit not in there:
            fix = "check the address, or push it again: it goes on from there"
            raise InputError.at(address, f"has no {commit}: no folder was finished there", fix)
        facts = {name: (size, digest) for name, size, digest in wanted or ()}
        for name, (size, _) in facts.items():
            if name not in there or there[name].size != size:
                found = f"has {there[name].size:,} bytes" if name in there else "is missing"
                raise _damaged(address, name, f"{found}, and its manifest says {size:,}")
        bodies = {name: _fetched(file, name, facts, address, staging) for name, file in there.items()}
        with new_folder(into) as partial:
            for name, body in bodies.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                body.rename(partial / name)
        shutil.rmtree(staging)


def _fetched(file: RemoteFile, name: str, facts: dict[str, tuple[int, str]], address: str, staging: Path) -> Path:
    body = fetch_remote(file, staging)
    digest = json.loads(body.with_name("headers.json").read_bytes())["digest"]  # taken when it came
    if name in facts and digest != facts[name][1]:
        shutil.rmtree(body.parent)
        raise _damaged(address, name, "does not have the checksum that its manifest says")
    return body


def _listed(files: Any, address: str) -> dict[str, RemoteFile]:
    """All files under an address, by their names within it."""
    listed = {}
    for entry in files.find(address, detail=True).values():
        if entry["type"] != "file" or entry["name"].endswith("/"):  # the second: a folder as some tools draw it
            continue
        file = described(entry, address)
        name = file.address.removeprefix(f"{address}/")
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise InputError.at(file.address, "has a name that leads out of the folder", "remove it there")
        listed[name] = file
    return listed


def _put(files: Any, file: Path, address: str, digest: str) -> None:
    size = file.stat().st_size
    part = max(_PART, -(-size // _MOST_PARTS))
    more: dict[str, Any] = {"chunksize": part, "max_concurrency": _PARTS_AT_A_TIME, "Metadata": {_CHECKSUM: digest}}
    if size < 2 * part:  # then it goes in one piece
        md5 = hashlib.md5(file.read_bytes(), usedforsecurity=False).digest()
        more["ContentMD5"] = base64.b64encode(md5).decode()
    # Never `with files.open(…, "wb")`: an error within it commits what was written so far.
    with remote_errors(address, WRITE):
        files.put_file(str(file), address, **more)


def _is_there(files: Any, address: str) -> bool:
    try:
        return bool(files.info(address)["type"] == "file")
    except Exception as error:
        if reason(error) == "absent":
            return False
        raise


def _check_writable(address: str) -> None:
    bucket, _, key = address.partition("://")[2].partition("/")
    if scheme(address) != "s3" or not bucket or not key:
        raise InputError.at(address, "is no place to write to", "write s3://BUCKET/PREFIX")


def _code(error: Exception) -> str:
    """S3's own name of an error, which s3fs keeps as the cause."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _damaged(address: str, name: str, what: str) -> WorkError:
    fix = f"prepare it anew after: aws s3 rm --recursive {address}"
    return WorkError.at(f"{address}/{name}", what, fix)
