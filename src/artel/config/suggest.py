"""Suggestions for unknown keys, other tools' keys, and unknown names of runs and recipes."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from artel.config.other_names import OTHER_NAMES, OTHER_OBJECTIVES
from artel.config.recipes import recipe_names
from artel.config.schema.registered import section_keys
from artel.config.schema.run import RunConfig
from artel.config.yaml_lines import Key

_NEAR_CUTOFF = 0.75  # difflib's ratio: one or two letters of a word differ
_FAR_CUTOFF = 0.5


@lru_cache(1024)
def guess_key(key: Key) -> str | None:
    """Return the dotted key that an unknown `key` probably means, or None if no key is similar."""
    section = tuple(int(part) if str(part).isdecimal() else part for part in key[:-1])
    name = _normalize(key[-1])
    if name in OTHER_NAMES:
        dotted = OTHER_NAMES[name]
        return dotted.replace("data.sources.0.", f"{key[0]}.{key[1]}.{key[2]}.") if _is_source_key(key) else dotted
    in_section = _key_names(section)
    by_name = _keys_by_name()
    near = difflib.get_close_matches(name, in_section, 1, cutoff=_NEAR_CUTOFF)
    if not near and name in by_name:
        return by_name[name]
    near = near or difflib.get_close_matches(name, in_section, 1, cutoff=_FAR_CUTOFF)
    if near:
        return ".".join(map(str, (*section, near[0])))
    return next(
        (by_name[similar] for similar in difflib.get_close_matches(name, by_name, 1, cutoff=_NEAR_CUTOFF)), None
    )


def suggest_key(key: Key) -> str:
    """Return advice on what to write instead of an unknown key."""
    dotted = guess_key(key)
    if dotted is None:
        return f"its section has: {', '.join(_key_names(key[:-1]))}" if _key_names(key[:-1]) else ""
    if _normalize(key[-1]) in OTHER_NAMES:
        note = describe_other_name(key[-1])
        return f"artel calls it {dotted}{note and f': {note}'}"
    return f"did you mean {dotted}?"


def describe_other_name(name: str | int) -> str:
    """Return how the values of another tool's key differ from artel's, or "" if they do not."""
    return other_unit(name) or _DIFFERENCES.get(OTHER_NAMES.get(_normalize(name), ""), "")


def other_unit(name: str | int) -> str:
    """Return the value for artel's key if another tool's value would be wrong, otherwise ""."""
    return _OTHER_UNIT.get(_normalize(name), "")


# Differences of artel's keys from similar keys of other tools.
_DIFFERENCES = {
    "train.batch": "samples per optimizer step, over all processes and accumulated micro-batches",
    "train.micro_batch": "samples per process and forward pass; train.batch is the global batch",
}
_BATCH = "samples per optimizer step, not the number of accumulated micro-batches"
_OTHER_UNIT = {
    "load_in_4bit": "nf4",
    "load_in_8bit": "int8",
    "bf16": "bf16",
    "fp16": "fp16",
    "min_lr": "a fraction of the peak, e.g. 0.1",
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "both numbers, e.g. [0.9, 0.95]"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum", "grad_accum_steps", "accumulate_grad_batches"), _BATCH
    ),
}


def find_similar_name(name: str) -> str | None:
    """Return the run folder or recipe with a similar name, or None."""
    runs = {str(file.parent): str(file.parent) for file in sorted(Path("runs").glob("*/config.yaml"))}
    names = {Path(run).name: run for run in runs} | runs | {recipe: recipe for recipe in recipe_names()}
    near = difflib.get_close_matches(name.rstrip("/").removeprefix("./"), names, 1, cutoff=_NEAR_CUTOFF)
    return names[near[0]] if near else None


def translate_objective(name: object) -> str:
    """Return artel's name for another tool's objective, or "" if unknown."""
    return OTHER_OBJECTIVES.get(str(name).lower().replace("_", "-"), "")


def _is_source_key(key: Key) -> bool:
    return key[:2] == ("data", "sources") and len(key) > 3


def _normalize(name: str | int) -> str:
    return str(name).lower().replace("-", "_")


@cache
def _keys_by_name() -> dict[str, str]:
    """Return the first dotted key of each name."""
    return {dotted.split(".")[-1]: dotted for dotted in reversed(list(all_keys(RunConfig)))}


def _key_names(section: Key) -> list[str]:
    kind = _find_section(section)
    return [] if kind is None else list(section_keys(kind))


def _find_section(key: Key) -> type[BaseModel] | None:
    section: type[BaseModel] | None = RunConfig
    for part in key:
        if isinstance(part, int) or section is None:
            continue
        field = section_keys(section).get(part)
        section = None if field is None else section_type(field.annotation)
    return section


def is_key(dotted: str) -> bool:
    """True if the run file has a key, e.g. data.sources.0.path, also in the section of an entry or a plugin."""
    *section, name = (int(part) if part.isdecimal() else part for part in dotted.split("."))
    return name in _key_names(tuple(section))


def section_type(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a type, also within a list or an optional."""
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        return annotation
    return next((section for section in map(section_type, typing.get_args(annotation)) if section), None)


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a section and its subsections."""
    for name, field in section_keys(section).items():
        key = f"{prefix}{name}"
        yield key
        inner = section_type(field.annotation)
        if inner is not None:
            yield from all_keys(inner, f"{key}.0." if "list[" in str(field.annotation) else f"{key}.")
