"""Reads all files that training and preparation wrote into a run's folder.

Needs only the folder: it imports neither torch nor the plugins of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import yaml

from artel.config import find_similar_name
from artel.errors import InputError, Problem
from artel.messages import from_json
from artel.preparing.run_mark import MARK
from artel.reports.curves import CurveReader, Curves
from artel.reports.rounds import RoundsReader, RoundView, learns_from_rewards
from artel.reports.status import RankStatus, SignsOfLife, Status, determine_status
from artel.secrets import hide_secrets
from artel.storage import check_regular
from artel.training.run_folder import RunFolder, written_checkpoints

Result = TypeVar("Result")

_MAX_PROBLEMS = 20
_MAX_REJECTED = 1000
_MAX_STACK_CHARS = 20_000  # per file in hangs/
_PACE_WINDOW = 0.2
"""Fraction of the logged steps, up to the newest, over which the pace is measured."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Text that the model generated for a prompt after a step."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    byte_size: int
    is_best: bool
    is_latest: bool


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the run: the first one, or one that resumed it."""

    step: int
    """Steps finished before this start."""
    time: str
    """ISO 8601, UTC."""
    processes: int
    environment: dict[str, Any]
    """hosts, device, platform, and the versions of artel, python, torch and transformers."""
    chosen: dict[str, Any]
    """Values chosen for keys that are `auto`, by key of the run file."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Stack traces of a process that hung."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class RunData:
    """Contents of a run's folder. Missing files are empty or None."""

    folder: Path
    status: Status
    curves: Curves
    config: dict[str, Any]
    """RUN/config.yaml: the run file with every key. Secrets are hidden."""
    samples: list[Sample] = field(default_factory=list)
    rounds: list[RoundView] = field(default_factory=list)
    """Some rounds of a run: the newest first, some in between, and the first."""
    round_count: int = 0
    """Number of rounds that are written."""
    ledger: dict[str, Any] | None = None
    rejected: list[dict[str, str]] = field(default_factory=list)
    """The first 1,000 records that could not be used: origin, reason, detail, set."""
    plan: dict[str, Any] | None = None
    """The plan, with measurements of the real run under `measured`."""
    choice: dict[str, Any] | None = None
    """With `model.auto`: the metrics `expected` at the choice, and the metrics `reached`."""
    result: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None
    """Details of the newest validation: its step, tables and matrices (`Objective.details`)."""
    profile: dict[str, Any] | None = None
    """Milliseconds of a few profiled steps, by kind and by operator."""
    bad_steps: list[dict[str, Any]] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    ranks: list[RankStatus] = field(default_factory=list)
    hangs: list[Hang] = field(default_factory=list)
    torn_files: list[str] = field(default_factory=list)
    """Files whose last line is incomplete, because of a kill or because it is being written. The line is ignored."""

    @property
    def objective(self) -> str:
        return str(self.config.get("objective", ""))

    @property
    def learns_from_rewards(self) -> bool:
        return learns_from_rewards(self.curves, self.rounds)

    @property
    def main_metric(self) -> str:
        """The metric whose curve says most: the reward if the run learns from rewards, since its loss says little."""
        return "reward" if self.learns_from_rewards else "loss"

    @property
    def steps(self) -> int | None:
        """The planned number of steps. None if unknown."""
        planned_steps = (self.plan or {}).get("steps")
        chosen = self.starts[-1].chosen.get("train.steps") if self.starts else None
        steps = chosen or self.config.get("train", {}).get("steps") or planned_steps
        return int(steps) if steps is not None else None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the run up to its newest logged step (`Progress.tokens_per_second`)."""
        newest = self.curves.newest
        speed = (self.result or {}).get("tokens_per_second") or newest.get("run_tokens_per_second")
        return float(speed) if isinstance(speed, int | float) else None

    @property
    def elapsed_seconds(self) -> float | None:
        """Wall time of all starts of the run so far. None if it is not recorded."""
        seconds = (self.result or {}).get("wall_seconds", self.curves.newest.get("seconds"))
        return float(seconds) if isinstance(seconds, int | float) else None

    @property
    def steps_per_second(self) -> float | None:
        """Pace over the newest fifth of the logged steps, including validations and checkpoints. None if unknown."""
        loss = self.curves.training.get("loss")
        if loss is None or len(loss.step) < 2 or not np.isfinite(loss.seconds).all():
            return None
        first = min(int(len(loss.step) * (1 - _PACE_WINDOW)), len(loss.step) - 2)
        seconds = float(loss.seconds[-1] - loss.seconds[first])
        return float(loss.step[-1] - loss.step[first]) / seconds if seconds > 0 else None

    @property
    def fraction_done(self) -> float | None:
        """Finished fraction of the steps, or of the time under `train.budget`. None if unknown."""
        used = self.curves.newest.get("budget_used")
        if isinstance(used, int | float):
            return min(1.0, float(used))
        return min(1.0, self.status.step / self.steps) if self.steps else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the newest pace, or what remains of `train.budget`. None if unknown."""
        train = self.config.get("train")
        budget = train.get("budget") if isinstance(train, dict) else None
        used = self.curves.newest.get("budget_used")
        if isinstance(budget, int | float) and isinstance(used, int | float):
            return max(0.0, (1 - used) * budget)
        pace = self.steps_per_second
        if pace is None or self.steps is None or pace <= 0:
            return None
        return max(0.0, (self.steps - self.status.step) / pace)


