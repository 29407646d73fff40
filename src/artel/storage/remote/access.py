"""Access to S3 and the Hugging Face hub, and their errors as messages with a fix."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from artel.errors import ArtelError, InputError, Problem, WorkError, missing_extra

_SCHEMES = ("s3://", "hf://")
_FIX_ADDRESS = {
    "s3": "write s3://BUCKET/KEY or a glob, s3://BUCKET/texts/*.jsonl.zst; look with: aws s3 ls",
    "hf": "write hf://datasets/OWNER/NAME/FILE or a glob, .../NAME/data/*.parquet; if it is private: hf auth login",
}
_FIX_NETWORK = {
    "s3": "check the network and the address of the service (AWS_ENDPOINT_URL), and try again",
    "hf": "check the network and the address of the hub (HF_ENDPOINT), and try again",
}
READ, LIST, WRITE = "s3:GetObject", "s3:ListBucket", "s3:PutObject"
"""Permissions by their names in S3."""


class ServiceUnreachable(WorkError):
    """The service does not answer. It may answer later."""


class OfflineError(InputError):
    """The environment forbids network access."""


def is_remote(path: str) -> bool:
    """True if a path is an address on S3 or on the hub."""
    return path.lower().startswith(_SCHEMES)


def scheme(path: str) -> str:
    return path.split("://")[0].lower()


def normalize_address(path: str) -> str:
    """Return the address as fsspec expects it: scheme in lower case, no slash at the end."""
    return f"{scheme(path)}://{path.partition('://')[2].rstrip('/')}"


def endpoint(path: str) -> str:
    """Return the service of an address. Two services may have the same buckets."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if scheme(path) == "s3" else ("HF_ENDPOINT",)
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def fix_address(path: str) -> str:
    return _FIX_ADDRESS[scheme(path)]


@contextmanager
def open_remote(path: str) -> Iterator[Any]:
    """Yield the fsspec file system of an address, without cached listings. Keys for S3 come from the environment."""
    if scheme(path) == "s3":
        try:
            import s3fs
        except ImportError:
            raise missing_extra("s3fs", "s3", path) from None
        yield s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    else:
        from huggingface_hub import HfFileSystem, constants

        if constants.HF_HUB_OFFLINE:
            fix = "unset HF_HUB_OFFLINE, or download it with network access (hf download) and use the folder"
            raise OfflineError([Problem(path, "is on the hub, but HF_HUB_OFFLINE is set", fix)])
        yield HfFileSystem(skip_instance_cache=True, use_listings_cache=False)


@contextmanager
def remote_errors(path: str, *permissions: str) -> Iterator[None]:
    """Turn errors of the file systems into errors with the address and a fix. `permissions`: the required ones.

    Raise InputError (no such file or bucket, no permission, not an address), ServiceUnreachable (the network, the
    server), WorkError (anything else).
    """
    try:
        yield
    except ArtelError:
        raise
    except Exception as error:
        raise _to_artel_error(path, error, permissions or (LIST, READ)) from error


def error_kind(error: Exception) -> str:
    """Return the kind of a file system error: keys, right, bucket, absent, address, reach or other."""
    # The hub's file system says "no such file" also if permission is missing; the cause tells that.
    causes = [error, *([error.__cause__] if error.__cause__ else [])]
    names = {base.__name__ for cause in causes for base in type(cause).__mro__}
    statuses = {getattr(getattr(cause, "response", None), "status_code", None) for cause in causes}
    if names & {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}:
        return "keys"
    if names & {"PermissionError", "GatedRepoError"} or statuses & {401, 403}:
        return "right"
    if "FileNotFoundError" in names and "bucket does not exist" in str(error):
        return "bucket"
    if names & {"FileNotFoundError", "NotADirectoryError", "IsADirectoryError"} or 404 in statuses:
        return "absent"
    if names & {"ParamValidationError", "ValueError", "NotImplementedError", "InvalidRegionError"}:
        return "address"
    # By name, since botocore, httpx and aiohttp need not be installed.
    if names & {"HTTPClientError", "ConnectionError", "TransportError", "ClientConnectionError", "TimeoutError"}:
        return "reach"
    # s3fs reports status 500 and 503 as these error numbers.
    is_failing = isinstance(error, OSError) and error.errno in (errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO))
    return "reach" if is_failing or any(status and status >= 500 for status in statuses) else "other"


def _to_artel_error(path: str, error: Exception, permissions: tuple[str, ...]) -> ArtelError:
    service, kind = scheme(path), error_kind(error)
    message = " ".join(str(error).split())[:300]
    permission_text = " and ".join(permissions)
    fix_keys = (
        f"use keys with the permission {permission_text}: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    )
    if service == "hf":
        fix_keys = "log in (hf auth login, or HF_TOKEN), and accept the conditions on the page of the data set"
    if kind == "keys":
        return InputError.at(path, f"no keys are found: {message}", fix_keys)
    if kind == "right":
        action = "written" if WRITE in permissions else "read"
        return InputError.at(path, f"may not be {action}: {message}", fix_keys)
    if kind == "bucket":
        bucket = path.split("/")[2]
        fix = f"check its name, or make it: aws s3 mb s3://{bucket}"
        return InputError.at(path, f"there is no bucket {bucket}", fix)
    if kind == "absent":
        return InputError.at(path, "there is no such file", _FIX_ADDRESS[service])
    if kind == "address":
        return InputError.at(path, f"is not the address of a file: {message}", _FIX_ADDRESS[service])
    what = f"cannot be reached: {type(error).__name__}: {message}"
    return (ServiceUnreachable if kind == "reach" else WorkError).at(path, what, _FIX_NETWORK[service])
