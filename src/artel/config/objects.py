"""Run files that Python holds: plain values, or `RunConfig` objects, in place of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from artel.config.load import RunFile, read_run_file
from artel.config.schema.run import RunConfig
from artel.errors import InputError

RunLike = str | os.PathLike[str] | Mapping[str, Any] | RunConfig | RunFile
"""A run: the path of a run file, a recipe's name, the folder of an earlier run, its keys as plain values, an object."""

_STEM = "run"
"""A run in no file that names no folder is written to runs/run, as that of a file run.yaml."""


def as_run_file(run: RunLike) -> RunFile:
    """What is given for a run, as a run file that has been read. Raises InputError for what is none."""
    if isinstance(run, RunFile):
        return run
    if isinstance(run, str | os.PathLike):
        return read_run_file(os.fspath(run))
    if isinstance(run, RunConfig | Mapping):
        return RunFile(_plain(run), {(): ""}, _STEM)
    what = f"is a {type(run).__name__}, which describes no run"
    raise InputError.at("run", what, "give a path, a recipe's name, a dict or an artel.RunConfig")


def _plain(value: Any) -> Any:
    """The value as YAML has it. Of an object only what was set: `auto` chooses the rest, as it does for a file."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