class RunReader:
    """Reads the folder of a run repeatedly. Reads only new lines of metrics.jsonl."""

    def __init__(self, folder: Path | str, max_points: int | None = 2000, signs: SignsOfLife | None = None) -> None:
        """Keep at most `max_points` points per curve, or all if None. Raise InputError if `folder` is not a run's."""
        self._folder = RunFolder(Path(folder))
        check_is_run(self._folder)
        self._curves = CurveReader(self._folder.metrics, max_points)
        self._rounds = RoundsReader(self._folder.rollouts)
        self._signs = signs or SignsOfLife()

    def read(self) -> RunData:
        """Return the current contents. Raise InputError if lines or files are damaged."""
        folder = self._folder
        files = _FileReader()
        curves = files.try_read(self._curves.read) or Curves()
        if curves.torn:
            files.torn_files.append(str(folder.metrics))
        round_count, rounds = files.try_read(self._rounds.read) or (0, [])
        starts = list(files.read_lines(folder.starts, _parse_start))
        ranks = _read_ranks(folder)
        has_started = bool(curves.line_count or starts)
        status = determine_status(
            ranks, self._signs, complete=folder.is_complete, step=curves.step, has_started=has_started
        )
        data = RunData(
            folder=folder.path,
            status=status,
            curves=curves,
            config=_read_config(files, folder.config),
            samples=list(files.read_lines(folder.samples, _parse_sample)),
            rounds=rounds,
            round_count=round_count,
            ledger=files.read_object(folder.ledger),
            rejected=list(files.read_lines(folder.path / "rejected.jsonl", _parse_rejected, limit=_MAX_REJECTED)),
            plan=files.read_object(folder.plan),
            choice=files.read_object(folder.choice),
            result=files.read_object(folder.result),
            validation=files.read_object(folder.validation),
            profile=files.read_object(folder.profile / "table.json"),
            bad_steps=list(files.read_lines(folder.bad_steps, _parse_bad_step)),
            starts=starts,
            checkpoints=_list_checkpoints(folder),
            ranks=ranks,
            hangs=list(_read_hangs(folder.hangs)),
            torn_files=files.torn_files,
        )
        if files.problems:
            raise InputError(files.problems[:_MAX_PROBLEMS])
        return data


def read_run(folder: Path | str, max_points: int | None = 2000) -> RunData:
    """Return the contents of a run's folder, with at most `max_points` points per curve (None: all).

    Raise InputError if the folder is not a run's, or if lines or files in it are damaged.
    """
    return RunReader(folder, max_points).read()


class RunsReader:
    """Reads the folders of several runs repeatedly, and reports all problems together."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Raise InputError with every folder that is not a run's."""
        self._readers = _collect_results(partial(RunReader, folder) for folder in dict.fromkeys(folders))

    def read(self) -> list[RunData]:
        """Return the current contents of every folder. Raise InputError if lines or files are damaged."""
        return _collect_results(reader.read for reader in self._readers)


def read_runs(folders: Sequence[str]) -> list[RunData]:
    """Return the contents of several runs' folders. Raise InputError if one is not a run's or is damaged."""
    return RunsReader(folders).read()


