"""From a YAML file, a recipe's name or a finished run's folder, with dotted overrides, to a checked `RunConfig`.

All problems are reported together, each with its key and `file:line`, and unknown keys with the nearest known one.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from artel.config.legacy import from_old_json, is_impruver, is_old_json, refuse_model_config
from artel.config.legacy_trainer import drop_ddp
from artel.config.sections import RunConfig
from artel.config.shipped import recipe_names, recipe_text
from artel.errors import InputError, Problem
from artel.secrets import hide_secrets

Key = tuple[str | int, ...]

# A run file has a hundred keys; anchors that are repeated in anchors (`a: [*b, *b]`) stand for billions of values.
_MOST_VALUES = 100_000
_DEEPEST = 100
_LONGEST_SHOWN = 200  # characters of a wrong value in a message
# YAML can write them (as escapes), and no path or UTF-8 file can hold them.
_UNWRITABLE = re.compile("[\\0\\ud800-\\udfff]")


def load_run(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run.

    `name` is a YAML file, the masked-LM script's old JSON, the name of a shipped recipe, or the folder of an earlier
    run (its `config.yaml`).
    `overrides` are `dotted.key=value`, the value read as YAML; numbers index lists (`data.sources.0.path=…`).
    Raises InputError with every problem at once.
    """
    text, place, stem = _find(name)
    if is_impruver(text):
        fix = f"convert it: artel config convert {name} > run.yaml"
        raise InputError([Problem(place, "is a configuration of impruver, not a run file", fix)])
    tree, lines = parse(text, place)
    refuse_model_config(tree, place)
    drop_ddp(tree, place)
    if is_old_json(tree):
        tree, lines = from_old_json(tree, place), {(): place}
    run = run_from(tree, overrides, lines)
    return run if run.run else run.model_copy(update={"run": f"runs/{stem}"})


def run_from(tree: dict[str, Any], overrides: Sequence[str], lines: dict[Key, str]) -> RunConfig:
    """The run that plain values describe, overrides laid over them; `lines` says where each key stands, () the file."""
    problems: list[Problem] = []
    for override in overrides:
        problems += _override(tree, lines, override)
    problems += _unwritable_problems(tree, lines)
    if problems:
        raise InputError(problems)
    try:
        run = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise InputError(_explain(error, lines)) from None
    problems = _source_problems(run)
    if problems:
        raise InputError([Problem(f"{lines[()]}: {problem.where}", problem.what, problem.fix) for problem in problems])
    return run


def _source_problems(run: RunConfig) -> list[Problem]:
    """Whether there is text, and of the kind that the objective learns from."""
    if run.data.from_store:
        return []
    if not run.data.sources:
        return [Problem("data.sources", "the run names no text", "write data: {sources: [{path: texts/*.txt}]}")]
    kinds = [source.yields for source in run.data.sources]
    wanted = _LEARNED_FROM[run.objective]
    problems = [
        Problem(f"data.sources.{number}", f"yields {kind}, and objective {run.objective} learns from "
                f"{' or '.join(wanted)}", _REMEDIES[wanted[0]])
        for number, kind in enumerate(kinds) if kind not in wanted
    ]  # fmt: skip
    if not problems and len(set(kinds)) > 1:
        problems.append(Problem("data.sources", f"yield both {' and '.join(sorted(set(kinds)))}", "keep to one kind"))
    return problems


_LEARNED_FROM = {
    "causal": ["text"], "masked": ["text", "pairs"], "span_qa": ["questions"], "chat": ["conversations"],
    "preference": ["preferences"],
}  # fmt: skip
_REMEDIES = {
    "text": "write objective: masked for pairs, span_qa for questions, chat for conversations, preference for "
    "preferences",
    "questions": "write format: nq or squad, or {format: dummy, kind: questions}",
    "conversations": "write format: chat",
    "preferences": "write format: preference",
}


def dump_run(run: RunConfig, *, secrets: bool = False) -> str:
    """The run as YAML, every key written out, so that it can be repeated; secrets in addresses are *** unless asked."""
    tree = run.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(tree if secrets else hide_secrets(tree), sort_keys=False, allow_unicode=True)


def result_differences(before: RunConfig, now: RunConfig) -> list[str]:
    """`key: before -> now` for each key that shapes the result and differs; what is hidden in one is not compared."""
    return list(_differences(before, now, ""))


