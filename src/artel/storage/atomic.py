"""Atomic writes: a file or folder appears under its name only when all its bytes are on the disk.

It is written as a hidden sibling, `.NAME.partial-<pid>-<host and random>`, on the same file system, so that the last
step is one rename. A killed process leaves only such siblings. The next process that makes a folder beside them removes
them, and so does `remove_leftovers`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import stat
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from artel.errors import InputError, WorkError
from artel.host import process_exists
from artel.storage.locations import disk_errors
from artel.storage.regular_files import describe_file_type

_FIX_NEW_NAME = "choose another name, or move it away"
_PARTIAL = re.compile(r"\..*\.partial-(\d+)-([0-9a-f]{8})[0-9a-f]{8}", re.DOTALL)


def write_file(path: Path | str, content: bytes | str) -> None:
    """Write a file (text as UTF-8), replacing any file of that name. Creates the folders above it.

    Raise WorkError (disk full) or InputError (cannot be written); the earlier file is then unchanged.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial_path(path)
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def write_output(path: Path | str, content: bytes | str) -> None:
    """Write a file that a user named. Follow a link; write into a pipe, a character device or /dev/stdout.

    Only a regular file is replaced. Raise InputError for a folder, a disk or a socket, and as `write_file` does.
    """
    path = Path(path)
    with disk_errors(path.parent):
        if not is_stream(path):
            if path.exists() and not path.is_file():
                what = f"is {describe_file_type(path.stat().st_mode) or 'a folder'}, and cannot be replaced with a file"
                raise InputError.at(str(path), what, "choose another name")
            write_file(path.resolve(), content)
            return
        named_descriptor = _find_descriptor(path)
        output = os.open(path, os.O_WRONLY | os.O_APPEND) if named_descriptor is None else os.dup(named_descriptor)
        with os.fdopen(output, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)


def is_stream(path: Path) -> bool:
    """True for a path that is written into, not replaced: a named pipe, a character device, /dev/stdout."""
    if _find_descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _find_descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that a path names, 1 for /dev/stdout; None for other paths."""
    for _ in range(40):  # as many links as Linux follows
        parent = os.path.realpath(path.parent)
        if parent in (f"/proc/{os.getpid()}/fd", "/dev/fd") and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = Path(parent, path.readlink())
    return None


def check_new_file(path: Path | str, key: str = "", fix: str = _FIX_NEW_NAME) -> None:
    """Like `check_new`, for `write_output`: a pipe, a device or /dev/stdout may exist."""
    if not is_stream(Path(path)):
        check_new(path, key, fix)


def check_new(path: Path | str, key: str = "", fix: str = _FIX_NEW_NAME) -> None:
    """Raise InputError if a file or folder to write exists, even as a broken link. `key`: flag or key that names it."""
    if os.path.lexists(path):
        what = "exists already and is not overwritten"
        what = f"{path} {what}" if key else what
        raise InputError.at(key or str(path), what, fix)


@contextmanager
def new_folder(path: Path | str, *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder to fill. It becomes `path` when the block succeeds, and is removed when it fails.

    A `path` that exists by then (another process was faster) is kept, or replaced with `replace`.
    """
    path = Path(path)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers_once(path.parent.absolute())
        partial = _partial_path(path)
        partial.mkdir()
        start_ns = partial.stat().st_mtime_ns
        try:
            yield partial
            _apply_umask(partial, start_ns)
            _sync_tree(partial)
            _move_to(partial, path, replace)
            _sync(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # renamed if the block succeeded


@contextmanager
def scratch_folder(path: Path | str) -> Iterator[Path]:
    """Yield a hidden folder beside `path`, named after it, for temporary files. It is removed at the end."""
    path = Path(path)
    with disk_errors(path.parent):
        _remove_leftovers_once(path.parent.absolute())
        partial = _partial_path(path)
        partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_leftovers(folder: Path | str) -> list[Path]:
    """Remove the partial files and folders in `folder` whose process (on this host) is dead; return them."""
    folder = Path(folder)
    removed = []
    with disk_errors(folder):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for entry in entries:
        match = _PARTIAL.fullmatch(entry.name)
        # The processes of other hosts, which write on a shared disk, may be alive.
        if match is None or match[2] != _host_hash() or process_exists(int(match[1])):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        removed.append(entry)
    return removed


@cache
def _remove_leftovers_once(folder: Path) -> None:
    """Remove leftovers of killed processes in a folder, the first time that this process writes to it."""
    remove_leftovers(folder)


def discard(folder: Path | str, *, ignore_errors: bool = True) -> None:
    """Remove a folder and its content, renamed first. Raise WorkError for files that stay, unless `ignore_errors`."""
    folder = Path(folder)
    renamed = _partial_path(folder)
    with disk_errors(folder.parent):
        folder.rename(renamed)
    try:
        shutil.rmtree(renamed, ignore_errors=ignore_errors)
    except OSError as error:
        what = f"this part of {folder} cannot be removed: {error.strerror} ({error.filename})"
        raise WorkError.at(str(renamed), what, "remove it as the user who owns it") from error


def replace_link(link: Path | str, target: Path | str) -> None:
    """Make `link` a relative symlink to `target` (the tree can be moved), atomically replacing an earlier link.

    Raise InputError if a folder or file has that name, or the disk refuses.
    """
    link = Path(link)
    if link.exists() and not link.is_symlink():
        raise InputError.at(str(link), "is a folder or a file, but artel writes a link there", "move it away")
    with disk_errors(link.parent):
        partial = _partial_path(link)
        partial.symlink_to(os.path.relpath(target, link.parent))
        try:
            partial.replace(link)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync(link.parent)


def _move_to(partial: Path, path: Path, replace: bool) -> None:
    if not replace:
        with suppress(FileExistsError, NotADirectoryError):
            try:
                if not path.is_symlink():
                    partial.rename(path)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
        return
    renamed = _partial_path(path)
    with suppress(FileNotFoundError):
        path.rename(renamed)
    partial.rename(path)
    if renamed.is_dir() and not renamed.is_symlink():
        shutil.rmtree(renamed, ignore_errors=True)
    else:
        renamed.unlink(missing_ok=True)


def _partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{os.getpid()}-{_host_hash()}{secrets.token_hex(4)}")


def _host_hash() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _apply_umask(folder: Path, start_ns: int) -> None:
    """Give files that a library wrote with mode 0600 (safetensors does) the mode that the umask gives other files.

    A copy of a private file stays private. It has the time of its original, before `start_ns`.
    """
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for root, _, names in os.walk(folder):
        for file in (Path(root, name) for name in names):
            status = file.lstat()
            if status.st_mode == stat.S_IFREG | 0o600 and status.st_mtime_ns >= start_ns:
                file.chmod(mode)


def _sync_tree(folder: Path) -> None:
    # Sixteen at a time: the disk writes its journal once for all that wait (3,000 small files: 0.46 s instead of 1.2).
    with ThreadPoolExecutor(16) as pool:
        for root, _, names in os.walk(folder):
            files = [file for name in names if not (file := Path(root, name)).is_symlink()]
            list(pool.map(_sync, files))
            _sync(Path(root))


def _sync(path: Path) -> None:
    """fsync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
