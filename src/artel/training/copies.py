"""Checkpoints copied to S3 as they are written, and fetched from there where the machine that wrote them is gone.

A copy is there once its checksums.json is (artel/storage/remote_folders.py): S3 has no rename, and this file is written
last and removed first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from artel.storage import finished_folders, pull_folder, push_folder, remove_remote_folder
from artel.training.checkpoint import SUMS, checkpoint_path, list_checkpoints, read_progress


def copy_checkpoints(folder: Path, address: str) -> None:
    """Make the copies those checkpoints that are in `folder`: the new ones go there, then old ones go.

    Raises InputError or WorkError as push_folder does.
    """
    here = {path.name: path for path in list_checkpoints(folder)}
    there = set(finished_folders(address, SUMS))
    for name in sorted(here.keys() - there):
        push_folder(here[name], f"{address}/{name}", SUMS)
    for name in there - here.keys():
        remove_remote_folder(f"{address}/{name}", SUMS)


def fetch_newest(folder: Path, address: str, tell: Callable[[str], None]) -> None:
    """Bring the newest copy, and the best one with it, into `folder`, where it is newer than all that is there."""
    copies = [name for name in finished_folders(address, SUMS) if name.startswith("step-")]
    if not copies or any(path.name >= copies[-1] for path in list_checkpoints(folder)):
        return
    tell(f"{copies[-1]} is fetched from {address}")
    newest = folder / copies[-1]
    pull_folder(f"{address}/{newest.name}", newest, commit=SUMS)
    step = read_progress(newest).best_step
    best = newest if step is None else checkpoint_path(folder, step)
    if best.name in copies:
        pull_folder(f"{address}/{best.name}", best, commit=SUMS)
