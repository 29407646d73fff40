"""What lies on the disk of a run, read by none of artel's code: where it stands, whether its checkpoints are whole."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import xxhash
import zstandard

PREPARING, FIRST_STEP, WRITING, SCORING, STEP, CHECKPOINT, COMMIT, EXPORT, OVER = (
    "preparing", "first step", "mid-writing", "mid-scoring", "mid-step", "mid-checkpoint", "mid-commit", "mid-export",
    "over",
)  # fmt: skip
PHASES = (PREPARING, FIRST_STEP, STEP, CHECKPOINT, COMMIT, EXPORT)
PHASES_WITH_ROUNDS = (PREPARING, FIRST_STEP, WRITING, SCORING, STEP, CHECKPOINT, COMMIT, EXPORT)
_PARTIAL = re.compile(r"\.(.+)\.partial-(\d+)-[0-9a-f]+")
_STEP = re.compile(r"step-(\d{9})")


class Watched:
    """One start of a run, as its folder shows it. Made before the start, so as to know what was there."""

    def __init__(self, run: Path, stores: Path, steps: int) -> None:
        self.pids: set[int] = set()
        self._run, self._stores, self._steps = run, stores, steps
        self._checkpoints = run / "checkpoints"
        self._there = set(_steps(_names(self._checkpoints)))
        self._figures = _stamp(run / "metrics.jsonl")
        self.good = [step for step in sorted(self._there) if checkpoint_fault(self._checkpoints, step) is None]
        """Steps of the checkpoints that were whole before this start."""
        self.latest = _pointed_at(self._checkpoints / "latest")
        """The step that `latest` named before this start."""

    @property
    def newest_good(self) -> int:
        return self.good[-1] if self.good else 0

    def phase(self) -> str:
        """Where this start is.

        preparing: until the token store has its name. first step: until figures of this start's first step are there.
        mid-checkpoint: while a checkpoint has no name yet. mid-commit: it has its name, and `latest`, or `best` if it
        is, does not point to it yet, or an older one is just going. mid-export: from the last step's commit until
        result.json is there. mid-writing: answers of the next round are written; mid-scoring: they are scored, so a
        reward function has touched the file `scoring` since the round before. mid-step: all other times.
        """
        names = _names(self._run)
        if "result.json" in names:
            return OVER
        if not any(self._stores.glob("*/manifest.json")):
            return PREPARING
        if "model" in self._own(names) or "model" in names:
            return EXPORT
        names = _names(self._checkpoints)
        steps = _steps(names)
        newest = max(steps, default=0)
        own = self._own(names)
        if any(step > newest for step in _steps(own)):
            return CHECKPOINT
        is_new = newest not in self._there and bool(steps)
        is_pointed_at = is_new and self._is_pointed_at(newest)
        if is_pointed_at and newest == self._steps:
            return EXPORT
        if own or (is_new and not is_pointed_at):
            return COMMIT
        step = self.step_logged()
        if step <= self.newest_good:
            return FIRST_STEP
        return self._round_phase(step) or STEP

    def _round_phase(self, step: int) -> str | None:
        """Return the phase of the round after `step`, None if its file is there. A round has one step."""
        rounds = sorted(_rounds(self._run))
        if not rounds or len(rounds) > step:
            return None
        scored, written = _stamp(self._stores.parent / "scoring"), _stamp(rounds[-1])
        return SCORING if scored and written and scored[1] > written[1] else WRITING

    def step_logged(self) -> int:
        """The newest step of which this start has written figures; 0 before it has opened the file."""
        file = self._run / "metrics.jsonl"
        if _stamp(file) == self._figures:
            return 0
        lines = file.read_bytes().splitlines() if file.exists() else []
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError):  # half a line, which is just being written
                continue
        return 0

    def _is_pointed_at(self, step: int) -> bool:
        """Whether `latest` points to the checkpoint of a step, and `best` too if it is the best one."""
        if _pointed_at(self._checkpoints / "latest") != step:
            return False
        state = json.loads((self._checkpoints / f"step-{step:09d}" / "state.json").read_bytes())
        return state["best_step"] != step or _pointed_at(self._checkpoints / "best") == step

    def _own(self, names: list[str]) -> list[str]:
        """What this start, not one before it, is just writing."""
        found = [match for name in names if (match := _PARTIAL.fullmatch(name)) is not None]
        return [match[1] for match in found if int(match[2]) in self.pids]


def faults(run: Path) -> list[str]:
    """What must not be, whenever a run is killed: a torn checkpoint under a final name, a pointer to nothing."""
    checkpoints = run / "checkpoints"
    found = [fault for step in _steps(_names(checkpoints)) if (fault := checkpoint_fault(checkpoints, step))]
    for name in ("latest", "best"):
        link = checkpoints / name
        if link.is_symlink() and not link.is_dir():
            found.append(f"{name} points to {link.readlink()}, which is not there")
    return found


def checkpoint_fault(checkpoints: Path, step: int) -> str | None:
    """What is wrong with the checkpoint of a step: by its checksums (xxh3-128), the names of its files, its state."""
    path = checkpoints / f"step-{step:09d}"
    try:
        sums: dict[str, str] = json.loads((path / "checksums.json").read_bytes())
        for name, expected in sums.items():
            if xxhash.xxh3_128_hexdigest((path / name).read_bytes()) != expected:
                return f"{path.name}/{name} does not have its checksum"
        if set(sums) | {"checksums.json"} != set(_names(path)):
            return f"{path.name} holds {sorted(_names(path))}, its checksums name {sorted(sums)}"
        if json.loads((path / "state.json").read_bytes())["step"] != step:
            return f"{path.name}/state.json is of another step"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path.name}: {type(error).__name__}: {error}"
    return None


def outcome(run: Path, stores: Path) -> dict[str, Any]:
    """What a run that has ended must have in common with one that nobody disturbed, by name; all of it exact."""
    figures = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    return {
        "weights": _digest(run / "model" / "model.safetensors"),
        "token store": store_digest(stores),
        "losses and gradient norms": [
            (line["step"], line["loss"], line["gradient_norm"]) for line in figures if "loss" in line
        ],
        "validations": [(line["step"], line["validation"]) for line in figures if "validation" in line],
        "latest and best": [_pointed_at(run / "checkpoints" / name) for name in ("latest", "best")],
    } | ({"rounds": rounds} if (rounds := [_answers(file) for file in sorted(_rounds(run))]) else {})


def _rounds(run: Path) -> list[Path]:
    return list((run / "rollouts").glob("[0-9]*.jsonl.zst"))


def _answers(file: Path) -> list[dict[str, Any]]:
    """Return the answers of a round. Each prompt of the run must be there once, with all its answers."""
    answers = [json.loads(line) for line in zstandard.ZstdDecompressor().decompress(file.read_bytes()).splitlines()]
    number, names = int(file.name.partition(".")[0]), [(answer["number"], answer["answer"]) for answer in answers]
    prompts, per_prompt = len({prompt for prompt, _ in names}), 1 + max(answer for _, answer in names)
    expected = [(number * prompts + prompt, answer) for prompt in range(prompts) for answer in range(per_prompt)]
    assert names == expected, f"{file}: prompts are lost or learned twice"
    return answers


def leftovers(run: Path) -> list[str]:
    """Unfinished files and folders of killed starts, still there."""
    return [name for folder in (run, run / "checkpoints") for name in _names(folder) if _PARTIAL.fullmatch(name)]


def store_digest(stores: Path) -> str:
    """One digest of the names and contents of the one store there."""
    (store,) = [path.parent for path in stores.glob("*/manifest.json") if not path.parent.name.startswith(".")]
    digest = hashlib.sha256()
    for file in sorted(store.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(store)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


def _steps(names: list[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := _STEP.fullmatch(name)) is not None]


def _pointed_at(link: Path) -> int | None:
    try:
        (step,) = _steps([link.readlink().name])
    except (OSError, ValueError):
        return None
    return step


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        told = file.stat()
    except FileNotFoundError:
        return None
    return told.st_ino, told.st_mtime_ns