def _differences(before: BaseModel, now: BaseModel, prefix: str) -> Iterator[str]:
    for name, field in type(now).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("shapes_result") is False:
            continue
        key = f"{prefix}{field.alias or name}"
        old, new = getattr(before, name), getattr(now, name)
        if isinstance(old, BaseModel) and isinstance(new, BaseModel):
            yield from _differences(old, new, f"{key}.")
        elif hide_secrets(_plain(old)) != hide_secrets(_plain(new)):
            yield f"{key}: {_plain(old)} -> {_plain(new)}"


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _find(name: str) -> tuple[str, str, str]:
    """Text, the place to name in messages, and the stem for the default run folder."""
    path = Path(name)
    if path.is_dir() and (path / "config.yaml").is_file():
        path = path / "config.yaml"
    if path.is_file():
        text = read_file(path)
        # JSON may be indented by tabs, which YAML forbids; there are none in its strings.
        return text.replace("\t", " ") if path.suffix == ".json" else text, str(path), path.stem
    if name in recipe_names():
        return recipe_text(name), f"recipe {name}", name
    near = difflib.get_close_matches(name, recipe_names(), 1)
    fix = f"did you mean {near[0]}?" if near else f"give a YAML file or a recipe: {', '.join(recipe_names())}"
    what = "is a folder without config.yaml" if path.is_dir() else "there is no such file, and no recipe of that name"
    raise InputError([Problem(name, what, fix)])


def read_file(path: Path) -> str:
    """The text of a configuration. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        what, fix = f"is not a UTF-8 text file (byte {error.start})", "give a run file in YAML"
    except OSError as error:
        what, fix = f"cannot be read: {error.strerror}", "check its permissions"
    raise InputError([Problem(str(path), what, fix)])


def parse(text: str, place: str) -> tuple[dict[str, Any], dict[Key, str]]:
    """The YAML as plain values, and for each key the `file:line` where it stands. Raises InputError."""
    try:
        tree, lines, problems = _read_yaml(text, place)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}:{mark.line + 1}" if mark else place
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(
            [Problem(where, f"is not valid YAML: {what}", "check indentation, colons and brackets")]
        ) from None
    except (ValueError, RecursionError) as error:  # dates out of range, documents nested without end
        raise InputError([Problem(place, f"is not valid YAML: {error}", "check its values")]) from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        problems.append(Problem(place, "is not a mapping of keys to values", "write keys like data: and train:"))
    problems += _unwritable_problems(tree, lines)
    if problems:
        raise InputError(problems)
    return tree, lines


def _read_yaml(text: str, place: str) -> tuple[Any, dict[Key, str], list[Problem]]:
    """Plain values, where keys stand, and what is wrong with keys. Raises YAMLError, ValueError, RecursionError."""
    lines: dict[Key, str] = {(): place}
    problems: list[Problem] = []
    values = 0

    def walk(node: yaml.Node, key: Key) -> None:
        nonlocal values
        values += 1
        if values > _MOST_VALUES:
            raise ValueError(f"over {_MOST_VALUES:,} values, those of an anchor counted wherever it is used")
        lines.setdefault(key, f"{place}:{node.start_mark.line + 1}")
        if isinstance(node, yaml.MappingNode):
            walk_keys(node, key)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                walk(value, (*key, index))

    def walk_keys(node: yaml.MappingNode, key: Key) -> None:
        seen: set[str] = set()
        for name, value in node.value:
            where = f"{place}:{name.start_mark.line + 1}"
            if not isinstance(name, yaml.ScalarNode):
                problems.append(Problem(where, "a key is a list or a mapping", "write a word: data, train"))
                continue
            if name.value in seen:
                problems.append(Problem(where, f"the key {name.value} is given twice", "keep one of them"))
            seen.add(name.value)
            lines[(*key, name.value)] = where
            walk(value, (*key, name.value))

    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None, lines, problems
    walk(node, ())
    return loader.construct_document(node), lines, problems


class _Loader(yaml.SafeLoader):
    """PyYAML's own takes 9 seconds for 2,000 brackets in a row, and all of Python's stack."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth = getattr(self, "_depth", 0) + 1
        if self._depth > _DEEPEST:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"lists and mappings are nested over {_DEEPEST} deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _override(tree: dict[str, Any], lines: dict[Key, str], override: str) -> list[Problem]:
    """Put `a.b.0.c=value` into the tree; what is wrong with it, if anything."""
    dotted, equals, text = override.partition("=")
    where = f"override {override}"
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", dotted):
        return [Problem(where, "is not of the form key=value", "write train.learning_rate=3e-4")]
    try:
        value, _, problems = _read_yaml(text, where)
    except (yaml.YAMLError, ValueError, RecursionError):
        return [Problem(where, "its value is not valid YAML", f"quote it: '{dotted}=\"…\"'")]
    if problems:
        return problems
    parts: list[str | int] = [int(part) if part.isdigit() else part for part in dotted.split(".")]
    here: Any = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(here, list):
            if not isinstance(part, int) or part > len(here):
                return [Problem(where, f"{part} is not an index of a list of {len(here)}", "count from 0")]
            if part == len(here):
                here.append({})
        elif isinstance(here, dict):
            if here.get(part) is None:
                here[part] = [] if not last and isinstance(parts[depth + 1], int) else {}
        else:
            return [Problem(where, f"{'.'.join(map(str, parts[:depth]))} is a value, not a section", "check the key")]
        if last:
            here[part] = value
        here = here[part]
    for known in [known for known in lines if known[: len(parts)] == tuple(parts)]:
        del lines[known]
    for depth in range(1, len(parts) + 1):
        lines.setdefault(tuple(parts[:depth]), where)
    return []


