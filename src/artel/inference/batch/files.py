"""Reads prompts from lines of text or JSON, and writes results as JSON lines. A second start continues the file.

OUT.settings.json, next to the results in OUT, records the model and the settings.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from artel.errors import InputError, Problem
from artel.storage import check_new, check_regular, disk_errors, lock, user_path, write_file

# Prompts


_PROMPTS = "--prompts"
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
RESERVED = ("text", "finish_reason", "tokens")
"""Fields of results, which prompts may not have."""
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line of the file, with a text or messages."""

    location: str
    """FILE:LINE."""
    fields: dict[str, Any]
    """The line's fields, which the result repeats."""
    text: str = ""
    """The text to continue or fill, or the question."""
    messages: list[dict[str, str]] | None = None
    context: str | None = None
    """The text to find the answer in, for a question."""


class _BadLine(Exception):
    """Raised with the problem of a line, and its fix."""


def read_prompts(name: str) -> list[Prompt]:
    """Return the prompts of a file, without empty lines. Raise InputError if lines are wrong, or there are none."""
    parse = _parse_json_prompt if name.lower().endswith(_JSON_SUFFIXES) else _parse_text_prompt
    prompts, problems = [], []
    for location, line in _read_lines(name):
        try:
            prompts.append(parse(location, _decode_line(line)))
        except _BadLine as error:
            problems.append(Problem(location, *error.args))
    raise_if_any(problems)
    if not prompts:
        raise InputError.at(_PROMPTS, f"{name} has no prompts", "write one on each line")
    return prompts


def raise_if_any(problems: list[Problem]) -> None:
    """Raise InputError with the first problems of lines, if there are any."""
    unlisted = len(problems) - _MAX_PROBLEMS
    if unlisted > 0:
        problems = [*problems[:_MAX_PROBLEMS], Problem(_PROMPTS, f"{unlisted:,} more lines are wrong")]
    if problems:
        raise InputError(problems)


