"""Files on S3 and on the Hugging Face hub: listed by name or glob, fetched once into a cache, whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from artel.errors import ArtelError, InputError, Problem, WorkError, missing_extra
from artel.storage.atomic import new_folder

_SCHEMES = ("s3://", "hf://")
_FIX_ADDRESS = {
    "s3": "write s3://BUCKET/KEY or a glob, s3://BUCKET/texts/*.jsonl.zst; look with: aws s3 ls",
    "hf": "write hf://datasets/OWNER/NAME/FILE or a glob, .../NAME/data/*.parquet; where it is private: hf auth login",
}
_FIX_ACCESS = {
    "s3": "give keys that may read it: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "hf": "log in (hf auth login, or HF_TOKEN), and accept the conditions on the page of the data set",
}
_FIX_NETWORK = {
    "s3": "check the network and the address of the service (AWS_ENDPOINT_URL), and start again",
    "hf": "check the network and the address of the hub (HF_ENDPOINT), and start again",
}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file far away: its address, its size in bytes, and what changes with its content (S3's ETag, git's blob)."""

    address: str
    size: int
    version: str


def is_remote(path: str) -> bool:
    """Whether a path is an address on S3 or on the hub."""
    return path.lower().startswith(_SCHEMES)


def list_remote(path: str) -> list[RemoteFile]:
    """The file of that address, or those that a glob matches, sorted by name.

    S3 is asked as its own tools are: keys, region and AWS_ENDPOINT_URL are those of the environment. Raises InputError
    (no such file, no right to it, offline, a package that is missing), WorkError (the network or the server fails).
    """
    is_glob = any(mark in path for mark in "*?[")
    with _errors(path), _open(path) as files:
        found = files.glob(path, detail=True).values() if is_glob else [files.info(path)]
        listed = [_described(entry, path) for entry in found if entry["type"] == "file"]
    if listed:
        return sorted(listed, key=lambda file: file.address)
    if is_glob:
        raise InputError([Problem(path, "no file matches", _FIX_ADDRESS[_scheme(path)])])
    raise InputError([Problem(path, "is a folder", f"write a glob: {path.rstrip('/')}/*")])


def fetch_remote(file: RemoteFile, cache: Path | str) -> Path:
    """The content of a listed file, from `cache` if that version of it was fetched before.

    Raises what `list_remote` does, and WorkError when the file has changed since it was listed.
    """
    key = f"{_endpoint(file.address)}\n{file.address}\n{file.version}\n{file.size}"
    folder = Path(cache) / xxhash.xxh3_128_hexdigest(key.encode())
    body = folder / "body"
    if not folder.is_dir():
        with new_folder(folder) as partial, _errors(file.address), _open(file.address) as files:
            files.get_file(file.address, str(partial / "body"))
            size, now = (partial / "body").stat().st_size, _described(files.info(file.address), file.address)
            if size != file.size or now.version != file.version:
                what = f"changed while it was fetched ({size:,} bytes came of {file.size:,})"
                raise WorkError([Problem(file.address, what, "start again when it is no longer written")])
            # Which content it is stands in the folder's name: fetched anew, it is the same file to those who compare.
            os.utime(partial / "body", (0, 0))
    return body


def _scheme(path: str) -> str:
    return path.split("://")[0].lower()


def _endpoint(path: str) -> str:
    """Two services may have the same names."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if _scheme(path) == "s3" else ("HF_ENDPOINT",)
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _described(entry: dict[str, Any], path: str) -> RemoteFile:
    version = entry.get("ETag") or entry.get("blob_id")
    if not version:
        raise WorkError([Problem(path, "is listed without a version (ETag)", "fetch it yourself, and give the file")])
    return RemoteFile(f"{_scheme(path)}://{entry['name']}", int(entry["size"]), str(version).strip('"'))


@contextmanager
def _open(path: str) -> Iterator[Any]:
    """The file system of an address, with nothing remembered from earlier listings."""
    if _scheme(path) == "s3":
        try:
            import s3fs
        except ImportError:
            raise missing_extra("s3fs", "s3", path) from None
        yield s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    else:
        from huggingface_hub import HfFileSystem, constants

        if constants.HF_HUB_OFFLINE:
            fix = "unset HF_HUB_OFFLINE, or fetch it where there is a network (hf download) and give the folder"
            raise InputError([Problem(path, "is on the hub, and HF_HUB_OFFLINE says not to go there", fix)])
        yield HfFileSystem(skip_instance_cache=True, use_listings_cache=False)


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """What the file systems raise, told with the address and the remedy."""
    try:
        yield
    except ArtelError:
        raise
    except Exception as error:
        raise _told(path, error) from error


def _told(path: str, error: Exception) -> Exception:
    kind = _scheme(path)
    said = " ".join(str(error).split())[:300]
    # The hub's file system says "no such file" also where the cause is that there is no right to it.
    causes = [error, *([error.__cause__] if error.__cause__ else [])]
    names = {each.__name__ for cause in causes for each in type(cause).__mro__}
    statuses = {getattr(getattr(cause, "response", None), "status_code", None) for cause in causes}
    if names & {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}:
        return InputError([Problem(path, f"no keys are found: {said}", _FIX_ACCESS[kind])])
    if names & {"PermissionError", "GatedRepoError"} or statuses & {401, 403}:
        return InputError([Problem(path, f"may not be read: {said}", _FIX_ACCESS[kind])])
    if names & {"FileNotFoundError", "NotADirectoryError", "IsADirectoryError"} or 404 in statuses:
        return InputError([Problem(path, "there is no such file", _FIX_ADDRESS[kind])])
    if names & {"ParamValidationError", "ValueError", "NotImplementedError", "InvalidRegionError"}:
        return InputError([Problem(path, f"is no address of a file: {said}", _FIX_ADDRESS[kind])])
    return WorkError([Problem(path, f"cannot be reached: {type(error).__name__}: {said}", _FIX_NETWORK[kind])])
