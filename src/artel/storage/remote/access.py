"""How S3 and the Hugging Face hub are reached, and what is told when they refuse."""

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
    "hf": "write hf://datasets/OWNER/NAME/FILE or a glob, .../NAME/data/*.parquet; where it is private: hf auth login",
}
_FIX_NETWORK = {
    "s3": "check the network and the address of the service (AWS_ENDPOINT_URL), and start again",
    "hf": "check the network and the address of the hub (HF_ENDPOINT), and start again",
}
READ, LIST, WRITE = "s3:GetObject", "s3:ListBucket", "s3:PutObject"
"""What keys may be allowed to do, as S3 calls it."""


class OutOfReach(WorkError):
    """The service does not answer: it may be another time."""


class Offline(InputError):
    """The environment says not to go there."""


def is_remote(path: str) -> bool:
    """Whether a path is an address on S3 or on the hub."""
    return path.lower().startswith(_SCHEMES)


def scheme(path: str) -> str:
    return path.split("://")[0].lower()


def normal(path: str) -> str:
    """The address as the file systems take it: its scheme in small letters, no slash at the end."""
    return f"{scheme(path)}://{path.partition('://')[2].rstrip('/')}"


def endpoint(path: str) -> str:
    """The service of an address: two may have the same names."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if scheme(path) == "s3" else ("HF_ENDPOINT",)
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def fix_address(path: str) -> str:
    return _FIX_ADDRESS[scheme(path)]


@contextmanager
def open_remote(path: str) -> Iterator[Any]:
    """The file system of an address (fsspec), with nothing remembered from earlier listings.

    S3 is asked as its own tools are: keys, region and AWS_ENDPOINT_URL are those of the environment.
    """
    if scheme(path) == "s3":
        try:
            import s3fs
        except ImportError:
            raise missing_extra("s3fs", "s3", path) from None
        yield s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    else:
        from huggingface_hub import HfFileSystem, constants

        if constants.HF_HUB_OFFLINE:
            fix = "unset HF_HUB_OFFLINE, or fetch it where there is a network (hf download) and give the folder"
            raise Offline([Problem(path, "is on the hub, and HF_HUB_OFFLINE says not to go there", fix)])
        yield HfFileSystem(skip_instance_cache=True, use_listings_cache=False)


@contextmanager
def remote_errors(path: str, *needs: str) -> Iterator[None]:
    """What the file systems raise, told with the address and the remedy; `needs` are the rights that this takes.

    Raises InputError (no such file or bucket, no right to it, not an address), OutOfReach (the network, the server),
    WorkError (anything else).
    """
    try:
        yield
    except ArtelError:
        raise
    except Exception as error:
        raise _told(path, error, needs or (LIST, READ)) from error


def reason(error: Exception) -> str:
    """Why a file system refused: keys, right, bucket, absent, address, reach; or other."""
    # The hub's file system says "no such file" also where the cause is that there is no right to it.
    causes = [error, *([error.__cause__] if error.__cause__ else [])]
    names = {each.__name__ for cause in causes for each in type(cause).__mro__}
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
    # By name: botocore's, httpx' and aiohttp's own, none of which need be installed.
    if names & {"HTTPClientError", "ConnectionError", "TransportError", "ClientConnectionError", "TimeoutError"}:
        return "reach"
    # s3fs keeps of a 500 and a 503 no more than these numbers.
    failing = isinstance(error, OSError) and error.errno in (errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO))
    return "reach" if failing or any(status and status >= 500 for status in statuses) else "other"


def _told(path: str, error: Exception, needs: tuple[str, ...]) -> ArtelError:
    kind, why = scheme(path), reason(error)
    said = " ".join(str(error).split())[:300]
    rights = " and ".join(needs)
    keys = f"give keys with the right {rights}: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if kind == "hf":
        keys = "log in (hf auth login, or HF_TOKEN), and accept the conditions on the page of the data set"
    if why == "keys":
        return InputError.at(path, f"no keys are found: {said}", keys)
    if why == "right":
        done = "written" if WRITE in needs else "read"
        return InputError.at(path, f"may not be {done}: {said}", keys)
    if why == "bucket":
        bucket = path.split("/")[2]
        return InputError.at(
            path, f"there is no bucket {bucket}", f"check its name, or make it: aws s3 mb s3://{bucket}"
        )
    if why == "absent":
        return InputError.at(path, "there is no such file", _FIX_ADDRESS[kind])
    if why == "address":
        return InputError.at(path, f"is no address of a file: {said}", _FIX_ADDRESS[kind])
    wrong = f"cannot be reached: {type(error).__name__}: {said}"
    return (OutOfReach if why == "reach" else WorkError)([Problem(path, wrong, _FIX_NETWORK[kind])])
