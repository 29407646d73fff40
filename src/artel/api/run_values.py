"""Reads runs and overrides from Python objects: plain values, `RunConfig` objects and rows."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pydantic import BaseModel

from artel.api.rows import is_table, type_name, write_source
from artel.config.load import RunFile, read_run_file
from artel.config.overrides import Overrides
from artel.config.schema.registered import section_keys
from artel.config.schema.run import RunConfig, TrainConfig
from artel.config.suggest import suggest_key
from artel.errors import InputError, Problem

RunLike = str | os.PathLike[str] | Mapping[str, Any] | RunConfig | RunFile
"""A run: path of a run file, name of a recipe, folder of an earlier run, keys as a dict, or a `RunConfig`."""
OverridesLike = Mapping[str, Any] | Sequence[str] | None
"""Overrides: a dict of dotted keys, or strings as on the command line (`["train.steps=3"]`)."""

_DEFAULT_NAME = "run"
"""Name of a run without a file. Its default folder is runs/run, as if the file were run.yaml."""
_SOURCES = ("data", "sources")

Key = tuple[Any, ...]


def as_run_file(run: RunLike) -> RunFile:
    """Read `run` as a run file, and write rows in it to files. Raise InputError if a value cannot be in a run file."""
    if isinstance(run, RunFile):
        return run
    if isinstance(run, str | os.PathLike):
        return read_run_file(os.fspath(run))
    if isinstance(run, RunConfig | Mapping):
        return RunFile(_to_plain_values(run, ()), {(): ""}, _DEFAULT_NAME)
    message = f"is {type_name(run)}, not a run"
    raise InputError.at("run", message, "give a path, a recipe's name, a dict or an artel.RunConfig")


def as_overrides(overrides: OverridesLike, settings: Mapping[str, Any] | None = None) -> Overrides:
    """Return `overrides` combined with `settings`, which are keys of the section `train`.

    Raise InputError for wrong types, an unknown key in `settings`, or a key in both.
    """
    if isinstance(overrides, Overrides):
        result = overrides
    elif isinstance(overrides, str):
        result = Overrides.parse([overrides])
    elif overrides is None or isinstance(overrides, Mapping):
        result = Overrides(_read_overrides(overrides or {}))
    elif isinstance(overrides, Sequence) and all(isinstance(override, str) for override in overrides):
        result = Overrides.parse(overrides)
    else:
        message = f"are {type_name(overrides)}"
        raise InputError.at("overrides", message, 'use a dict, {"train.steps": 3}, or a list, ["train.steps=3"]')
    names = section_keys(TrainConfig)
    problems = []
    for name in settings or {}:
        if name not in names:
            message = 'is not a key of train; put keys of other sections into overrides: {"data.block": 512}'
            problems.append(Problem(name, message, suggest_key(("train", name))))
        elif f"train.{name}" in result:
            problems.append(Problem(name, f"is given twice, also as train.{name} in overrides", "remove one"))
    if problems:
        raise InputError(problems)
    result = copy.copy(result)
    result.update(_read_overrides({f"train.{name}": value for name, value in (settings or {}).items()}))
    return result


def _read_overrides(values: Mapping[Any, Any]) -> dict[str, Any]:
    bad_keys = [key for key in values if not isinstance(key, str)]
    if bad_keys:
        fix = 'write dotted keys as text: {"train.steps": 3}'
        raise InputError([Problem("overrides", f"have the key {key!r}, {type_name(key)}", fix) for key in bad_keys])
    plain: dict[str, Any] = {}
    for dotted, value in values.items():
        key = tuple(int(name) if name.isdecimal() else name for name in dotted.split("."))
        if len(key) == 4 and key[:2] == _SOURCES and key[3] == "rows" and not isinstance(value, str):
            source = _to_plain_values({"rows": value}, key[:3])
            plain |= {f"{dotted.removesuffix('.rows')}.{name}": inner for name, inner in source.items()}
        else:
            plain[dotted] = _to_plain_values(value, key)
    return plain


def _to_plain_values(value: Any, key: Key) -> Any:
    """Convert the `value` of a `key` to plain values, as in a file. Raise InputError with every problem."""
    reader = _PlainValueReader()
    plain = reader.read(value, key)
    if reader.problems:
        raise InputError(reader.problems)
    return plain


class _PlainValueReader:
    """Converts Python values to values that a file can hold, and collects problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._ancestors: list[int] = []

    def read(self, value: Any, key: Key) -> Any:
        """Return the plain value. Omit unset fields of a pydantic object, which stay `auto`."""
        if isinstance(value, BaseModel):
            return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if key[:2] == _SOURCES and len(key) <= 3 and is_table(value):
            source = self._read_source({"rows": value}, key)
            return [source] if key == _SOURCES else source
        if isinstance(value, Mapping | list | tuple):
            if id(value) in self._ancestors:
                return self._add_problem(key, "contains itself", "write the values out")
            self._ancestors.append(id(value))
            plain = self._read_collection(value, key)
            self._ancestors.pop()
            return plain
        return self._read_scalar(value, key)

    def _read_collection(self, value: Mapping[Any, Any] | Sequence[Any], key: Key) -> Any:
        if not isinstance(value, Mapping):
            return [self.read(inner, (*key, index)) for index, inner in enumerate(value)]
        if key[:2] == _SOURCES and len(key) == 3 and not isinstance(value.get("rows", ""), str):
            return self._read_source(value, key)
        for name in value:
            if not isinstance(name, str | int) or isinstance(name, bool):
                self._add_problem(key, f"has the key {name!r}, {type_name(name)}", "use strings as keys")
        return {name: self.read(inner, (*key, name)) for name, inner in value.items()}

    def _read_source(self, source: Mapping[Any, Any], key: Key) -> Any:
        settings = {name: value for name, value in source.items() if name != "rows"}
        try:
            return write_source(source["rows"], self._read_collection(settings, key), _join_key(key))
        except InputError as error:
            self.problems += error.problems
            return {}

    def _read_scalar(self, value: Any, key: Key) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return self.read(value.tolist(), key)
        if isinstance(value, Decimal | Fraction):
            is_finite = isinstance(value, Fraction) or value.is_finite()
            return int(value) if is_finite and value == value // 1 else float(value)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if value is None or isinstance(value, str | bool | int | float):
            return value
        fix = "use a number, a string, True or False, a list or a dict"
        if is_table(value):
            fix = 'rows are given in data.sources: [{"rows": …}]'
        return self._add_problem(key, f"is {type_name(value)}, which no key accepts", fix)

    def _add_problem(self, key: Key, message: str, fix: str) -> None:
        self.problems.append(Problem(_join_key(key) or "run", message, fix))


def _join_key(key: Key) -> str:
    return ".".join(map(str, key))
