"""The profile of a few steps: `profile: true` writes RUN/profile with a Chrome trace and a table of where time goes.

PyTorch's profiler runs for these steps alone, in the first process alone. Outside of them nothing is recorded: a
callback with nothing to do is called once a step, and ranges (`artel.models.profiler_ranges`) ask whether it runs.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import orjson
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from artel.storage import new_folder, write_file
from artel.training.metrics.profile_table import TimeTable, time_table
from artel.training.run import Run

_SKIPPED = 5  # steps that compile, fill caches and warm up
_RECORDED = 3


class Profile:
    """A callback: records steps 6 to 8 of this start of the run, fewer and earlier where the run is shorter.

    It is the last in the list, so that it sees a step together with what is done after it. `close` is called however
    the run ends.
    """

    def __init__(self, run: Run) -> None:
        """Called before the first step: a run of a single step is recorded from here on."""
        self._run = run
        self._wanted = run.config.profile and run.world.first
        self._profiler: profile | None = None
        left = _SKIPPED + _RECORDED if run.length.steps is None else run.length.steps - run.step
        skipped = min(_SKIPPED, left // 2)
        self._first = run.step + skipped  # steps done when the recording begins
        self._last = self._first + min(_RECORDED, left - skipped)
        self._begin = max(run.step, self._first - 1)  # the profiler itself warms up for a step
        if self._wanted and left < _SKIPPED + _RECORDED:
            run.tell(
                f"profile: of the {left} steps left, {self._last - self._first} from step {self._first + 1} on are "
                f"recorded; {_SKIPPED + _RECORDED} or more give a steadier picture"
            )
        self._start_if_due()

    def __call__(self, run: Run) -> None:
        if self._profiler is None:
            self._start_if_due()
        elif run.step >= self._last or run.finished:
            self._wait_for_device()
            self.close()
        else:
            if run.step == self._first:
                self._wait_for_device()
            self._profiler.step()

    def close(self) -> None:
        """Stop recording, and write what whole steps there are. Does nothing when all is written, or nothing began.

        Raises WorkError when the disk is full.
        """
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a schedule that is not run to its end
            profiler.stop()
        if not self._run.folder.path.is_dir():  # removed while the run was at work: it is not made again for this
            return
        steps = self._run.step - self._first
        if steps < 1:
            self._run.tell(f"profile: the run ended before step {self._first + 1} was over; nothing is written")
            return
        folder = self._run.folder.profile
        table = _write(profiler, folder, steps)
        self._run.tell(
            f"profile: {steps} step(s) from step {self._first + 1} on, {table.milliseconds:,.1f} ms each: "
            f"{table.largest(3)}; {folder / 'table.txt'}, and trace.json for ui.perfetto.dev"
        )

    def _start_if_due(self) -> None:
        if not self._wanted or self._run.step != self._begin or self._begin == self._last:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it announces itself on standard error
        activities = [ProfilerActivity.CPU]
        if self._run.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        warmup = self._first - self._begin
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of no warm-up, where there is no step for it
            when = schedule(wait=0, warmup=warmup, active=self._last - self._first, repeat=1)
        self._profiler = profile(activities=activities, schedule=when)
        self._profiler.start()

    def _wait_for_device(self) -> None:
        """At both ends of the recording, so that it holds the kernels of its own steps and no others."""
        if self._run.world.device.type == "cuda":
            torch.cuda.synchronize(self._run.world.device)


def _write(profiler: profile, folder: Path, steps: int) -> TimeTable:
    """trace.json, table.json and table.txt, together or not at all; an earlier profile is replaced."""
    with new_folder(folder, replace=True) as partial:
        profiler.export_chrome_trace(str(partial / "trace.json"))
        table = time_table(profiler, steps)
        write_file(partial / "table.json", orjson.dumps(table.to_json(), option=orjson.OPT_INDENT_2))
        write_file(partial / "table.txt", str(table))
    return table
