"""Prompts of a task of reasoning-gym, generated from a seed.

A row has the columns `answer` and `metadata`, with which the reward `gym` scores answers. It depends only on the
settings, its index, and the version of reasoning-gym, which is part of the store's key. A child process generates the
rows: some tasks draw from the global random generator, or from sets, whose order depends on PYTHONHASHSEED.
"""

from __future__ import annotations

import difflib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, field_validator

from artel.config import Count, DataConfig, ShortSection, SourceConfig
from artel.config.schema.quantities import Seed
from artel.errors import Problem, WorkError, missing_extra
from artel.plugins import describe_exception
from artel.text.formats.chat import build_record
from artel.text.formats.format import Format
from artel.text.formats.preferences import PROMPT_FIELDS
from artel.text.formats.prompts import PromptReader, value_to_text
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Record, Rejected

_COLUMNS = ("question", "answer", "metadata")


class GymSource(ShortSection):
    """A task of reasoning-gym (needs artel-lm[gym])."""

    task: str = Field(description="Name of the task, e.g. countdown.")
    samples: Count = Field(default=1000, ge=1, description="Number of prompts to generate.")
    seed: Seed = Field(
        default=0, description="Prompt i depends on seed + i, so equal tasks need seeds that are `samples` apart."
    )
    options: dict[str, Any] = Field(
        default={}, description="Settings of the task, e.g. its difficulty: {min_numbers: 3, max_numbers: 4}."
    )

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, key in (("size", "samples"), ("seed", "seed")):
            if name in options:
                raise ValueError(f"{name} is not a setting of a task; write {key} beside options")
        return options


def check_gym(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    """Return the problem of a missing package, an unknown task, or options that the task does not accept."""
    settings = source.settings(GymSource)
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return list(missing_extra("reasoning-gym", "gym", f"{key}.gym").problems)
    if settings.task not in DATASETS:
        matches = difflib.get_close_matches(settings.task, DATASETS, 1)
        fix = f"did you mean {matches[0]}?" if matches else f"write one of: {', '.join(sorted(DATASETS))}"
        return [Problem(f"{key}.gym.task", f"reasoning-gym has no task {settings.task!r}", fix)]
    try:
        _create_dataset(settings)
    except Exception as error:  # a config class checks its values by assertions
        what = f"{settings.task} does not accept these settings: {describe_exception(error)}"
        fix = f"write settings of its class {DATASETS[settings.task][1].__name__} in reasoning-gym"
        return [Problem(f"{key}.gym.options", what, fix)]
    return []


def read_gym(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per prompt. A prompt that the task cannot generate is rejected."""
    settings = file.source.settings(GymSource)
    reader = PromptReader(file.source)
    name = f"gym:{settings.task}"
    for index, row in enumerate(_generate_rows(settings, f"{file.key}.gym")):
        origin = f"{name}:{index}"
        try:
            if "error" in row:
                raise BadRecord("not_generated", f"{settings.task} failed: {row['error']}; change the seed or options")
            yield build_record(reader.prompt(row), origin, file.source.name or name)
        except BadRecord as error:
            yield Rejected(origin, error.reason, error.detail, file.source.name or name)


def _generate_rows(settings: GymSource, key: str) -> Iterator[dict[str, Any]]:
    """Yield the rows from a child process. Raise WorkError if it ends early."""
    command = [sys.executable, "-P", "-m", __name__, settings.model_dump_json()]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            count = 0
            for line in process.stdout:
                count += 1
                yield json.loads(line)
            if process.wait() or count < settings.samples:
                what = f"{settings.task} ended after {count:,} of {settings.samples:,} prompts"
                raise WorkError.at(key, f"{what} (exit status {process.returncode})", "look at its output above")
        finally:
            process.kill()


def _create_dataset(settings: GymSource) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(settings.task, size=settings.samples, seed=settings.seed, **settings.options)


def _package_version() -> str:
    try:
        return version("reasoning-gym")
    except PackageNotFoundError:  # `check_gym` reports it
        return ""


def main() -> None:
    """Write a line of JSON per row to standard output. What tasks print goes to standard error."""
    import numpy as np

    for number in (signal.SIGINT, signal.SIGPIPE):  # the parent was stopped
        signal.signal(number, signal.SIG_DFL)
    settings = GymSource.model_validate_json(sys.argv[1])
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        dataset = _create_dataset(settings)
        for index in range(settings.samples):
            random.seed(settings.seed + index)
            np.random.seed((settings.seed + index) % 2**32)
            try:
                entry = dataset[index]
                row = {column: entry[column] for column in _COLUMNS}
                line = orjson.dumps(row, value_to_text, orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
            except Exception as error:  # a task may raise anything, and so may a value that is not JSON
                line = orjson.dumps({"error": describe_exception(error)})
            output.write(line + b"\n")


GYM = Format(
    read=read_gym,
    yields=("prompts",),
    has_files=False,
    converters=tuple(PROMPT_FIELDS),
    check=check_gym,
    version=_package_version,
    description="prompts of a task of reasoning-gym",
)

if __name__ == "__main__":
    main()
