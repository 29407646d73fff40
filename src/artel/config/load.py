"""From a YAML file, a recipe's name or a finished run's folder, with dotted overrides, to a checked `RunConfig`.

All problems are reported together, each with its key and `file:line`, and unknown keys with what is meant.
"""

from __future__ import annotations

import copy
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import yaml
from pydantic import BaseModel, ValidationError

from artel.config.converters.masked_lm_json import from_masked_lm_json, is_masked_lm_json, refuse_other_json
from artel.config.converters.tools import refuse_unsupported, tool_of
from artel.config.converters.trainer import drop_ddp
from artel.config.explain import UNKNOWN_KEY, explain
from artel.config.overrides import Overrides
from artel.config.recipes import recipe_names, recipe_text
from artel.config.schema.base import name_fault
from artel.config.schema.consistency import section_problems
from artel.config.schema.registered import Settings
from artel.config.schema.run import RunConfig
from artel.config.suggest import is_key, meant_key, near_name
from artel.config.yaml_lines import Key, by_line, line_of, parse, unwritable_problems
from artel.errors import InputError, Problem
from artel.secrets import hide_secrets

_LONGEST_NAME_SHOWN = 200  # characters of a name in a message
_LARGEST = 10_000_000  # bytes of a configuration
RUN_MARK = ".artel-run.json"
"""The file by which a folder is known as that of a run (`preparing/run_mark.py`)."""
_ROUNDS = 20  # each leaves out the wrong keys, so that the problems they hid are found


class WrongRunFile(InputError):
    """All that is wrong with a run file, and the run without it, for further checks."""

    def __init__(self, problems: Sequence[Problem], rest: RunConfig | None, doubtful: set[str]) -> None:
        super().__init__(by_line(problems))
        self.rest = rest
        """The run without the wrong keys; None where that cannot be read either."""
        self.doubtful = doubtful
        """Dotted keys that are wrong, or that wrong keys may mean: they are not checked further."""


