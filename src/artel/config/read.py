"""Read the text of a run file or of another configuration."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import BinaryIO

from artel.errors import InputError

_MAX_BYTES = 10_000_000


def read_stream(stream: BinaryIO) -> str:
    """Read a configuration from a pipe. Raise InputError if it is not UTF-8 or too large."""
    data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise InputError.at(
            "-", f"has over {_MAX_BYTES:,} bytes, too many for a configuration", "use a run file in YAML"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"is not a UTF-8 text file (byte {error.start})"
        raise InputError.at("-", what, "use a run file in YAML") from None


def read_file(path: Path) -> str:
    """Read a configuration file. Raise InputError if it cannot be read, is not a regular file or is too large."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError.at(str(path), "is not a regular file", "use a file that an editor has saved")
        if status.st_size > _MAX_BYTES:
            what = f"has {status.st_size:,} bytes; a configuration has at most {_MAX_BYTES:,}"
            raise InputError.at(str(path), what, "use a run file in YAML")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        what, fix = f"is not a UTF-8 text file (byte {error.start})", "use a run file in YAML"
    except OSError as error:
        what, fix = f"cannot be read: {error.strerror}", "check its permissions"
    raise InputError.at(str(path), what, fix)
