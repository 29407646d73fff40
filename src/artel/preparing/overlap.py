"""What artel writes and what it reads lie apart: else a run reads its own output as text, or writes over its input."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.storage import cache_folder, folder_problem, is_remote
from artel.text import source_paths

Outputs = list[tuple[str, Path]]
"""The key (`run`, `data.store`) and the folder of each."""


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder that is read whole, given by a key of the run file."""

    where: str
    path: str


def overlap_problems(run: RunConfig, outputs: Outputs | None = None) -> list[Problem]:
    """Where an output of a run would lie in one of its inputs, or an input lies in an output, by real paths.

    Outputs are the run's folder, the stores and the cache unless others are given. They need not exist yet. Text may
    not lie in any of them; models, tokenizers and finished stores that artel made before may lie in the cache and
    among the stores.
    """
    outputs = _outputs(run) if outputs is None else outputs
    problems = []
    for reach in source_paths(run.data):
        problems += [
            _would_be_read(key, folder, reach.key, reach.path)
            for key, folder in outputs if reach.would_read(_real(folder))
        ]  # fmt: skip
        problems += _lies_in_output(reach.key, reach.files, outputs)
    for given in _folders(run):
        problems += [
            _would_be_read(key, folder, given.where, given.path)
            for key, folder in outputs if _real(folder).is_relative_to(_real(given.path))
        ]  # fmt: skip
        own = [(key, folder) for key, folder in outputs if key not in ("data.store", "ARTEL_CACHE")]
        problems += _lies_in_output(given.where, [Path(given.path)], own)
    return problems


def output_problems(run: RunConfig) -> list[Problem]:
    """Outputs of a run that cannot be written. One that is there may hold all that is needed, but for the run's own."""
    faults = [
        (key, folder, folder_problem(folder)) for key, folder in _outputs(run) if key == "run" or not folder.is_dir()
    ]
    return [Problem(key, f"{folder} {fault}", "write another folder") for key, folder, fault in faults if fault]


def refuse_overlaps(run: RunConfig, outputs: Outputs | None = None) -> None:
    """Raise InputError with all `overlap_problems`."""
    if problems := overlap_problems(run, outputs):
        raise InputError(problems)


def _outputs(run: RunConfig) -> Outputs:
    outputs = [("ARTEL_CACHE", cache_folder())]
    if run.run:  # else a text alone is read, as by artel evaluate
        outputs.insert(0, ("run", Path(run.run)))
    if run.data.store and not is_remote(run.data.store):
        outputs.append(("data.store", Path(run.data.store)))
    return outputs


def _folders(run: RunConfig) -> Iterator[_Folder]:
    """Folders that are read beside the sources of text."""
    keys = {
        "model.from": run.model.from_,
        "tokenizer.from": run.tokenizer.from_,
        "data.from_store": run.data.from_store,
    }
    for where, path in keys.items():
        if path and Path(path).is_dir():
            yield _Folder(where, path)


def _lies_in_output(where: str, files: Iterable[Path], outputs: Outputs) -> list[Problem]:
    """A problem for each output that one of the files lies in, with the first of them."""
    reals = {_real(folder): (key, folder) for key, folder in reversed(outputs)}
    problems: dict[str, Problem] = {}
    folders: dict[str, str] = {}
    for file in files:
        parent = os.path.dirname(file)  # noqa: PTH120
        if parent not in folders:
            folders[parent] = os.path.realpath(parent)
        path = Path(os.path.realpath(file)) if file.is_symlink() else Path(folders[parent], file.name)
        for real, (key, folder) in reals.items():
            if key not in problems and path.is_relative_to(real):
                what = f"{file} (really {path}) lies in {folder} ({key}), where artel writes and clears"
                problems[key] = Problem(where, what, f"move it out of there, or choose another folder ({key})")
    return list(problems.values())


def _would_be_read(key: str, folder: Path, where: str, path: str) -> Problem:
    what = f"the folder {folder} (really {_real(folder)}) lies in {path} ({where}), and would be read as input"
    return Problem(key, what, f"choose a folder outside of it ({key}), or a narrower path ({where})")


def _real(path: Path | str) -> Path:
    return Path(os.path.realpath(path))
