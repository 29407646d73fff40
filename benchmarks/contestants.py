"""Contestants of a benchmark: each in a process of its own with one thread, timed by the processor, step by step.

Their results are lines of a file, and the page is made of these.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class StepClock:
    """A callback of any trainer: notes the processor time of this process at the end of each step."""

    def __init__(self, uncounted: int = 5) -> None:
        self._uncounted = uncounted
        self._times: list[float] = []

    def note(self, *_: Any) -> None:
        self._times.append(time.process_time())

    def rate(self, of_a_step: int) -> float:
        """What is learned for each second of the processor, of `of_a_step` in a step, after those that do not count."""
        steps = len(self._times) - 1 - self._uncounted
        return steps * of_a_step / (self._times[-1] - self._times[self._uncounted])


def run_alone(script: str, words: list[str], folder: Path) -> dict[str, Any]:
    """What a script says, as JSON in its last line, in a folder of its own that has the .jsonl files of `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for file in folder.glob("*.jsonl"):
            (Path(place) / file.name).symlink_to(file)
        command = [sys.executable, str(Path(script).resolve()), *words]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, env={**os.environ, **_ENVIRONMENT})
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def once(results: Path, key: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns, and the machine's `load` meanwhile: a line of `results`, found again by its key.

    So the same command goes on with what is missing. Remove the file to measure anew.
    """
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    for done in map(json.loads, lines):
        if key.items() <= done.items():
            return dict(done)
    result = key | run()
    result["load"] = round(os.getloadavg()[1], 1)  # the mean of five minutes
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result, ensure_ascii=False) + "\n")
    print(result, file=sys.stderr, flush=True)
    return result


def write_page(page: Path, title: str, command: str, results: Path, lines: list[str]) -> None:
    """Write a page: how it was made, then `lines`. What stands below its heading "Notes" is kept."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines_of_runs = results.read_text(encoding="utf-8").splitlines()
    loads = [done["load"] for done in map(json.loads, lines_of_runs) if "load" in done]
    made = [
        f"# {title}",
        "",
        f"`python {command}` on {datetime.date.today():%d %B %Y}, at {commit}; a process with one thread for each run,",
        f"on {os.cpu_count()} cores with a load of {min(loads):g} to {max(loads):g}, other work included.",
        "",
        *lines,
    ]
    before = page.read_text(encoding="utf-8") if page.is_file() else ""
    _, heading, notes = before.partition("\n## Notes\n")
    page.write_text("\n".join(made).rstrip() + "\n" + heading + notes, encoding="utf-8")
