"""What a case is: steps that make inputs, give commands with what is right for each, and look at what came of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

GB = 1 << 30
ANY = frozenset(range(-64, 256))

TINY: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text(encoding="utf-8"))
# For the smallest texts: as many ids as bytes and special tokens need, and no part for validation.
SMALL: dict[str, Any] = {"data": {"validation": 0, "block": 8, "max_bad": 0.5}, "tokenizer": {"train": {"vocab": 258}}}


class Skip(Exception):
    """This machine has not what the case needs; the reason."""


class Wrong(AssertionError):
    """What came of a command is not what was right: wrong in silence."""


@dataclass(frozen=True)
class Command:
    """`artel ARGUMENTS` in the case's folder, and what is right."""

    arguments: tuple[str, ...]
    right: frozenset[int]
    """The exit statuses that are right; -15 is the end by SIGTERM."""
    says: tuple[str, ...] = ()
    """Words that standard error must hold."""
    stdin: bytes | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Set over the usual variables; None takes one away."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """RLIMIT_NAME: value."""
    fresh: bool = False
    """A Python of its own and no fork."""
    prefix: tuple[str, ...] = ()
    """Put before the command, as unshare."""
    unheard: bool = False
    """It may end without a word: nobody could read one, or nobody reads on."""
    stdout: str | None = None
    """A file that standard output goes to."""
    memory: int = 2 * GB
    """Largest resident size that is right."""
    seconds: float = 0.0
    """After which it is ended; 0: the harness's own limit."""
    actions: tuple[tuple[Callable[[str], bool], Callable[[int], None]], ...] = ()
    """(whether the time has come, by what standard error holds; what is then done, to a process id)."""

    def having(self, **changes: Any) -> Command:
        return replace(self, **changes)


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str
    seconds: float
    silence: float
    """The longest time without a new line on standard error."""
    peak: int
    """Bytes: the largest of the process and those it started."""


Steps = Generator[Command, Outcome, None]


def works(*arguments: object, **more: Any) -> Command:
    return _command(arguments, {0}, more)


def refused(*arguments: object, **more: Any) -> Command:
    """Wrong input: exit status 2."""
    return _command(arguments, {2}, more)


def fails(*arguments: object, **more: Any) -> Command:
    """The work failed: exit status 1."""
    return _command(arguments, {1}, more)


def ends(statuses: set[int] | frozenset[int], *arguments: object, **more: Any) -> Command:
    return _command(arguments, statuses, more)


def _command(arguments: tuple[object, ...], statuses: set[int] | frozenset[int], more: dict[str, Any]) -> Command:
    return Command(tuple(map(str, arguments)), frozenset(statuses), **more)


class Place:
    """The folder of a case, `work`; beside it lie the cache, the home folder and what an attack would leave."""

    def __init__(self, root: Path, shelf: Path, have: Callable[[str], None]) -> None:
        self.root, self.work, self.cache, self.home = root, root / "work", root / "cache", root / "home"
        self.trap = root / "executed"
        """A payload that runs writes this."""
        self.shelf = shelf
        """Where what many cases begin with lies (made.py)."""
        self._have = have
        for each in (self.work, self.cache, self.home):
            each.mkdir(parents=True)
        self._of_artel: set[str] = set()
        self.digests: dict[str, str] = {}
        self.changing: set[str] = set()
        """Files that the case itself changes while a command runs."""
        self.ends: list[Callable[[], object]] = []
        """Called when the case is over: servers, mounts."""

    def __truediv__(self, name: str) -> Path:
        return self.work / name

    def write(self, name: str, content: bytes | str = b"") -> Path:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def run(self, *changes: Mapping[str, Any], name: str = "run.yaml") -> str:
        """Write a run file, TINY with changes laid over it; its name."""
        tree = TINY
        for each in changes:
            tree = merged(tree, each)
        self.write(name, yaml.safe_dump(tree, allow_unicode=True))
        return name

    def take(self, name: str, to: str = "") -> Path:
        """Copy what lies on the shelf under a name; it counts as artel's own, as artel made it."""
        target = self.take_foreign(name, to)
        self.own(target)
        return target

    def own(self, folder: Path) -> None:
        """What lies in a folder of the case is artel's: it may write over it and remove it."""
        self._of_artel |= {str(file.relative_to(self.work)) for file in folder.rglob("*")}

    def take_foreign(self, name: str, to: str = "") -> Path:
        """The same, as a user's own files."""
        self._have(name.partition("/")[0])
        target = self.work / (to or name)
        shutil.copytree(self.shelf / name, target, symlinks=True, dirs_exist_ok=True)
        return target

    def look(self) -> None:
        """Note every file that is not artel's, before a command."""
        skipped = self._of_artel | self.changing
        self.digests = {name: digest for name, digest in self._files().items() if name not in skipped}

    def losses(self) -> list[str]:
        """What has become of the user's files since; whatever is new is artel's."""
        now = self._files()
        bad = [f"lost: {name}" for name in self.digests if name not in now]
        bad += [f"changed: {name}" for name, digest in self.digests.items() if now.get(name, digest) != digest]
        self._of_artel |= now.keys() - self.digests.keys()
        return bad

    def _files(self) -> dict[str, str]:
        return {name: digest_of(self.work / name) for name in _names(self.work)}


