"""The workspace in which a store is built: the plan and results of finished tasks, so that a killed run can resume.

    KEY.parts/run.yaml            the run
    KEY.parts/plan.json           the input shards of its sources, in order
    KEY.parts/held-out.json       the held-out fraction, if the configured one selects no document
    KEY.parts/tokenizer/          the tokenizer
    KEY.parts/benchmarks/         the index of the benchmarks' n-grams (with data.decontaminate)
    KEY.parts/lines/00000/        for each input shard, the digests of its lines or paragraphs (with dedup.lines)
    KEY.parts/earlier/00000       digests that also occur in an earlier shard
    KEY.parts/text/00000/         for each input shard, its documents as tokens, and the ledger of what was dropped
    KEY.parts/exact               which documents are exact duplicates
    KEY.parts/near/00000.npy      near-duplicates found in a group of bands
    KEY.parts/selection/          the number of copies of each document, the ledger, and the contents of store shards
    KEY.parts/shards/train-00000/ a finished store shard
    KEY.parts/errors/             errors of tasks in other processes

A task's result appears atomically; a task that has one is not run again.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from artel.config import RunConfig, dump_run, load_run
from artel.errors import ArtelError, InputError, Problem, WorkError
from artel.messages import from_json, to_json
from artel.secrets import hide_secrets
from artel.storage import discard, disk_errors, remove_leftovers, write_file
from artel.text import BenchmarkIndex, InputShard, cut_notes, input_shards, list_all_inputs, unread_files, unread_notes

# Small texts get smaller shards, so that every core has several of them. Each shard takes at least 0.2 s.
_MIN_SHARDS, _SMALL_SHARD = 16, 4_000_000

# The version of the layout above. Workspaces of other versions are deleted.
_FORMAT = 11


@dataclass(frozen=True)
class Workspace:
    path: Path
    config: RunConfig

    @classmethod
    def open_or_plan(cls, path: Path, config: RunConfig) -> Workspace:
        """Return the workspace at `path`. Plan it unless an earlier start has planned it."""
        if path.exists() and not _has_format(path / "plan.json"):
            shutil.rmtree(path)
        workspace = cls(path, config)
        held_out = workspace.held_out
        if held_out is not None:
            data = config.data.with_held_out(held_out["fraction"])
            workspace = cls(path, config.model_copy(update={"data": data}))
        config = workspace.config
        # Workers need the secrets. The folder is removed when the store is finished.
        run_file = dump_run(config, secrets=True)
        if run_file != dump_run(config):
            with disk_errors(path.parent):  # no other user may enter the folder
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.chmod(0o700)
        if not workspace._plan_file.is_file():
            inputs = [entry for _, _, inputs in list_all_inputs(config.data) for entry in inputs]
            total_bytes = sum(entry.size for entry in inputs)
            shard_bytes = min(config.prepare.part, max(_SMALL_SHARD, total_bytes // _MIN_SHARDS))
            shards = [shard.to_json() for shard in input_shards(config.data, shard_bytes)]
            unread = list(unread_files(config.data))
            notes = [*unread_notes(unread), *cut_notes(inputs, config.data.held_out)]
            not_read = [hide_secrets(str(file)) for *_, files in unread for file in files]
            plan = {"format": _FORMAT, "input_shards": shards, "notes": to_json(notes), "not_read": not_read}
            write_file(workspace._plan_file, orjson.dumps(plan))
        write_file(path / "run.yaml", run_file)  # settings that do not shape the store may have changed
        for folder in (path, *(entry for entry in path.iterdir() if entry.is_dir())):
            remove_leftovers(folder)
        workspace.remove_errors()
        return workspace

    @classmethod
    def load(cls, path: Path) -> Workspace:
        """Return a workspace that another process planned."""
        return cls(path, load_run(str(path / "run.yaml")))

    @property
    def _plan_file(self) -> Path:
        return self.path / "plan.json"

    @cached_property
    def input_shards(self) -> list[InputShard]:
        return list(map(InputShard.from_json, orjson.loads(self._plan_file.read_bytes())["input_shards"]))

    @property
    def held_out(self) -> dict[str, Any] | None:
        """Replacement for data.validation if it selects no document: its `fraction`, and a `note` for the user."""
        file = self.path / "held-out.json"
        return from_json(orjson.loads(file.read_bytes())) if file.is_file() else None

    @property
    def notes(self) -> list[str]:
        """Notes for the user about decisions made before the text was read."""
        notes = from_json(orjson.loads(self._plan_file.read_bytes())["notes"])
        return [*notes, *([self.held_out["note"]] if self.held_out else [])]

    @property
    def unread_files(self) -> list[str]:
        """Files in source folders that no format of the source reads."""
        return orjson.loads(self._plan_file.read_bytes())["not_read"]

    def hold_out(self, fraction: float, note: str) -> Workspace:
        """Restart the workspace with a different held-out fraction. All texts are read again."""
        self.exact_duplicates_path.unlink(missing_ok=True)
        for name in ("tokenizer", "lines", "earlier", "text", "near"):
            if (self.path / name).exists():
                discard(self.path / name)  # renames first: after a kill, nothing looks finished
        # Written last: after a kill, the next start uses the run's fraction and calls this method again.
        write_file(self.path / "held-out.json", orjson.dumps(to_json({"fraction": fraction, "note": note})))
        return Workspace.open_or_plan(self.path, self.config)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer"

    @property
    def benchmarks_path(self) -> Path:
        return self.path / "benchmarks"

    def benchmark_index(self) -> BenchmarkIndex | None:
        """Return the index of the run's benchmarks; None for a run without them."""
        config = self.config.data.decontaminate
        return BenchmarkIndex(self.benchmarks_path, config.words) if config is not None else None

    def lines_path(self, shard: int) -> Path:
        return self.path / "lines" / f"{shard:05d}"

    def repeated_lines_path(self, shard: int) -> Path:
        return self.path / "earlier" / f"{shard:05d}"

    def text_path(self, shard: int) -> Path:
        return self.path / "text" / f"{shard:05d}"

    @property
    def exact_duplicates_path(self) -> Path:
        return self.path / "exact"

    def near_duplicates_path(self, group: int) -> Path:
        return self.path / "near" / f"{group:05d}.npy"

    @property
    def selection_path(self) -> Path:
        return self.path / "selection"

    def shard_path(self, name: str) -> Path:
        return self.path / "shards" / name

    @property
    def _errors_path(self) -> Path:
        return self.path / "errors"

    def write_error(self, task: str, error: ArtelError) -> None:
        """Store the error of a task for the process that waits for it."""
        problems = [[problem.where, problem.what, problem.fix] for problem in error.problems]
        content = {"is_input": isinstance(error, InputError), "problems": problems}
        write_file(self._errors_path / f"{task}.json", orjson.dumps(content))

    def raise_errors(self) -> None:
        """Raise the errors of tasks in other processes, with all problems."""
        errors = [orjson.loads(file.read_bytes()) for file in sorted(self._errors_path.glob("*.json"))]
        if errors:
            problems = dict.fromkeys(Problem(*row) for error in errors for row in error["problems"])
            raise (InputError if all(error["is_input"] for error in errors) else WorkError)(problems)

    def remove_errors(self) -> None:
        for file in self._errors_path.glob("*.json"):
            file.unlink()


def _has_format(plan: Path) -> bool:
    """True if the workspace has no plan, or one of this version; False for a damaged plan."""
    with suppress(ValueError, AttributeError):
        return not plan.is_file() or bool(orjson.loads(plan.read_bytes()).get("format") == _FORMAT)
    return False
