"""What a run's folder tells: everything that training and preparing wrote there, read into one object.

It imports no torch, runs none of the run's own modules, and needs nothing but the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import orjson
import yaml

from artel.config import near_name
from artel.errors import InputError, Problem
from artel.preparing.run_mark import MARK
from artel.reports.curves import CurveReader, Curves
from artel.reports.status import RankStatus, SignsOfLife, Status, status_of
from artel.secrets import hide_secrets
from artel.storage import check_regular
from artel.training.run_folder import RunFolder, written_checkpoints

T = TypeVar("T")

_MOST_PROBLEMS = 20
_MOST_REJECTED = 1000
_MOST_STACKS = 20_000  # characters of a file of hangs/


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model made of a prompt after a step."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    bytes: int
    is_best: bool
    is_latest: bool


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the run: the first one, or one that resumed it."""

    step: int
    """Steps done when it began."""
    time: str
    """ISO 8601, UTC."""
    processes: int
    environment: dict[str, Any]
    """hosts, device, platform, and the versions of artel, python, torch and transformers."""
    chosen: dict[str, Any]
    """By key of the run file, what was chosen where it says `auto`."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Where the threads of a process stood that got no further."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class RunData:
    """A run's folder. What is not there is empty, or None."""

    folder: Path
    status: Status
    curves: Curves
    config: dict[str, Any]
    """The run file with every key, as in RUN/config.yaml; secrets are hidden."""
    samples: list[Sample] = field(default_factory=list)
    ledger: dict[str, Any] | None = None
    rejected: list[dict[str, str]] = field(default_factory=list)
    """The first 1,000 records that could not be used: origin, reason, detail, set."""
    plan: dict[str, Any] | None = None
    """What was planned, and under `measured` what was measured."""
    choice: dict[str, Any] | None = None
    """With `model.auto`, what the choice of the model expected, and what was `reached`."""
    result: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None
    """What the figures of the newest validation leave out: its step, tables, matrices (`Objective.details`)."""
    profile: dict[str, Any] | None = None
    """Where the time of a few steps went: milliseconds by kind and by operator."""
    bad_steps: list[dict[str, Any]] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    ranks: list[RankStatus] = field(default_factory=list)
    hangs: list[Hang] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    """Files whose last line has no end: a kill has cut it off, or it is being written. It is left out."""

    @property
    def objective(self) -> str:
        return str(self.config.get("objective", ""))

    @property
    def steps(self) -> int | None:
        """How many steps the run is to have; None where that is not known."""
        planned = (self.plan or {}).get("steps")
        chosen = self.starts[-1].chosen.get("train.steps") if self.starts else None
        steps = chosen or self.config.get("train", {}).get("steps") or planned
        return int(steps) if steps is not None else None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the run up to its newest logged step (`Progress.tokens_per_second`)."""
        newest = self.curves.newest
        speed = (self.result or {}).get("tokens_per_second") or newest.get("run_tokens_per_second")
        return float(speed) if isinstance(speed, int | float) else None


class RunReader:
    """Reads a run's folder again and again while the run goes on: of metrics.jsonl what was added alone."""

    def __init__(self, folder: Path | str, points: int | None = 2000, signs: SignsOfLife | None = None) -> None:
        """`points` is how many are kept of each curve at most; None for all. Raises InputError where no run is."""
        self._folder = RunFolder(Path(folder))
        check_is_run(self._folder)
        self._curves = CurveReader(self._folder.metrics, points)
        self._signs = signs or SignsOfLife()

    def read(self) -> RunData:
        """All that the folder tells now. Raises InputError, with all lines and files that no run writes."""
        folder, found = self._folder, _Found()
        curves = found.tried(self._curves.read) or Curves()
        if curves.torn:
            found.torn.append(str(folder.metrics))
        starts = list(found.lines(folder.starts, _start))
        ranks = _ranks(folder)
        begun = bool(curves.lines or starts)
        status = status_of(ranks, self._signs, complete=folder.is_complete, step=curves.step, begun=begun)
        data = RunData(
            folder=folder.path,
            status=status,
            curves=curves,
            config=_config(found, folder.config),
            samples=list(found.lines(folder.samples, _sample)),
            ledger=found.object(folder.ledger),
            rejected=list(found.lines(folder.path / "rejected.jsonl", _rejected, most=_MOST_REJECTED)),
            plan=found.object(folder.plan),
            choice=found.object(folder.choice),
            result=found.object(folder.result),
            validation=found.object(folder.validation),
            profile=found.object(folder.profile / "table.json"),
            bad_steps=list(found.lines(folder.bad_steps, _bad_step)),
            starts=starts,
            checkpoints=_checkpoints(folder),
            ranks=ranks,
            hangs=list(_hangs(folder.hangs)),
            torn=found.torn,
        )
        if found.problems:
            raise InputError(found.problems[:_MOST_PROBLEMS])
        return data


def read_run(folder: Path | str, points: int | None = 2000) -> RunData:
    """What a run's folder tells. `points` is how many are kept of each curve at most; None for all.

    Raises InputError where the folder is none of a run, and for all lines and files in it that no run writes.
    """
    return RunReader(folder, points).read()


