"""The secret that the hosts of a run share, so that they accept nothing from others. It is never on a command line."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from artel.errors import InputError
from artel.storage import disk_errors

VARIABLE = "ARTEL_SECRET"
_SHORTEST = 16  # bytes: whoever reaches the port can try words against a signature without end
_FIX = f"export the same {VARIABLE} on every host"
_SAY_SECONDS = 10


def run_secret(file: Path, leads: bool, patience: float, announce: Callable[[str], None]) -> bytes:
    """ARTEL_SECRET, or the content of `file`, in the folder that all hosts share; the leading host writes it once.

    The others wait `patience` seconds for it, and announce that. Raises InputError where the secret is short, does
    not come, or can be read by others; WorkError for errors of the disk.
    """
    text = os.environ.get(VARIABLE)
    if text is not None:
        return _checked(text.encode("utf-8", "surrogateescape"), VARIABLE)
    with disk_errors(file):
        if leads and not file.exists():
            _make(file)
        _await(file, patience, announce)
        if file.stat().st_mode & 0o077:
            fix = f"remove it, and start all hosts again; where the disk knows no owners, {_FIX}"
            raise InputError.at(str(file), "others than its owner can read this secret", fix)
        return _checked(file.read_bytes(), str(file))


def _checked(secret: bytes, place: str) -> bytes:
    if len(secret.strip()) < _SHORTEST:
        fix = f"write {_SHORTEST} or more, as by: openssl rand -hex 32"
        raise InputError.at(place, f"has {len(secret.strip())} bytes, which can be guessed", fix)
    return secret


def _make(file: Path) -> None:
    """Write the file whole, readable from its first moment for its owner only."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(number, "wb") as stream:
        stream.write(secrets.token_hex(32).encode())
        os.fsync(stream.fileno())
    unfinished.replace(file)


def _await(file: Path, patience: float, announce: Callable[[str], None]) -> None:
    start, announced = time.monotonic(), False
    while not file.exists():
        waited = time.monotonic() - start
        if waited > patience:
            what = f"the first host has not written this secret for {patience / 60:.0f} minutes"
            fix = f"hosts share the run's folder, under the same path; or {_FIX}"
            raise InputError.at(str(file), what, fix)
        if waited > _SAY_SECONDS and not announced:
            announce(f"waiting for the first host to write {file}")
            announced = True
        time.sleep(0.2)