def _names(folder: Path) -> list[str]:
    names = []
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not os.path.ismount(Path(path) / name)]
        links = [name for name in folders if (Path(path) / name).is_symlink()]
        names += [str((Path(path) / name).relative_to(folder)) for name in [*files, *links]]
    return names


def digest_of(path: Path) -> str:
    """What a file is: its content, a link's target, or else its kind."""
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if not path.is_file():
        return "special"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        return f"unreadable: {error.errno}"


def as_another_user(place: Place, *limits: str) -> tuple[str, ...]:
    """What stands before a command so that the user `nobody` runs it in `place`, under `limits` (a command too).

    Raises Skip where this is not root, or where `nobody` cannot read this Python or artel: in a private folder, say.
    """
    if os.getuid() != 0:
        raise Skip("needs root, to be another user")
    for folder in (place.root, place.work, place.cache, place.home, *place.root.parents[:2]):
        folder.chmod(0o777)
    prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *limits)
    if subprocess.run([*prefix, sys.executable, "-c", "import artel"], capture_output=True).returncode:
        raise Skip("another user cannot run this Python or read artel")
    return prefix


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` laid over `base`, section by section; the keys of another model's type are not kept."""
    if base.get("model_type") != changes.get("model_type", base.get("model_type")):
        return dict(changes)
    result = dict(base)
    for key, value in changes.items():
        below = base.get(key)
        result[key] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return result


def source(path: str, **more: Any) -> dict[str, Any]:
    return {"data": {"sources": [{"path": path, **more}]}}


def small(path: str, **more: Any) -> dict[str, Any]:
    """Changes of a run file that reads one of the smallest texts."""
    return merged(SMALL, source(path, **more))


def special(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else in a file's place: a named pipe, a link, a folder."""
    path.unlink(missing_ok=True)
    make(path)


def edit_json(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; ... takes a key away."""
    tree = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))


@dataclass(frozen=True)
class Case:
    family: str
    name: str
    steps: Callable[[Place], Steps]
    quick: bool
    """May stand in the short form: a fork or two, a few seconds."""


CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Family:
    """The cases of a family, under `family/name`."""

    name: str

    def add(self, name: str, steps: Callable[..., Steps], *arguments: Any, quick: bool = True) -> None:
        """Add a case. `steps` takes `arguments`, then the place."""
        key = f"{self.name}/{name.strip('_').replace('_', '-')}"
        assert key not in CASES, key
        CASES[key] = Case(self.name, key, partial(steps, *arguments), quick)

    def each(
        self, name: str, steps: Callable[..., Steps], cases: Mapping[str, Any], *more: Any, quick: bool = True
    ) -> None:
        """Add a case for each entry of a table; `{}` in the name stands for its key. A tuple is several arguments."""
        for key, arguments in cases.items():
            several = arguments if isinstance(arguments, tuple) else (arguments,)
            self.add(name.replace("{}", key), steps, *several, *more, quick=quick)

    def table(self, quick: bool = True, **cases: Callable[[Place], Steps]) -> None:
        """Add cases that need no function of their own: `given(...)` by name."""
        for name, steps in cases.items():
            self.add(name, steps, quick=quick)

    def case(self, steps: Callable[[Place], Steps]) -> Callable[[Place], Steps]:
        """Add a function that makes inputs in a place, yields commands and looks at what they gave."""
        self.add(steps.__name__, steps)
        return steps

    def slow(self, steps: Callable[[Place], Steps]) -> Callable[[Place], Steps]:
        """The same, for a case that takes more than a fork or two and a few seconds."""
        self.add(steps.__name__, steps, quick=False)
        return steps


def check(is_so: bool, what: object) -> None:
    """Raise Wrong unless it is so."""
    if not is_so:
        raise Wrong(str(what)[:600])