def is_doubtful(key: str, doubtful: set[str]) -> bool:
    """True where a dotted key, a section above it or a key within it is in `doubtful`."""
    return any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in doubtful)


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run file that has been read, before its keys are checked."""

    tree: dict[str, Any]
    lines: dict[Key, str]
    """The `file:line` of each key."""
    stem: str
    """Names the run's folder where the file does not."""
    name: str = ""
    """By which other processes read it: its path, or the name of a recipe; empty where it is in no file."""

    @contextmanager
    def named(self) -> Iterator[str]:
        """`name` for the length of the block; where there is none, that of a file which is written for the block."""
        if self.name:
            yield self.name
            return
        with TemporaryDirectory() as folder:
            file = Path(folder, f"{self.stem}.yaml")
            file.write_text(yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
            yield str(file)

    def run(self, overrides: Mapping[str, Any] | None = None) -> RunConfig:
        """The run with overrides. Raises WrongRunFile with every problem at once."""
        try:
            run = run_from(copy.deepcopy(self.tree), overrides, dict(self.lines))
        except WrongRunFile as error:
            error.rest = error.rest and _named(error.rest, self.stem)
            raise
        return _named(run, self.stem)


def read_settings(kind: type[Settings], values: Mapping[str, Any], where: str) -> Settings:
    """Return the settings of an entry that stands in no run file. Raise InputError with every problem at once."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        known = f"its settings: {', '.join(kind.model_fields) or 'none'}"
        problems = explain(error, {(): ""}).values()
        raise InputError(
            replace(each, where=f"{where} {each.where}", fix=known if each.what == UNKNOWN_KEY else each.fix)
            for each in problems
        ) from None


def load_run(name: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read and check a run: `read_run_file(name).run(overrides)`. Raises InputError with every problem at once."""
    return read_run_file(name).run(overrides)


def read_run_file(name: str) -> RunFile:
    """Read a YAML file, the masked-LM script's JSON, a shipped recipe, or the `config.yaml` of an earlier run's folder.

    Raises InputError for what is no run file.
    """
    text, place, stem = _find(name)
    tool = tool_of(text)
    if tool:
        fix = f"convert it: artel config convert {name} > run.yaml"
        raise InputError.at(place, f"is a configuration of {tool}, not a run file", fix)
    refuse_unsupported(text, place)
    tree, lines = parse(text, place)
    refuse_other_json(tree, place)
    drop_ddp(tree, place)
    folder = _named_folder(Path(name))
    if folder is not None:
        tree["run"] = _folder_text(folder, tree.get("run"))
    if is_masked_lm_json(tree):
        tree, lines = from_masked_lm_json(tree, place), {(): place}
    return RunFile(tree, lines, stem, name)


def _named_folder(path: Path) -> Path | None:
    """Return the run folder that a path names, directly or by its config.yaml; None for a run file elsewhere."""
    if path.is_dir():
        return path
    return path.parent if path.name == "config.yaml" and (path.parent / RUN_MARK).is_file() else None


def _folder_text(folder: Path, recorded: object) -> str:
    """`run` for a folder that was named: it is that folder, whatever its config.yaml recorded before a copy or a move.

    The recorded path is kept if it leads to the same folder.
    """
    if isinstance(recorded, str) and Path(recorded).is_dir() and folder.samefile(recorded):
        return recorded
    return str(folder if folder.name not in ("", "..") else folder.absolute().resolve())


def _named(run: RunConfig, stem: str) -> RunConfig:
    return run if run.run else run.model_copy(update={"run": f"runs/{stem}"})


def run_from(tree: dict[str, Any], overrides: Mapping[str, Any] | None, lines: dict[Key, str]) -> RunConfig:
    """The run of plain values with overrides; `lines` has the `file:line` of each key, and the file's name at ().

    Raises WrongRunFile with all problems.
    """
    if not isinstance(overrides, Overrides):
        overrides = Overrides(overrides)
    wrong = overrides.lay_over(tree, lines)
    problems = [problem for of_key in wrong.values() for problem in of_key]
    doubtful = set(wrong)
    unwritable = unwritable_problems(tree, lines)
    if unwritable:  # values that neither messages nor the sections can take
        raise WrongRunFile([*problems, *unwritable], None, doubtful)
    run = _validated(tree, lines, problems, doubtful)
    if run is not None:
        run._places.update(lines)
        for problem in section_problems(run, knows_objective="objective" not in doubtful):
            if not is_doubtful(problem.where, doubtful):
                problems.append(located(problem, run))
                doubtful.add(problem.where)
    if problems or run is None:
        raise WrongRunFile(problems, run, doubtful)
    return run


def located(problem: Problem, run: RunConfig) -> Problem:
    """A problem of a key of a run, with its `file:line`; any other problem unchanged."""
    dotted = problem.where.partition(":")[0]
    if not run._places or not (is_key(dotted) or dotted.startswith("model.config.")):
        return problem
    key = tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))
    line = line_of(key, run._places)
    return replace(problem, where=f"{line}: {problem.where}") if line else problem


def is_override(run: RunConfig, *key: str) -> bool:
    """True if the command line gave a key of a run: ("train", "steps")."""
    return run._places.get(key, "").startswith("override")


def _validated(
    tree: dict[str, Any], lines: dict[Key, str], problems: list[Problem], doubtful: set[str]
) -> RunConfig | None:
    """The run of a tree without its wrong keys, which are added to `problems` and `doubtful`."""
    for _ in range(_ROUNDS):
        try:
            return RunConfig.model_validate(tree)
        except ValidationError as error:
            explained = explain(error, lines)
        tree = copy.deepcopy(tree)
        before = set(doubtful)
        for key, problem in explained.items():
            dotted = ".".join(map(str, key))
            # A problem of a section may follow from one within it that was just reported.
            if not is_doubtful(dotted, before) or _is_about_others(dotted, problem.what, before):
                problems.append(problem)
            is_guessed = problem.what == UNKNOWN_KEY and problem.fix
            doubtful |= {dotted, (meant_key(key) if is_guessed else None) or dotted}
            _leave_out(tree, key)
    return None


def _is_about_others(section: str, what: str, doubtful: set[str]) -> bool:
    """True if a problem of a section names keys of it, and none that is doubtful (steps and epochs, for train)."""
    words = {f"{section}.{word}" for word in re.findall(r"\w+", what)}
    return sum(map(is_key, words)) > 1 and not words & doubtful


