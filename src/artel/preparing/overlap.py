"""Checks that outputs and inputs do not overlap: a run would read its output as text, or overwrite its input."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.storage import cache_folder, folder_problem, is_remote, rows_folder
from artel.text import source_paths

Outputs = list[tuple[str, Path]]
"""(run-file key such as `run` or `data.store`, folder) of each output."""


def overlap_problems(config: RunConfig, outputs: Outputs | None = None) -> list[Problem]:
    """Return problems with outputs inside inputs and inputs inside outputs, by real paths.

    By default, outputs are the run's folder, the stores and the cache. They need not exist. No output may contain
    text; the cache and the stores may contain models, tokenizers and finished stores.
    """
    outputs = _list_outputs(config) if outputs is None else outputs
    problems = []
    for source_path in source_paths(config.data):
        problems += [
            _nested_output_problem(key, folder, source_path.key, source_path.path)
            for key, folder in outputs
            if source_path.would_read(_real_path(folder))
        ]
        problems += _nested_input_problems(source_path.key, source_path.files, outputs)
    run_outputs = [(key, folder) for key, folder in outputs if key not in ("data.store", "ARTEL_CACHE")]
    for input_key, path in _input_folders(config).items():
        problems += [
            _nested_output_problem(key, folder, input_key, path)
            for key, folder in outputs
            if _real_path(folder).is_relative_to(_real_path(path))
        ]
        problems += _nested_input_problems(input_key, [Path(path)], run_outputs)
    return problems


def output_problems(config: RunConfig) -> list[Problem]:
    """Return problems with outputs that cannot be written. Existing stores and caches are not checked."""
    outputs = [(key, folder) for key, folder in _list_outputs(config) if key == "run" or not folder.is_dir()]
    return [
        Problem(key, f"{folder} {problem}", "use another folder")
        for key, folder in outputs
        if (problem := folder_problem(folder))
    ]


def check_overlaps(config: RunConfig, outputs: Outputs | None = None) -> None:
    """Raise InputError with all `overlap_problems`."""
    if problems := overlap_problems(config, outputs):
        raise InputError(problems)


def _list_outputs(config: RunConfig) -> Outputs:
    outputs = [("ARTEL_CACHE", cache_folder())]
    if config.run:  # empty if there is no run folder, e.g. in artel evaluate
        outputs.insert(0, ("run", Path(config.run)))
    if config.data.store and not is_remote(config.data.store):
        outputs.append(("data.store", Path(config.data.store)))
    return outputs


def _input_folders(config: RunConfig) -> dict[str, str]:
    """Return input folders other than the sources of text, by key."""
    paths = {
        "model.from": config.model.from_,
        "tokenizer.from": config.tokenizer.from_,
        "data.from_store": config.data.from_store,
    }
    return {key: path for key, path in paths.items() if path and Path(path).is_dir()}


def _nested_input_problems(input_key: str, files: Iterable[Path], outputs: Outputs) -> list[Problem]:
    """Return a problem for each output that contains one of the files, about the first such file."""
    by_real_path = {_real_path(folder): (key, folder) for key, folder in reversed(outputs)}
    problems: dict[str, Problem] = {}
    real_parents: dict[str, str] = {}
    # Allow rows passed from Python: artel writes them there itself and never clears them.
    rows_path = _real_path(rows_folder())
    for file in files:
        parent = os.path.dirname(file)  # noqa: PTH120
        if parent not in real_parents:
            real_parents[parent] = os.path.realpath(parent)
        path = Path(os.path.realpath(file)) if file.is_symlink() else Path(real_parents[parent], file.name)
        for output_path, (key, folder) in by_real_path.items():
            if key not in problems and path.is_relative_to(output_path) and path.parent != rows_path:
                what = f"{file} (really {path}) is in {folder} ({key}), where artel writes and clears"
                fix = f"move it, or choose another folder ({key})"
                problems[key] = Problem(input_key, what, fix)
    return list(problems.values())


def _nested_output_problem(key: str, folder: Path, input_key: str, path: str) -> Problem:
    what = f"the folder {folder} (really {_real_path(folder)}) is in {path} ({input_key}): it would be read as input"
    return Problem(key, what, f"choose a folder outside of it ({key}), or a narrower path ({input_key})")


def _real_path(path: Path | str) -> Path:
    return Path(os.path.realpath(path))
