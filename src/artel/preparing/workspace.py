"""The folder in which a store is made: the plan, and what each task has finished, so that a killed run goes on.

    KEY.parts/run.yaml            the run
    KEY.parts/plan.json           the parts of its sources, in their order
    KEY.parts/held-out.json       the share that is held out, where that of the run catches no document
    KEY.parts/tokenizer/          the tokenizer
    KEY.parts/lines/00000/        of each part the digests of its lines or paragraphs (where repeated ones go)
    KEY.parts/earlier/00000       and those of them that stand in an earlier part
    KEY.parts/text/00000/         of each part its documents, as tokens, and the ledger of what was dropped
    KEY.parts/exact               which documents are exact duplicates
    KEY.parts/near/00000.npy      near-duplicates found in a group of bands
    KEY.parts/verdict/            how often each document is written, the ledger, and what each shard holds
    KEY.parts/shards/train-00000/ a finished shard
    KEY.parts/errors/             what went wrong, in tasks of other processes

A task's result is there whole or not at all; one that is there is not made again.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from artel.config import RunConfig, dump_run, load_run
from artel.errors import ArtelError, InputError, Problem, WorkError
from artel.storage import disk_errors, remove_leftovers, write_file
from artel.text import InputShard, all_inputs, cut_notes, input_shards

# Of little text smaller parts are made, so that all cores have some: a few for each, but none that takes under 0.2 s.
_PARTS_AT_LEAST, _SMALL_PART = 16, 4_000_000

# Of what lies in a workspace: one that an artel of another form began is begun anew.
_FORM = 5


@dataclass(frozen=True)
class Workspace:
    path: Path
    run: RunConfig

    @classmethod
    def of(cls, path: Path, run: RunConfig) -> Workspace:
        """The workspace at `path`, planned now unless an earlier start did."""
        if path.exists() and not _has_form(path / "plan.json"):
            shutil.rmtree(path)
        workspace = cls(path, run)
        held_out = workspace.held_out
        if held_out is not None:
            data = run.data.model_copy(update={"validation": held_out["fraction"]})
            workspace = cls(path, run.model_copy(update={"data": data}))
        run = workspace.run
        run_file = dump_run(run, secrets=True)  # workers go by these addresses; the folder goes when the store is made
        if run_file != dump_run(run):
            _make_private(path)
        if not workspace._plan.is_file():
            inputs = [each for _, _, inputs in all_inputs(run.data) for each in inputs]
            total = sum(each.size for each in inputs)
            size = min(run.prepare.part, max(_SMALL_PART, total // _PARTS_AT_LEAST))
            parts = [part.to_json() for part in input_shards(run.data, size)]
            write_file(workspace._plan, orjson.dumps({"form": _FORM, "parts": parts, "notes": cut_notes(inputs)}))
        write_file(path / "run.yaml", run_file)  # what does not shape the store may be another than before
        for folder in (path, *(each for each in path.iterdir() if each.is_dir())):
            remove_leftovers(folder)
        workspace.forget_errors()
        return workspace

    @classmethod
    def at(cls, path: Path) -> Workspace:
        """A workspace that another process planned."""
        return cls(path, load_run(str(path / "run.yaml")))

    @property
    def _plan(self) -> Path:
        return self.path / "plan.json"

    @cached_property
    def parts(self) -> list[InputShard]:
        return [InputShard.from_json(told) for told in orjson.loads(self._plan.read_bytes())["parts"]]

    @property
    def held_out(self) -> dict[str, Any] | None:
        """The `fraction` that is held out where the run's own caught no document, and the `note` that says so."""
        file = self.path / "held-out.json"
        return orjson.loads(file.read_bytes()) if file.is_file() else None

    @property
    def notes(self) -> list[str]:
        """What was decided about the text before it was read, and about what is held out."""
        return [*orjson.loads(self._plan.read_bytes())["notes"], *([self.held_out["note"]] if self.held_out else [])]

    def hold_out(self, fraction: float, note: str) -> Workspace:
        """The workspace anew, with another share held out than the run says: all is read and trained again."""
        run = self.run.model_copy(update={"data": self.run.data.model_copy(update={"validation": fraction})})
        self.exact.unlink(missing_ok=True)
        for name in ("tokenizer", "lines", "earlier", "text", "near"):
            if (self.path / name).exists():
                shutil.rmtree(self.path / name)
        # Last: a start that was killed before goes on with the share of the run, and comes here again.
        write_file(self.path / "held-out.json", orjson.dumps({"fraction": fraction, "note": note}))
        return Workspace.of(self.path, run)

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    def lines(self, part: int) -> Path:
        return self.path / "lines" / f"{part:05d}"

    def earlier(self, part: int) -> Path:
        return self.path / "earlier" / f"{part:05d}"

    def text(self, part: int) -> Path:
        return self.path / "text" / f"{part:05d}"

    @property
    def exact(self) -> Path:
        return self.path / "exact"

    def near(self, group: int) -> Path:
        return self.path / "near" / f"{group:05d}.npy"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict"

    def shard(self, name: str) -> Path:
        return self.path / "shards" / name

    @property
    def _errors(self) -> Path:
        return self.path / "errors"

    def note_error(self, task: str, error: ArtelError) -> None:
        """Keep what a task of another process raised, for the one who waits for it."""
        problems = [[problem.where, problem.what, problem.fix] for problem in error.problems]
        told = {"is_input": isinstance(error, InputError), "problems": problems}
        write_file(self._errors / f"{task}.json", orjson.dumps(told))

    def raise_errors(self) -> None:
        """Raise what tasks of other processes raised, all problems together."""
        found: list[dict[str, Any]] = [orjson.loads(file.read_bytes()) for file in sorted(self._errors.glob("*.json"))]
        if found:
            problems = dict.fromkeys(Problem(*row) for told in found for row in told["problems"])
            raise (InputError if all(told["is_input"] for told in found) else WorkError)(problems)

    def forget_errors(self) -> None:
        for file in self._errors.glob("*.json"):
            file.unlink()


def _has_form(plan: Path) -> bool:
    return not plan.is_file() or orjson.loads(plan.read_bytes()).get("form") == _FORM


def _make_private(folder: Path) -> None:
    """A folder that no other user can look into."""
    with disk_errors(folder.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
