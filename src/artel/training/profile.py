"""Profile a few steps: `profile: true` writes a Chrome trace and a table of the time per step into RUN/profile.

PyTorch's profiler runs only for these steps, in the first process. Outside them the cost is one call of the callback
per step, and a check in each range (`artel.models.forward_pass`).

The table sums the time by kind of work. On a CPU, rows are operators (self time); on a GPU, kernels. Time that no row
accounts for is the host's: on a GPU, all the time in which the GPU waits. Communication counts in full, even if it
overlaps with computation.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from artel.messages import logger
from artel.storage import new_folder, write_file
from artel.training.run import Run

_WARMUP_STEPS = 5  # steps that compile, fill caches and warm up
_ACTIVE_STEPS = 3
_MAX_OPERATORS = 20  # operators in the table

MATRIX = "matrix products"
ELEMENTWISE = "elementwise and norms"
HOST = "the host's own time"


class StepProfiler:
    """A callback that profiles steps 6 to 8 after a start or resume, or earlier ones if the run is shorter.

    It is the last callback, so that a recorded step includes the others. Always call `close` at the end.
    """

    def __init__(self, run: Run) -> None:
        """Prepare the recording, before the first step. Start it if the run has a single step."""
        self._run = run
        self._enabled = run.config.profile and run.world.first
        self._profiler: profile | None = None
        steps_left = _WARMUP_STEPS + _ACTIVE_STEPS if run.length.steps is None else run.length.steps - run.step
        warmup = min(_WARMUP_STEPS, steps_left // 2)
        self._first_step = run.step + warmup  # steps done when the recording begins
        self._last_step = self._first_step + min(_ACTIVE_STEPS, steps_left - warmup)
        self._start_step = max(run.step, self._first_step - 1)  # the profiler itself warms up for a step
        if self._enabled and steps_left < _WARMUP_STEPS + _ACTIVE_STEPS:
            logger.info(
                "profile: recording %s of the %s steps left, from step %s; %s or more give a more reliable profile",
                self._last_step - self._first_step,
                steps_left,
                self._first_step + 1,
                _WARMUP_STEPS + _ACTIVE_STEPS,
            )
        self._start_if_due()

    def __call__(self, run: Run) -> None:
        if self._profiler is None:
            self._start_if_due()
        elif run.step >= self._last_step or run.finished:
            self._wait_for_device()
            self.close()
        else:
            if run.step == self._first_step:
                self._wait_for_device()
            self._profiler.step()

    def close(self) -> None:
        """Stop recording and write the complete steps, unless already closed. Raise WorkError if the disk is full."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns if the schedule did not reach its end
            profiler.stop()
        if not self._run.folder.path.is_dir():  # the user removed it: do not create it again
            return
        steps = self._run.step - self._first_step
        if steps < 1:
            logger.info("profile: the run ended before step %s was finished; no profile written", self._first_step + 1)
            return
        folder = self._run.folder.profile
        table = _write_profile(profiler, folder, steps)
        logger.info(
            "profile: %s step(s) from step %s on, %s ms each: %s; %s, and trace.json for ui.perfetto.dev",
            steps,
            self._first_step + 1,
            f"{table.milliseconds:,.1f}",
            table.largest(3),
            folder / "table.txt",
        )

    def _start_if_due(self) -> None:
        if not self._enabled or self._run.step != self._start_step or self._start_step == self._last_step:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no messages of its own on standard error
        activities = [ProfilerActivity.CPU]
        if self._run.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        warmup = self._first_step - self._start_step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns if there is not a step for warm-up
            profiler_schedule = schedule(wait=0, warmup=warmup, active=self._last_step - self._first_step, repeat=1)
        self._profiler = profile(activities=activities, schedule=profiler_schedule)
        self._profiler.start()

    def _wait_for_device(self) -> None:
        """Synchronize at both ends of the recording, so that it contains only the kernels of its steps."""
        if self._run.world.device.type == "cuda":
            torch.cuda.synchronize(self._run.world.device)


def _write_profile(profiler: profile, folder: Path, steps: int) -> TimeTable:
    """Write trace.json, table.json and table.txt together, or none. Replace an earlier profile."""
    with new_folder(folder, replace=True) as partial:
        profiler.export_chrome_trace(str(partial / "trace.json"))
        table = time_table(profiler, steps)
        write_file(partial / "table.json", orjson.dumps(table.to_json(), option=orjson.OPT_INDENT_2))
        write_file(partial / "table.txt", str(table))
    return table