def _read_lines(name: str) -> Iterator[tuple[str, bytes]]:
    path = user_path(name, _PROMPTS)
    check_regular(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError.at(_PROMPTS, f"{name} cannot be read: {error.strerror}", "use a file of prompts") from None
    for line_number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield f"{name}:{line_number}", line.removesuffix(b"\r")


def _decode_line(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _BadLine(f"is not UTF-8 (byte {error.start + 1} of the line)", "save it as UTF-8") from None


def _parse_text_prompt(location: str, line: str) -> Prompt:
    return Prompt(location, {"prompt": line}, line)


def _parse_json_prompt(location: str, line: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"is not JSON: {error}", "write one object per line, or name the file .txt") from None
    if not isinstance(fields, dict):
        raise _BadLine(f"is {type(fields).__name__}, not an object", 'write {"prompt": "…"}')
    reserved = [name for name in RESERVED if name in fields]
    if reserved:
        raise _BadLine(f"has a field {reserved[0]!r}, which is reserved for the result", "rename it")
    names = [name for name in _PARSERS if name in fields]
    if len(names) != 1:
        message = f"has {' and '.join(names)}" if names else f"has none of the fields {', '.join(_PARSERS)}"
        raise _BadLine(message, 'write {"prompt": "…"}, {"messages": […]} or {"question": "…", "context": "…"}')
    return _PARSERS[names[0]](location, fields)


def _parse_prompt(location: str, fields: dict[str, Any]) -> Prompt:
    return Prompt(location, fields, _get_text(fields, "prompt"))


def _parse_question(location: str, fields: dict[str, Any]) -> Prompt:
    if "context" not in fields:
        raise _BadLine("has a question but no context", "add a `context` that contains the answer")
    return Prompt(location, fields, _get_text(fields, "question"), context=_get_text(fields, "context"))


def _parse_messages(location: str, fields: dict[str, Any]) -> Prompt:
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise _BadLine("its messages are not a list of objects", 'write [{"role": "user", "content": "…"}]')
    turns = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise _BadLine(f"messages[{index}] has no role and content", 'write {"role": "user", "content": "…"}')
        path = f"messages[{index}]."
        turns.append({name: _get_text(message, name, path) for name in ("role", "content")})
    if turns[-1]["role"] == "assistant":
        raise _BadLine("the last message is the assistant's own", "remove it: the model writes it")
    return Prompt(location, fields, messages=turns)


_PARSERS: dict[str, Callable[[str, dict[str, Any]], Prompt]] = {
    "prompt": _parse_prompt,
    "messages": _parse_messages,
    "question": _parse_question,
}


def _get_text(fields: dict[str, Any], name: str, path: str = "") -> str:
    text = fields[name]
    if not isinstance(text, str):
        raise _BadLine(f"{path}{name} is {type(text).__name__}, not a string", "write it in quotes")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadLine(f"{path}{name} contains a lone surrogate (\\ud800 to \\udfff)", "fix it") from None
    return text


# Results


_OUT = "--out"
_CHECKSUM_BYTES = 2**16
"""Bytes read from the end of each weight file. A part is enough, since training changes all weights."""


class Results:
    """An open file of results."""

    def __init__(self, file: BinaryIO, path: Path, result_count: int) -> None:
        self.result_count = result_count
        self._file, self._path = file, path

    def add(self, result: dict[str, Any]) -> None:
        """Write and flush the next result. Raise WorkError if the disk fails."""
        with disk_errors(self._path.parent):
            self._file.write(json.dumps(result, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
            self._file.flush()
        self.result_count += 1

    @classmethod
    @contextmanager
    def open(cls, name: str, prompts: Sequence[Prompt], settings: dict[str, Any]) -> Iterator[Results]:
        """Open and lock a file, to append after its last complete line.

        Raise InputError if the file has results of other prompts or settings, WorkError if another process uses it.
        """
        path = user_path(name, _OUT).absolute()
        settings_file = path.with_name(f"{path.name}.settings.json")
        with lock(path.with_name(f".{path.name}.lock"), wait=False, keep=False):
            check_regular(path)
            result_count = 0
            if path.exists():
                _check_settings(name, path, settings_file, settings)
                result_count = _resume_file(name, path, prompts)
            else:
                write_file(settings_file, json.dumps(settings, ensure_ascii=False, indent=1) + "\n")
            with disk_errors(path.parent), path.open("ab") as file:
                results = cls(file, path, result_count)
                try:
                    yield results
                finally:
                    os.fsync(file.fileno())
                    if not results.result_count:  # for example if the model was not found
                        path.unlink(missing_ok=True)
                        settings_file.unlink(missing_ok=True)


def _check_settings(name: str, path: Path, settings_file: Path, settings: dict[str, Any]) -> None:
    if not settings_file.exists():
        check_new(path, _OUT)
    try:
        recorded = json.loads(settings_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError.at(
            _OUT, f"{settings_file} cannot be read", f"remove it and {name}, or choose another name"
        ) from None
    if not isinstance(recorded, dict):
        recorded = {}
    differences = [
        f"{key} was {recorded.get(key)}, now {settings.get(key)}"
        for key in {**recorded, **settings}
        if recorded.get(key) != settings.get(key)
    ]
    if differences:
        fix = "use the same settings, or choose another --out"
        raise InputError.at(_OUT, f"{name} was started with other settings: {'; '.join(differences)}", fix)


def _resume_file(name: str, path: Path, prompts: Sequence[Prompt]) -> int:
    """Return the number of complete lines, and cut off an incomplete last one.

    Raise InputError if the results are not those of `prompts`.
    """
    end = count = 0
    with path.open("r+b") as file:
        for line in file:
            result = _parse_result(line)
            if result is None:
                if file.read(1):
                    raise InputError.at(
                        f"{name}:{count + 1}", "is not a result, but results follow", "fix it or remove it"
                    )
                break
            location = prompts[count].location if count < len(prompts) else name
            if count >= len(prompts) or not _has_fields(result, prompts[count].fields):
                message = f"is another prompt than the one that {name}:{count + 1} answers"
                if count >= len(prompts):
                    message = f"has more results than the {len(prompts):,} prompts"
                raise InputError.at(location, message, "restore the prompts, or choose another --out")
            end += len(line)
            count += 1
        file.truncate(end)
    return count


def _has_fields(result: dict[str, Any], fields: dict[str, Any]) -> bool:
    """True if the result has these fields, compared as JSON, where NaN equals NaN."""
    return json.dumps({name: result.get(name) for name in fields}) == json.dumps(fields)


def weights_checksum(name: str) -> str:
    """Return a short checksum of a run's or model's weights, from the ends of its files. Empty without weights."""
    folder = Path(name)
    files = [*folder.glob("*.safetensors"), *folder.glob("model/*.safetensors")]
    files += folder.glob("checkpoints/latest/**/*.safetensors")
    checksum = 0
    for file in sorted(files):
        with file.open("rb") as stream:
            byte_size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, byte_size - _CHECKSUM_BYTES))
            checksum = zlib.crc32(stream.read(), zlib.crc32(str(byte_size).encode(), checksum))
    return f"{checksum:08x}" if files else ""


def _parse_result(line: bytes) -> dict[str, Any] | None:
    """Return the result in a line, or None if the process was killed while it wrote the line."""
    try:
        result = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return result if isinstance(result, dict) else None