def _collect_results(calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """Return the results of all calls. Raise InputError with the problems of every call that failed."""
    results: list[Result] = []
    problems: list[Problem] = []
    for call in calls:
        try:
            results.append(call())
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return results


def read_status(folder: RunFolder, curves: Curves) -> Status:
    """Return the status of a run whose curves have been read."""
    has_started = bool(curves.line_count)
    return determine_status(
        _read_ranks(folder), SignsOfLife(), complete=folder.is_complete, step=curves.step, has_started=has_started
    )


def check_is_run(folder: RunFolder) -> None:
    """Raise InputError if `folder` is not a run's."""
    path = folder.path
    if not path.is_dir():
        similar = find_similar_name(str(path))
        fix = f"did you mean {similar}?" if similar else "use the folder of a run, as printed by artel train"
        raise InputError.at(str(path), "is not a folder" if path.exists() else "there is no such folder", fix)
    if not any(file.is_file() for file in (path / MARK, folder.metrics, folder.config)):
        message = "is not the folder of a run: it has no .artel-run.json, config.yaml or metrics.jsonl"
        raise InputError.at(str(path), message, "use the folder of `run` in the run file")


class _FileReader:
    """Reads small files and collects their problems, to report them together."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.torn_files: list[str] = []

    def try_read(self, read: Callable[[], Result]) -> Result | None:
        try:
            return read()
        except InputError as error:
            self.problems += error.problems
            return None

    def read_bytes(self, file: Path, max_lines: int | None = None) -> bytes:
        """Return the bytes of a file or of its first lines. Empty if it does not exist."""
        try:
            check_regular(file)
            if max_lines is None:
                return file.read_bytes()
            with file.open("rb") as stream:
                return b"".join(islice(stream, max_lines))
        except FileNotFoundError:
            return b""
        except InputError as error:
            self.problems += error.problems
        except OSError as error:
            self.problems.append(Problem(str(file), f"cannot be read: {error.strerror}", "it must be a file"))
        return b""

    def read_object(self, file: Path) -> dict[str, Any] | None:
        """Return the JSON object in a file, or None if it is missing, empty or damaged."""
        content = self.read_bytes(file)
        if not content:
            return None
        try:
            value = orjson.loads(content)
            if isinstance(value, dict):
                return value
            message = "is not an object"
        except ValueError as error:
            message = f"is damaged: {error}"
        self.problems.append(Problem(str(file), message, "remove it, or restore it from a copy"))
        return None

    def read_lines(
        self, file: Path, parse: Callable[[dict[str, Any]], Result], limit: int | None = None
    ) -> Iterator[Result]:
        """Yield `parse(line)` for each complete line of a JSONL file, or for its first `limit` lines."""
        *complete, last = self.read_bytes(file, limit).split(b"\n")
        if last:
            self.torn_files.append(str(file))
        for line_number, content in enumerate(complete, 1):
            try:
                yield parse(orjson.loads(content))
            except KeyError as error:
                self._add_line_problem(file, line_number, f"it has no {error.args[0]}")
            except (TypeError, AttributeError):
                self._add_line_problem(file, line_number, "its values have the wrong types")
            except (ValueError, OverflowError) as error:
                self._add_line_problem(file, line_number, str(error))

    def _add_line_problem(self, file: Path, line_number: int, reason: str) -> None:
        self.problems.append(Problem(f"{file}:{line_number}", f"is not a line of a run: {reason}", "remove the line"))


def _parse_sample(line: dict[str, Any]) -> Sample:
    return Sample(int(line["step"]), str(line["prompt"]), str(line["text"]))


def _parse_start(line: dict[str, Any]) -> Start:
    environment, chosen = dict(line["environment"]), dict(from_json(line["chosen"]))
    return Start(int(line["step"]), str(line["time"]), int(line["processes"]), environment, chosen)


def _parse_rejected(line: dict[str, Any]) -> dict[str, str]:
    return {name: str(line[name]) for name in ("origin", "reason", "detail", "set")}


def _parse_bad_step(line: dict[str, Any]) -> dict[str, Any]:
    return from_json(line) | {"step": int(line["step"])}


def _read_config(files: _FileReader, file: Path) -> dict[str, Any]:
    content = files.read_bytes(file)
    if not content:
        return {}
    try:
        config = yaml.safe_load(content)
        if isinstance(config, dict):
            return hide_secrets(config)
        message = "is not a mapping"
    except (yaml.YAMLError, ValueError) as error:
        message = f"is damaged: {' '.join(str(error).split())}"
    files.problems.append(Problem(str(file), message, "restore it from a copy, or from checkpoints/latest/run.yaml"))
    return {}


def _read_ranks(folder: RunFolder) -> list[RankStatus]:
    """Return the processes of the newest start, by rank. Skips files that are damaged or being written.

    Empty for a copied folder: its files describe processes of the original, which may still be running.
    """
    ranks = []
    for file in () if folder.original is not None else folder.ranks.glob("rank-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            ranks.append(RankStatus.read(orjson.loads(file.read_bytes())))
    return sorted(ranks, key=lambda rank: rank.rank)


def _list_checkpoints(folder: RunFolder) -> list[Checkpoint]:
    targets = {name: (folder.checkpoints / name).resolve().name for name in ("best", "latest")}
    checkpoints = []
    for path in written_checkpoints(folder.checkpoints):
        try:
            byte_size = sum(file.stat().st_size for file in path.iterdir())
        except OSError:  # just removed, since there is a newer one
            continue
        step = int(path.name.removeprefix("step-"))
        checkpoints.append(Checkpoint(step, byte_size, targets["best"] == path.name, targets["latest"] == path.name))
    return checkpoints


def _read_hangs(folder: Path) -> Iterator[Hang]:
    for file in sorted(folder.glob("*.txt")):
        if re.fullmatch(r"[\w-]+-process-\d+\.txt", file.name) and file.is_file():
            yield Hang(file.name, file.read_text(encoding="utf-8", errors="replace")[:_MAX_STACK_CHARS])
