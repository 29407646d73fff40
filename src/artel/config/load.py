"""Load a run: read a YAML file, a recipe or a run folder, apply dotted overrides and validate.

All problems are reported together, each with its key and `file:line`; unknown keys get a suggestion.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pydantic import ValidationError

from artel.config.converters.masked_lm_json import check_other_json, from_masked_lm_json, is_masked_lm_json
from artel.config.converters.tools import check_supported, detect_tool
from artel.config.converters.trainer import drop_ddp
from artel.config.explain import UNKNOWN_KEY, explain
from artel.config.overrides import Overrides
from artel.config.read import read_file
from artel.config.recipes import recipe_names, recipe_text
from artel.config.schema.base import name_error
from artel.config.schema.consistency import section_problems
from artel.config.schema.registered import Settings
from artel.config.schema.run import RunConfig
from artel.config.suggest import find_similar_name, guess_key, is_key
from artel.config.yaml_lines import Key, find_line, parse, sort_by_line, unwritable_problems
from artel.errors import InputError, Problem
from artel.secrets import hide_secrets

_MAX_NAME_CHARS = 200  # of a name in a message
RUN_MARK = ".artel-run.json"
"""Marker file of a run folder (`preparing/run_mark.py`)."""
_MAX_ROUNDS = 20  # each removes the invalid keys, to find the problems that they hide


class InvalidRunFile(InputError):
    """Raised with every problem of a run file."""

    def __init__(self, problems: Sequence[Problem], valid_run: RunConfig | None, doubtful: set[str]) -> None:
        super().__init__(sort_by_line(problems))
        self.valid_run = valid_run
        """The run without its invalid keys, for further checks. None if that is invalid too."""
        self.doubtful = doubtful
        """Dotted keys to skip in further checks: invalid keys, and the keys that unknown ones probably meant."""


def is_suspect(key: str, suspect_keys: set[str]) -> bool:
    """True if a dotted key, a section above it or a key within it is in `suspect_keys`."""
    return any(f"{key}.".startswith(f"{suspect}.") or f"{suspect}.".startswith(f"{key}.") for suspect in suspect_keys)


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run file that has been read, before it is validated."""

    tree: dict[str, Any]
    lines: dict[Key, str]
    """The `file:line` of each key."""
    stem: str
    """Default name of the run folder."""
    name: str = ""
    """Path or recipe name for other processes to read. Empty if it is not in a file."""

    @contextmanager
    def as_file(self) -> Iterator[str]:
        """Yield `name`, or the path of a temporary file if there is no name."""
        if self.name:
            yield self.name
            return
        with TemporaryDirectory() as folder:
            file = Path(folder, f"{self.stem}.yaml")
            file.write_text(yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
            yield str(file)

    def run(self, overrides: Mapping[str, Any] | None = None) -> RunConfig:
        """Return the validated run. Raise InvalidRunFile with all problems."""
        try:
            run = parse_run(copy.deepcopy(self.tree), overrides, dict(self.lines))
        except InvalidRunFile as error:
            error.valid_run = error.valid_run and _with_default_folder(error.valid_run, self.stem)
            raise
        return _with_default_folder(run, self.stem)


def read_settings(kind: type[Settings], values: Mapping[str, Any], where: str) -> Settings:
    """Validate settings that do not come from a run file. Raise InputError with all problems."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        settings = f"its settings: {', '.join(kind.model_fields) or 'none'}"
        problems = explain(error, {(): ""}).values()
        raise InputError(
            replace(
                problem, where=f"{where} {problem.where}", fix=settings if problem.what == UNKNOWN_KEY else problem.fix
            )
            for problem in problems
        ) from None


def load_run(name: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read and validate a run: `read_run_file(name).run(overrides)`. Raise InputError with all problems."""
    return read_run_file(name).run(overrides)


def read_run_file(name: str) -> RunFile:
    """Read a YAML file, the masked-LM script's JSON, a recipe of the package, or the `config.yaml` of a run folder.

    Raise InputError if it is not a run file.
    """
    text, location, stem = _find_text(name)
    tool = detect_tool(text)
    if tool:
        fix = f"convert it: artel config convert {name} > run.yaml"
        raise InputError.at(location, f"is a configuration of {tool}, not a run file", fix)
    check_supported(text, location)
    tree, lines = parse(text, location)
    check_other_json(tree, location)
    drop_ddp(tree, location)
    folder = _run_folder(Path(name))
    if folder is not None:
        tree["run"] = _folder_text(folder, tree.get("run"))
    if is_masked_lm_json(tree):
        tree, lines = from_masked_lm_json(tree, location), {(): location}
    return RunFile(tree, lines, stem, name)


def _run_folder(path: Path) -> Path | None:
    """Return the run folder that a path names, directly or by its config.yaml; None for a run file elsewhere."""
    if path.is_dir():
        return path
    return path.parent if path.name == "config.yaml" and (path.parent / RUN_MARK).is_file() else None


def _folder_text(folder: Path, recorded: object) -> str:
    """Return the value of `run` for a folder: the folder itself, since config.yaml may predate a copy or a move.

    If the recorded path leads to the same folder, return that path.
    """
    if isinstance(recorded, str) and Path(recorded).is_dir() and folder.samefile(recorded):
        return recorded
    return str(folder if folder.name not in ("", "..") else folder.absolute().resolve())


def _with_default_folder(run: RunConfig, stem: str) -> RunConfig:
    return run if run.run else run.model_copy(update={"run": f"runs/{stem}"})


def parse_run(tree: dict[str, Any], overrides: Mapping[str, Any] | None, lines: dict[Key, str]) -> RunConfig:
    """Validate a tree with overrides. Raise InvalidRunFile with all problems.

    `lines`: the `file:line` of each key, and the name of the file at ().
    """
    if not isinstance(overrides, Overrides):
        overrides = Overrides(overrides)
    override_problems = overrides.apply_to(tree, lines)
    problems = [problem for key_problems in override_problems.values() for problem in key_problems]
    doubtful = set(override_problems)
    unwritable = unwritable_problems(tree, lines)
    if unwritable:  # values that can be neither validated nor printed
        raise InvalidRunFile([*problems, *unwritable], None, doubtful)
    run = _validate(tree, lines, problems, doubtful)
    if run is not None:
        run._locations.update(lines)
        for problem in section_problems(run, knows_objective="objective" not in doubtful):
            if not is_suspect(problem.where, doubtful):
                problems.append(with_location(problem, run))
                doubtful.add(problem.where)
    if problems or run is None:
        raise InvalidRunFile(problems, run, doubtful)
    return run


def with_location(problem: Problem, run: RunConfig) -> Problem:
    """Add `file:line` to a problem that is about a key of the run. Return other problems unchanged."""
    dotted = problem.where.partition(":")[0]
    if not run._locations or not (is_key(dotted) or dotted.startswith("model.config.")):
        return problem
    key = tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))
    line = find_line(key, run._locations)
    return replace(problem, where=f"{line}: {problem.where}") if line else problem