# The first pattern that matches the name of an operator, kernel or range (`profiler_range`) gives its kind. Generated
# kernels are named after everything that was fused into them (triton_poi_fused__scaled_dot_product_…).
_KINDS = {
    "communication": r"nccl|gloo:|c10d|reducer|record_param_comms",
    ELEMENTWISE: r"^triton_(?!tem_)|^cpp_fused|CompiledFxGraph",
    "attention": r"scaled_?dot_?product|flash|fmha|sdpa|(flex|efficient|cpu)_attention",
    "loss": r"cross_?entropy|nll_?loss|log_?softmax|^artel: loss",
    MATRIX: r"(^|::|_)(mm|addmm|bmm|baddbmm|matmul|mv|dot|linear|linear_pointwise|linear_backward|einsum|scaled_mm"
    r"|grouped_mm|convolution\w*)(_|$)|gemm|cutlass|nvjet|triton_tem",
    "optimizer and clipping": r"^Optimizer\.|_foreach_|_fused_(adam|sgd|adagrad)|multi_tensor_apply|^artel: optimizer",
    "copies": r"^Mem(cpy|set)|^aten::(copy_|clone|contiguous|_?to_copy|to|cat|stack|fill_|zero_)$",
    "waiting for data": r"^artel: data",
    "callbacks (log, validate, save)": r"^artel: callbacks",
}
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Milliseconds per step by kind, the most expensive operators, and torch.profiler's own table as text."""

    device: str
    steps: int
    milliseconds: float
    """Wall time of a step."""
    kinds: dict[str, float]
    operators: list[dict[str, Any]]
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return the content of table.json."""
        kinds = [
            {"kind": kind, "milliseconds": round(value, 4), "percent": self._percent(value)}
            for kind, value in self.kinds.items()
        ]
        operators = [{**row, "percent": self._percent(row["milliseconds"])} for row in self.operators]
        summary = {"device": self.device, "steps": self.steps, "milliseconds": round(self.milliseconds, 4)}
        return {**summary, "kinds": kinds, "operators": operators}

    def __str__(self) -> str:
        rows = [f"{kind:<32} {value:>12.3f} {self._percent(value):>7.1f}" for kind, value in self.kinds.items()]
        wall = f"{'wall time':<32} {self.milliseconds:>12.3f}"
        return "\n".join([f"{'':<32} {'ms a step':>12} {'%':>7}", *rows, wall, "", self.text])

    def largest(self, num_kinds: int) -> str:
        """Return the largest kinds, in a line."""
        kinds = sorted(self.kinds.items(), key=lambda item: -item[1])[:num_kinds]
        return ", ".join(f"{kind} {self._percent(value):.0f} %" for kind, value in kinds)

    def _percent(self, value: float) -> float:
        return round(100 * value / self.milliseconds, 2) if self.milliseconds else 0.0


def time_table(profiler: profile, steps: int) -> TimeTable:
    """Return the table of a finished recording of `steps` steps."""
    averages = profiler.key_averages()
    device = "cuda" if any(row.device_type.name == "CUDA" for row in averages) else "cpu"
    wall, kinds, operators = 0.0, defaultdict[str, float](float), []
    for row in averages:
        if row.key.startswith("ProfilerStep"):
            wall = max(wall, row.cpu_time_total / 1e3 / row.count)
            continue
        if device == "cuda":
            if row.device_type.name != "CUDA" or row.is_user_annotation:
                continue
            milliseconds = row.self_device_time_total / 1e3 / steps
        else:
            milliseconds = row.self_cpu_time_total / 1e3 / steps
        kind = _classify(row.key, is_kernel=device == "cuda")
        kinds[kind] += milliseconds
        if not row.is_user_annotation:
            calls = round(row.count / steps, 2)
            operators.append({"name": row.key, "kind": kind, "milliseconds": round(milliseconds, 4), "calls": calls})
    kinds[HOST] = max(0.0, wall - sum(value for kind, value in kinds.items() if kind != HOST))
    operators.sort(key=lambda row: (-row["milliseconds"], row["name"]))
    order = f"self_{device}_time_total" if device == "cpu" else "self_device_time_total"
    text = averages.table(sort_by=order, row_limit=_MAX_OPERATORS, max_name_column_width=80)
    return TimeTable(device, steps, wall, {k: kinds[k] for k in (*_KINDS, HOST)}, operators[:_MAX_OPERATORS], text)


def _classify(name: str, *, is_kernel: bool) -> str:
    for kind, pattern in _PATTERNS.items():
        if pattern.search(name):
            return kind
    return ELEMENTWISE if is_kernel or name.startswith(("aten::", "artel::")) else HOST
