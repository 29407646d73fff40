"""Copies checkpoints to S3 as they are written, and fetches them if the machine that wrote them is gone.

A copy is complete if it has checksums.json (artel/storage/remote/folders.py). S3 has no rename, so this file is written
last and removed first.
"""

from __future__ import annotations

from pathlib import Path

from artel.config import RunConfig, load_run
from artel.config.schema.run import CheckpointConfig
from artel.errors import InputError, Problem
from artel.messages import logger
from artel.preparing.run_mark import add_former_id
from artel.storage import discard, finished_folders, pull_folder, push_folder, remove_remote_folder
from artel.training.checkpoint.format import (
    RUN_FILE,
    SUMS,
    checkpoint_path,
    find_damage,
    list_checkpoints,
    read_progress,
)
from artel.training.run_folder import check_same, differs_in_length


def copy_checkpoints(folder: Path, config: CheckpointConfig) -> None:
    """Mirror `folder` to S3: upload new checkpoints, then delete old ones.

    Raise InputError or WorkError as push_folder does.
    """
    assert config.copy_to is not None
    local = {path.name: path for path in list_checkpoints(folder)}
    remote = set(_list_copies(config.copy_to))
    for name in sorted(local.keys() - remote):
        push_folder(local[name], f"{config.copy_to}/{name}", SUMS)
    for name in remote - local.keys():
        remove_remote_folder(f"{config.copy_to}/{name}", SUMS)


def fetch_newest(folder: Path, config: RunConfig) -> None:
    """Download the newest undamaged copy, and the best one, into `folder`, unless local checkpoints are newer.

    Raise InputError if the copies belong to another run, or all of them are damaged.
    """
    address = config.checkpoint.copy_to
    assert address is not None
    copies = _list_copies(address)
    damaged: dict[str, str] = {}
    for name in reversed(copies):
        if any(path.name >= name for path in list_checkpoints(folder)):
            return
        logger.info("fetching %s from %s", name, address)
        fault = _fetch(folder, name, config)
        if fault is None:
            _fetch_best(folder, read_progress(folder / name).best_step, copies, config)
            for damaged_name in damaged:  # only once a good copy is found: the run will write these steps again
                remove_remote_folder(f"{address}/{damaged_name}", SUMS)
            return
        logger.info("%s/%s %s: fetching the copy before it", address, name, fault)
        damaged[name] = fault
    if damaged:
        problems = [Problem(f"{address}/{name}", fault) for name, fault in damaged.items()]
        raise InputError([*problems, Problem(address, "no copy is complete", "start over with --restart")])


def _fetch_best(folder: Path, step: int | None, copies: list[str], config: RunConfig) -> None:
    """Download the best step's copy, if it is missing locally. If that fails, the run continues without it."""
    if step is None:
        return
    path = checkpoint_path(folder, step)
    if path.name in copies and not path.exists():
        fault = _fetch(folder, path.name, config, any_length=True)
        if fault is not None:
            logger.info(
                "%s/%s, the best, %s: the run continues without it", config.checkpoint.copy_to, path.name, fault
            )


def remove_copies(address: str) -> None:
    """Remove all copies of a run that starts over. Raise InputError or WorkError as remove_remote_folder does."""
    for name in _list_copies(address):
        remove_remote_folder(f"{address}/{name}", SUMS)


def _list_copies(address: str) -> list[str]:
    """Return the names of complete copies, oldest first."""
    return [name for name in finished_folders(address, SUMS) if name.startswith("step-")]


def _fetch(folder: Path, name: str, config: RunConfig, *, any_length: bool = False) -> str | None:
    """Download a copy. If it is damaged, discard it and return the reason. Otherwise return None.

    Raise InputError if it belongs to another run. `any_length`: the length of the run may differ.
    """
    path = folder / name
    pull_folder(f"{config.checkpoint.copy_to}/{name}", path, commit=SUMS)
    fault = find_damage(path)
    if fault is not None:
        discard(path)
        return fault
    if not (any_length and differs_in_length(load_run(str(path / RUN_FILE)), config)):
        try:
            check_same(path / RUN_FILE, config, "choose another address for copies (checkpoint.copy_to=…)")
        except InputError:
            discard(path)
            raise
    add_former_id(folder.parent, read_progress(path).run)
    return None