def read_status(folder: RunFolder, curves: Curves) -> Status:
    """Return the status of a run whose curves have been read."""
    begun = bool(curves.lines)
    return status_of(_ranks(folder), SignsOfLife(), complete=folder.is_complete, step=curves.step, begun=begun)


def check_is_run(folder: RunFolder) -> None:
    """Raise InputError where the folder is not that of a run."""
    path = folder.path
    if not path.is_dir():
        near = near_name(str(path))
        fix = f"did you mean {near}?" if near else "give the folder of a run, as artel train names it"
        raise InputError.at(str(path), "is not a folder" if path.exists() else "there is no such folder", fix)
    if not any(file.is_file() for file in (path / MARK, folder.metrics, folder.config)):
        what = "is not the folder of a run: it has no .artel-run.json, config.yaml or metrics.jsonl"
        raise InputError.at(str(path), what, "give the folder that `run` names in the run file")


class _Found:
    """Reads small files, and keeps what is wrong with them to report it together."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.torn: list[str] = []

    def tried(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except InputError as error:
            self.problems += error.problems
            return None

    def content(self, file: Path, most_lines: int | None = None) -> bytes:
        """The bytes of a file, or of its first lines; none where there is none."""
        try:
            check_regular(file)
            if most_lines is None:
                return file.read_bytes()
            with file.open("rb") as opened:
                return b"".join(islice(opened, most_lines))
        except FileNotFoundError:
            return b""
        except InputError as error:
            self.problems += error.problems
        except OSError as error:
            self.problems.append(Problem(str(file), f"cannot be read: {error.strerror}", "it must be a file"))
        return b""

    def object(self, file: Path) -> dict[str, Any] | None:
        """A file of one JSON object; None where there is none."""
        content = self.content(file)
        if not content:
            return None
        try:
            value = orjson.loads(content)
            if isinstance(value, dict):
                return value
            what = "is not an object"
        except ValueError as error:
            what = f"is damaged: {error}"
        self.problems.append(Problem(str(file), what, "remove it, or restore it from a copy"))
        return None

    def lines(self, file: Path, read: Callable[[dict[str, Any]], T], most: int | None = None) -> Iterator[T]:
        """What `read` makes of each whole line of a file, or of the first `most`."""
        *complete, last = self.content(file, most).split(b"\n")
        if last:
            self.torn.append(str(file))
        for number, content in enumerate(complete, 1):
            try:
                yield read(orjson.loads(content))
            except KeyError as error:
                self._is_no_line(file, number, f"it has no {error.args[0]}")
            except (TypeError, AttributeError):
                self._is_no_line(file, number, "its values are of another kind")
            except (ValueError, OverflowError) as error:
                self._is_no_line(file, number, str(error))

    def _is_no_line(self, file: Path, number: int, what: str) -> None:
        self.problems.append(Problem(f"{file}:{number}", f"is no line of a run: {what}", "remove the line"))


def _sample(line: dict[str, Any]) -> Sample:
    return Sample(int(line["step"]), str(line["prompt"]), str(line["text"]))


def _start(line: dict[str, Any]) -> Start:
    environment, chosen = dict(line["environment"]), dict(line["chosen"])
    return Start(int(line["step"]), str(line["time"]), int(line["processes"]), environment, chosen)


def _rejected(line: dict[str, Any]) -> dict[str, str]:
    return {name: str(line[name]) for name in ("origin", "reason", "detail", "set")}


def _bad_step(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"step": int(line["step"])}


def _config(found: _Found, file: Path) -> dict[str, Any]:
    content = found.content(file)
    if not content:
        return {}
    try:
        config = yaml.safe_load(content)
        if isinstance(config, dict):
            return hide_secrets(config)
        what = "is not a mapping"
    except (yaml.YAMLError, ValueError) as error:
        what = f"is damaged: {' '.join(str(error).split())}"
    found.problems.append(Problem(str(file), what, "restore it from a copy, or from checkpoints/latest/run.yaml"))
    return {}


def _ranks(folder: RunFolder) -> list[RankStatus]:
    """The processes of the newest start, by rank, without files that are damaged or being written.

    A copied folder has none: those of the original may be at work.
    """
    ranks = []
    for file in () if folder.original is not None else folder.ranks.glob("rank-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            ranks.append(RankStatus.read(orjson.loads(file.read_bytes())))
    return sorted(ranks, key=lambda rank: rank.rank)


def _checkpoints(folder: RunFolder) -> list[Checkpoint]:
    marked = {name: (folder.checkpoints / name).resolve().name for name in ("best", "latest")}
    checkpoints = []
    for path in written_checkpoints(folder.checkpoints):
        try:
            size = sum(file.stat().st_size for file in path.iterdir())
        except OSError:  # just removed: a newer one has taken its place
            continue
        step = int(path.name.removeprefix("step-"))
        checkpoints.append(Checkpoint(step, size, marked["best"] == path.name, marked["latest"] == path.name))
    return checkpoints


def _hangs(folder: Path) -> Iterator[Hang]:
    for file in sorted(folder.glob("*.txt")):
        if re.fullmatch(r"[\w-]+-process-\d+\.txt", file.name) and file.is_file():
            yield Hang(file.name, file.read_text(encoding="utf-8", errors="replace")[:_MOST_STACKS])