def _explain(error: ValidationError, lines: dict[Key, str]) -> list[Problem]:
    """Pydantic's findings as problems that name the key, the line and the remedy; one for each key."""
    problems: dict[str, Problem] = {}
    for found in error.errors():
        place = found["loc"]
        key = tuple(part for part in place[:-1] if not _is_union_label(part))
        if place and (found["type"] == "extra_forbidden" or not _is_union_label(place[-1])):
            key = (*key, place[-1])  # a key that there is not may have any name
        dotted = ".".join(str(part) for part in key)
        if dotted in problems:
            continue
        where = _place(key, lines)
        kind, context = found["type"], found.get("ctx", {})
        if kind == "extra_forbidden":
            what, fix = "there is no such key", _did_you_mean(key)
        elif kind == "literal_error":
            near = difflib.get_close_matches(
                _shown(found["input"]).strip("'"), re.findall(r"'([^']*)'", context["expected"]), 1
            )
            what = f"{_shown(found['input'])} is not one of {context['expected']}"
            fix = f"did you mean {near[0]}?" if near else ""
        elif kind == "value_error":
            what, _, fix = str(context["error"]).partition("; ")
        elif kind in ("model_type", "dict_type"):
            what, fix = f"{_shown(found['input'])} is not a section", f"write {dotted}: {{…}} with keys inside"
        else:
            what, fix = f"{found['msg'].lower()}, but it is {_shown(found['input'])}", ""
        problems[dotted] = Problem(where, what, fix)
    return list(problems.values())


def _shown(value: object) -> str:
    """A value as Python writes it, its beginning where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of over 4,300 digits
        return "a number too long to be shown"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _is_union_label(part: str | int) -> bool:
    """Pydantic adds the name of the tried type to the place of an error inside a union."""
    return isinstance(part, str) and (part in ("str", "float", "int") or "[" in part)


def _unwritable_problems(tree: Any, lines: dict[Key, str]) -> list[Problem]:
    return [Problem(_place(key, lines), what, fix) for key, what, fix in _unwritable(tree, ())]


def _unwritable(value: object, key: Key) -> Iterator[tuple[Key, str, str]]:
    """What YAML can say and RUN/config.yaml could not repeat: where it stands, what it is, and the remedy."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _unwritable(name, key)
            yield from _unwritable(each, (*key, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _unwritable(each, (*key, index))
    elif isinstance(value, str):
        if _UNWRITABLE.search(value):
            yield key, "has a zero byte or half of a character, which no file can hold", "write the character itself"
    elif isinstance(value, int):
        if abs(value) >= 2**64:
            yield key, "is a number of more than 64 bits", "write a smaller one"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield key, f"{value} is no number", "write a finite one"
    elif value is not None:
        yield key, f"is read by YAML as a {type(value).__name__}", "write it in quotes, or as a number"


def _place(key: Key, lines: dict[Key, str]) -> str:
    """`file:line: a.b.c`."""
    return f"{_line_of(key, lines)}: {'.'.join(map(str, key))}" if key else lines[()]


def _line_of(key: Key, lines: dict[Key, str]) -> str:
    while key and key not in lines:
        key = key[:-1]
    return lines[key]


def _did_you_mean(key: Key) -> str:
    section = _section_at(key[:-1])
    if section is None:
        return ""
    names = [field.alias or name for name, field in section.model_fields.items()]
    elsewhere = [found for found in _all_keys(RunConfig) if found.split(".")[-1] == key[-1]]
    near = elsewhere[:1] or difflib.get_close_matches(str(key[-1]), names, 1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"its section has: {', '.join(names)}"


def _section_at(key: Key) -> type[BaseModel] | None:
    section: type[BaseModel] | None = RunConfig
    for part in key:
        if isinstance(part, int) or section is None:
            continue
        fields = {field.alias or name: field for name, field in section.model_fields.items()}
        section = section_type(fields[part].annotation) if part in fields else None
    return section


def section_type(annotation: Any) -> type[BaseModel] | None:
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        return annotation
    return next((found for found in map(section_type, typing.get_args(annotation)) if found), None)


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key
        inner = section_type(field.annotation)
        if inner is not None:
            yield from _all_keys(inner, f"{key}." if "list" not in str(field.annotation) else f"{key}.0.")
