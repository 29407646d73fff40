"""Contestants of a benchmark: each in a process of its own with one thread, timed by the processor, step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
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
