"""The keys of a run file that differ from their defaults, or between runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import yaml

from artel.config import RunConfig, SourceConfig, dump_run

_MISSING = object()


def iterate_leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every key that is not a section. Sources are numbered."""
    items: Any = None
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = enumerate(value)
    if items is None:
        yield key, value
        return
    for name, child in items:
        yield from iterate_leaves(child, f"{key}.{name}" if key else str(name))


def changed_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a run file that differ from their defaults."""
    defaults, source_defaults = _default_leaves()
    changed = {}
    for key, value in iterate_leaves(config):
        path = key.split(".")
        default = source_defaults.get(path[3], _MISSING) if path[:2] == ["data", "sources"] and len(path) == 4 else (
            defaults.get(key, _MISSING)
        )  # fmt: skip
        if value != default:
            changed[key] = value
    return changed


def find_differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys whose values differ, with the value in each run file ("" if absent). Omits `run`."""
    flat = [dict(iterate_leaves(config)) for config in configs]
    keys = dict.fromkeys(key for leaf_values in flat for key in leaf_values if key != "run")
    rows = {key: [leaf_values.get(key, _MISSING) for leaf_values in flat] for key in keys}
    return {
        key: ["" if value is _MISSING else value for value in values]
        for key, values in rows.items()
        if any(value != values[0] for value in values)
    }


def format_yaml(value: Any) -> str:
    """Format a value as YAML in one line."""
    if isinstance(value, str):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n...\n").strip()


def config_value(config: dict[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None


@cache
def _default_leaves() -> tuple[dict[str, Any], dict[str, Any]]:
    defaults = dict(iterate_leaves(yaml.safe_load(dump_run(RunConfig.model_construct()))))
    return defaults, SourceConfig.model_construct().model_dump(mode="json", by_alias=True)
