"""The run of another package that stands for a run: which one it is, and what it lacks of the steps that are done."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from artel.errors import InputError
from artel.storage import write_file
from artel.training.metrics.tracker import Figures, Tracker
from artel.training.run_folder import RunFolder


def kept_id(folder: RunFolder, package: str) -> str | None:
    """The id of a package's run that an earlier start of this run began; None for a run that begins."""
    return _ids(folder).get(package)


def keep_id(folder: RunFolder, package: str, its_id: str) -> None:
    write_file(folder.tracker_runs, orjson.dumps(_ids(folder) | {package: its_id}, option=orjson.OPT_INDENT_2))


def _ids(folder: RunFolder) -> dict[str, str]:
    file = folder.tracker_runs
    try:
        ids = orjson.loads(file.read_bytes()) if file.exists() else {}
    except ValueError:
        ids = None
    if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
        raise InputError.at(str(file), "is damaged", "remove it: the trackers then begin new runs")
    return ids


def send_earlier(tracker: Tracker, folder: RunFolder, step: int, has: Callable[[str, int], bool]) -> None:
    """Send what metrics.jsonl and samples.jsonl say of the steps up to `step`, in order, and the tracker has not.

    `has` is asked with `training`, `validation`, `tasks` or `samples`, and a step.
    """
    metrics = ((line["step"], 0, line) for line in _lines(folder.metrics))
    samples = ((number, 1, list(lines)) for number, lines in groupby(_lines(folder.samples), itemgetter("step")))
    for number, is_samples, found in heapq.merge(metrics, samples, key=itemgetter(0, 1)):
        if number > step:
            return
        kinds = [kind for kind in ("validation", "tasks") if kind in found]
        kind = "samples" if is_samples else (*kinds, "training")[0]
        if not has(kind, number):
            send: Callable[[Any], None] = getattr(tracker, kind)
            send(found)


def read_samples(folder: RunFolder) -> list[Figures]:
    return list(_lines(folder.samples))


def _lines(path: Path) -> Iterator[Figures]:
    """The whole lines of a file; a kill may have left the last one torn."""
    if path.exists():
        with path.open("rb") as file:
            yield from (orjson.loads(line) for line in file if line.endswith(b"\n"))
