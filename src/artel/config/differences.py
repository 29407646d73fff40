"""Differences between two runs, in the keys that shape the result."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from artel.config.schema.registered import NamingSection
from artel.config.schema.run import RunConfig
from artel.secrets import hide_secrets


def result_differences(old_run: RunConfig, new_run: RunConfig) -> list[str]:
    """Return `key: old -> new` for each differing key that shapes the result. Secrets are not compared."""
    return list(_section_differences(old_run, new_run, ""))


def _section_differences(old_run: BaseModel, new_run: BaseModel, prefix: str) -> Iterator[str]:
    fields = type(new_run).model_fields
    ignored_keys = _runtime_only_keys(type(new_run))
    old_values, new_values = dict(old_run), dict(new_run)
    for name in new_values | old_values:
        if name in ignored_keys:
            continue
        key = f"{prefix}{(name in fields and fields[name].alias) or name}"
        old, new = (values.get(name, "(not set)") for values in (old_values, new_values))
        if isinstance(old, BaseModel) and isinstance(new, BaseModel):
            yield from _section_differences(old, new, f"{key}.")
        else:
            yield from _leaf_differences(key, hide_secrets(_to_plain(old)), hide_secrets(_to_plain(new)))


def _leaf_differences(key: str, old: object, new: object) -> Iterator[str]:
    """Yield `key: old -> new` for each differing value within two mappings, or within two lists of mappings."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            yield from _leaf_differences(f"{key}.{name}", old.get(name, "(not set)"), new.get(name, "(not set)"))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and old and isinstance(old[0], dict):
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=True)):
            yield from _leaf_differences(f"{key}.{index}", old_item, new_item)
    elif old != new:
        yield f"{key}: {old} -> {new}"


def _to_plain(value: object) -> object:
    """Convert sections to dicts without the keys that do not shape the result."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude=_runtime_only_keys(type(value)))
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    return value


def _runtime_only_keys(section: type[BaseModel]) -> set[str]:
    """Return the keys that do not shape the result, plus the settings sections of the plugins those keys select."""
    extras = {name: field.json_schema_extra for name, field in section.model_fields.items()}
    keys = {name for name, extra in extras.items() if isinstance(extra, dict) and extra.get("shapes_result") is False}
    registries = section.registries if issubclass(section, NamingSection) else {}  # settings of trackers, callbacks
    return keys.union(*(registry.names_with_settings for key, registry in registries.items() if key in keys))