def is_override(run: RunConfig, *key: str) -> bool:
    """True if a key, e.g. ("train", "steps"), was set on the command line."""
    return run._locations.get(key, "").startswith("override")


def _validate(
    tree: dict[str, Any], lines: dict[Key, str], problems: list[Problem], doubtful: set[str]
) -> RunConfig | None:
    """Validate a tree without its invalid keys. Add these keys to `problems` and `doubtful`."""
    for _ in range(_MAX_ROUNDS):
        try:
            return RunConfig.model_validate(tree)
        except ValidationError as error:
            new_problems = explain(error, lines)
        tree = copy.deepcopy(tree)
        before = set(doubtful)
        for key, problem in new_problems.items():
            dotted = ".".join(map(str, key))
            # A problem of a section may be caused by a problem inside the section that was just reported.
            if not is_suspect(dotted, before) or _is_about_valid_keys(dotted, problem.what, before):
                problems.append(problem)
            has_suggestion = problem.what == UNKNOWN_KEY and problem.fix
            doubtful |= {dotted, (guess_key(key) if has_suggestion else None) or dotted}
            _remove_key(tree, key)
    return None


def _is_about_valid_keys(section: str, what: str, doubtful: set[str]) -> bool:
    """True if a section's problem names two or more of its keys, none of them doubtful (steps and epochs of train)."""
    words = {f"{section}.{word}" for word in re.findall(r"\w+", what)}
    return sum(map(is_key, words)) > 1 and not words & doubtful


def _remove_key(tree: Any, key: Key) -> None:
    """Remove a key from a tree, or the list if the key is an item of one."""
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
    """Return the run as YAML with every key, to repeat it. Secrets in URLs are ***, unless `secrets` is true."""
    tree = run.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(tree if secrets else hide_secrets(tree), sort_keys=False, allow_unicode=True)


def _find_text(name: str) -> tuple[str, str, str]:
    """Return (text, name for messages, default name of the run folder)."""
    fault = name_error(name)
    if fault is not None:
        raise InputError.at(name[:_MAX_NAME_CHARS], fault, "use a YAML file or a recipe")
    path = Path(name)
    if path.is_dir() and (path / "config.yaml").is_file():
        path = path / "config.yaml"
    if path.is_file():
        text = read_file(path)
        # JSON may be indented by tabs, which YAML forbids; there are none in its strings.
        return text.replace("\t", " ") if path.suffix == ".json" else text, str(path), path.stem
    if name in recipe_names():
        return recipe_text(name), f"recipe {name}", name
    near = find_similar_name(name)
    fix = f"did you mean {near}?" if near else f"use a YAML file or a recipe: {', '.join(recipe_names())}"
    what = "is a folder without config.yaml" if path.is_dir() else "is neither a file nor a recipe"
    raise InputError.at(name, what, fix)
