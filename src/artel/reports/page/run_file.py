"""What of a run file a reader wants to see: the keys that were set, and those in which runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import yaml

from artel.config import RunConfig, SourceConfig, dump_run

_ABSENT = object()


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no section; sources by their number."""
    inner: Any = None
    if isinstance(value, dict) and value:
        inner = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        inner = enumerate(value)
    if inner is None:
        yield key, value
        return
    for name, part in inner:
        yield from leaves(part, f"{key}.{name}" if key else str(name))


def set_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a run file that are not at their defaults."""
    usual, usual_of_source = _defaults()
    found = {}
    for key, value in leaves(config):
        parts = key.split(".")
        default = usual_of_source.get(parts[3], _ABSENT) if parts[:2] == ["data", "sources"] and len(parts) == 4 else (
            usual.get(key, _ABSENT)
        )  # fmt: skip
        if value != default:
            found[key] = value
    return found


def differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Key -> its value in each of the run files, "" where it has none; `run` apart, which always differs."""
    flat = [dict(leaves(config)) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one if key != "run")
    rows = {key: [one.get(key, _ABSENT) for one in flat] for key in keys}
    return {
        key: ["" if value is _ABSENT else value for value in values]
        for key, values in rows.items()
        if any(value != values[0] for value in values)
    }


def in_yaml(value: Any) -> str:
    """A value as it stands in a run file, in one line."""
    if isinstance(value, str):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n...\n").strip()


@cache
def _defaults() -> tuple[dict[str, Any], dict[str, Any]]:
    usual = dict(leaves(yaml.safe_load(dump_run(RunConfig.model_construct()))))
    return usual, SourceConfig.model_construct().model_dump(mode="json", by_alias=True)