def _leave_out(tree: Any, key: Key) -> None:
    """Remove a key from a tree; for an item of a list, the list."""
    while key and isinstance(key[-1], int):
        key = key[:-1]
    for part in key[:-1]:
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        elif isinstance(tree, dict):
            tree = tree.get(part)
    if isinstance(tree, dict) and key:
        tree.pop(key[-1], None)


def dump_run(run: RunConfig, *, secrets: bool = False) -> str:
    """The run as YAML with every key, so that it can be repeated; secrets in addresses are ***, unless `secrets`."""
    tree = run.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(tree if secrets else hide_secrets(tree), sort_keys=False, allow_unicode=True)


def result_differences(before: RunConfig, now: RunConfig) -> list[str]:
    """`key: before -> now` for each key that shapes the result and differs; hidden secrets are not compared."""
    return list(_differences(before, now, ""))


def _differences(before: BaseModel, now: BaseModel, prefix: str) -> Iterator[str]:
    fields, free_keys = type(now).model_fields, _free_keys(type(now))
    old_values, new_values = dict(before), dict(now)
    for name in new_values | old_values:
        if name in free_keys:
            continue
        key = f"{prefix}{(name in fields and fields[name].alias) or name}"
        old, new = (values.get(name, "(not set)") for values in (old_values, new_values))
        if isinstance(old, BaseModel) and isinstance(new, BaseModel):
            yield from _differences(old, new, f"{key}.")
        else:
            yield from _leaf_differences(key, hide_secrets(_plain(old)), hide_secrets(_plain(new)))


def _leaf_differences(key: str, old: object, new: object) -> Iterator[str]:
    """`key: old -> new` for each differing value within two mappings, or within two lists of mappings."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            yield from _leaf_differences(f"{key}.{name}", old.get(name, "(not set)"), new.get(name, "(not set)"))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and old and isinstance(old[0], dict):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _leaf_differences(f"{key}.{index}", one, other)
    elif old != new:
        yield f"{key}: {old} -> {new}"


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude=_free_keys(type(value)))
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _free_keys(section: type[BaseModel]) -> set[str]:
    """The keys of a section that do not shape the result."""
    extras = {name: field.json_schema_extra for name, field in section.model_fields.items()}
    return {name for name, extra in extras.items() if isinstance(extra, dict) and extra.get("shapes_result") is False}


def _find(name: str) -> tuple[str, str, str]:
    """Text, the place to name in messages, and the stem for the default run folder."""
    fault = name_fault(name)
    if fault is not None:
        raise InputError.at(name[:_LONGEST_NAME_SHOWN], fault, "give a YAML file or a recipe")
    path = Path(name)
    if path.is_dir() and (path / "config.yaml").is_file():
        path = path / "config.yaml"
    if path.is_file():
        text = read_file(path)
        # JSON may be indented by tabs, which YAML forbids; there are none in its strings.
        return text.replace("\t", " ") if path.suffix == ".json" else text, str(path), path.stem
    if name in recipe_names():
        return recipe_text(name), f"recipe {name}", name
    near = near_name(name)
    fix = f"did you mean {near}?" if near else f"give a YAML file or a recipe: {', '.join(recipe_names())}"
    what = "is a folder without config.yaml" if path.is_dir() else "there is no such file, and no recipe of that name"
    raise InputError.at(name, what, fix)


def read_stream(stream: BinaryIO) -> str:
    """The text of a configuration that is piped in. Raises InputError."""
    data = stream.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise InputError.at(
            "-", f"has more than the {_LARGEST:,} bytes of any configuration", "give a run file in YAML"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"is not a UTF-8 text file (byte {error.start})"
        raise InputError.at("-", what, "give a run file in YAML") from None


def read_file(path: Path) -> str:
    """The text of a configuration. Raises InputError, also where a file is none (a named pipe) or far too large."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError.at(str(path), "is not a regular file", "give a file, as an editor saves it")
        if status.st_size > _LARGEST:
            what = f"has {status.st_size:,} bytes, more than the {_LARGEST:,} of any configuration"
            raise InputError.at(str(path), what, "give a run file in YAML")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        what, fix = f"is not a UTF-8 text file (byte {error.start})", "give a run file in YAML"
    except OSError as error:
        what, fix = f"cannot be read: {error.strerror}", "check its permissions"
    raise InputError.at(str(path), what, fix)
