"""The file of results: a JSON line for each prompt in their order. What stands in it is not computed again.

Beside OUT lies OUT.settings.json: by what model and settings it was written.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from artel.errors import InputError
from artel.inference.batch.prompts import Prompt
from artel.storage import check_new, check_regular, disk_errors, lock, user_path, write_file

_KEY = "--out"
_WEIGHTS_READ = 2**16
"""Bytes of each file of weights: training changes all of them."""


class Results:
    """An open file of results."""

    def __init__(self, file: BinaryIO, path: Path, done: int) -> None:
        self.done = done
        """Results in it."""
        self._file, self._path = file, path

    def add(self, result: dict[str, Any]) -> None:
        """Write the next result; it stays if the process is killed. Raises WorkError."""
        with disk_errors(self._path.parent):
            self._file.write(json.dumps(result, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
            self._file.flush()
        self.done += 1

    @classmethod
    @contextmanager
    def open(cls, name: str, prompts: Sequence[Prompt], settings: dict[str, Any]) -> Iterator[Results]:
        """The file, behind its last whole line; nobody else writes it meanwhile.

        Raises InputError where it is no file of these prompts and settings; WorkError where another process has it.
        """
        path = user_path(name, _KEY).absolute()
        beside = path.with_name(f"{path.name}.settings.json")
        with lock(path.with_name(f".{path.name}.lock"), wait=False, keep=False):
            check_regular(path)
            done = 0
            if path.exists():
                _check_settings(name, path, beside, settings)
                done = _take_up(name, path, prompts)
            else:
                write_file(beside, json.dumps(settings, ensure_ascii=False, indent=1) + "\n")
            with disk_errors(path.parent), path.open("ab") as file:
                results = cls(file, path, done)
                try:
                    yield results
                finally:
                    os.fsync(file.fileno())
                    if not results.done:  # nothing was begun: the model was not found, say
                        path.unlink(missing_ok=True)
                        beside.unlink(missing_ok=True)


def _check_settings(name: str, path: Path, beside: Path, settings: dict[str, Any]) -> None:
    if not beside.exists():
        check_new(path, _KEY)
    try:
        written = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError.at(_KEY, f"{beside} cannot be read", f"remove it and {name}, or choose another name") from None
    if not isinstance(written, dict):
        written = {}
    other = [
        f"{key} {written.get(key)} then, {settings.get(key)} now"
        for key in {**written, **settings}
        if written.get(key) != settings.get(key)
    ]
    if other:
        fix = "write the same again, or choose another --out"
        raise InputError.at(_KEY, f"{name} was begun with other settings: {'; '.join(other)}", fix)


def _take_up(name: str, path: Path, prompts: Sequence[Prompt]) -> int:
    """The number of whole lines; what is torn behind them is cut off. Raises InputError for other lines."""
    end = done = 0
    with path.open("r+b") as file:
        for line in file:
            result = _parsed(line)
            if result is None:
                if file.read(1):
                    raise InputError.at(
                        f"{name}:{done + 1}", "is no result, and results follow", "mend it or remove it"
                    )
                break
            where = prompts[done].place if done < len(prompts) else name
            if done >= len(prompts) or not _has(result, prompts[done].fields):
                what = f"is another prompt than the one that {name}:{done + 1} answers"
                if done >= len(prompts):
                    what = f"has more results than the {len(prompts):,} prompts"
                raise InputError.at(where, what, "put the prompts back as they were, or choose another --out")
            end += len(line)
            done += 1
        file.truncate(end)
    return done


def _has(result: dict[str, Any], fields: dict[str, Any]) -> bool:
    """Whether it begins with these fields, as JSON writes them: NaN is NaN there."""
    return json.dumps({name: result.get(name) for name in fields}) == json.dumps(fields)


def weights_of(name: str) -> str:
    """A short checksum of the weights in a run's or a model's folder, by the ends of their files; empty for others."""
    folder = Path(name)
    files = [*folder.glob("*.safetensors"), *folder.glob("model/*.safetensors")]
    files += folder.glob("checkpoints/latest/**/*.safetensors")
    checksum = 0
    for file in sorted(files):
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - _WEIGHTS_READ))
            checksum = zlib.crc32(opened.read(), zlib.crc32(str(size).encode(), checksum))
    return f"{checksum:08x}" if files else ""


def _parsed(line: bytes) -> dict[str, Any] | None:
    """None for a line that was torn when the process was killed."""
    try:
        result = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return result if isinstance(result, dict) else None
