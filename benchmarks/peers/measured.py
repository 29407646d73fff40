"""A row of benchmarks/gpu_table.py: one contestant alone on the device, measured, then profiled.

    python measured.py FOLDER FUNCTION RESULT.json STARTED --steps 20 [--precision fp8]

FUNCTION is that of contestant.py, FOLDER what gpu_table_inputs.py wrote, STARTED the time (Unix) when the row began.
The first step is timed apart, then come steps that do not count, then the measured ones; the device is idle when the
clock starts and stops. RESULT.json is written before the profile starts and once more after it. The process then ends
itself, because a contestant never returns. Nothing of artel is imported before the measurement is over.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contestant import AfterStep, Work, function_of

WARM_UP = 2
"""Steps after the first one that do not count: optimizers allocate their state there, and compilers work late."""
PROFILED = 3
LONGEST = 60
"""Seconds after which no further step is measured."""
MATMUL = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|linear|mkldnn_linear|_addmm_activation)$")


class Meter:
    """The callback after each step."""

    def __init__(self, work: Work, steps: int, precision: str, started: float, result: Path) -> None:
        self._work, self._steps, self._started, self._file = work, steps, started, result
        self._on_gpu = work.device == "cuda"
        self._about = json.loads((Path(work.folder) / "about.json").read_text(encoding="utf-8"))
        self._result: dict[str, Any] = {"precision": precision}
        self._losses: list[Any] = []
        self._tokens: list[Any] = []
        self._clock, self._profiled_until = 0.0, 0
        self._profiler: Any = None
        self._step = 0

    def __call__(self, loss: Any, tokens: Any = None) -> None:
        self._step += 1
        if self._profiler is not None:
            self._profile()
            return
        if self._step > 1 + WARM_UP:
            self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            self._tokens.append(tokens)
        late = len(self._losses) > 0 and time.perf_counter() - self._clock > LONGEST
        if self._step == 1:
            self._synchronize()
            self._result["first step s"] = time.time() - self._started
            self._result["first loss"] = float(loss)
        elif self._step == 1 + WARM_UP:
            self._synchronize()
            if self._on_gpu:
                self._result["reserved GiB"] = torch.cuda.max_memory_reserved() / 2**30
                torch.cuda.reset_peak_memory_stats()
            self._clock = time.perf_counter()
        elif len(self._losses) == self._steps or late:
            self._synchronize()
            self._measure(time.perf_counter() - self._clock)
            self._write()
            self._start_profile()

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._result), encoding="utf-8")

    def _measure(self, seconds: float) -> None:
        work, result, steps = self._work, self._result, len(self._losses)
        if self._on_gpu:
            result["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
            result["reserved GiB"] = max(result["reserved GiB"], torch.cuda.max_memory_reserved() / 2**30)
        else:
            result["peak GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        utils = sys.modules.get("torch._dynamo.utils")
        result["compiling s"] = utils.calculate_time_spent()["total_wall_time"] if utils else 0.0
        result["steps"], result["ms a step"] = steps, 1e3 * seconds / steps
        result["loss"] = float(sum(float(loss) for loss in self._losses) / steps)
        per_sample = self._about["tokens_per_sample"]
        tokens = per_sample * self._samples() * steps if per_sample else sum(int(count) for count in self._tokens)
        result["samples/s"], result["tokens/s"] = self._samples() * steps / seconds, tokens / seconds

        from artel.models.flops import device_name, peak_flops, utilization

        name = device_name(torch.device(work.device))
        peak = peak_flops(name, result["precision"])
        result["device"], result["torch"] = name, torch.__version__
        result["MFU"] = utilization(self._about["flops_per_token"], result["tokens/s"], peak)

    def _samples(self) -> int:
        return self._work.batch * (self._work.answers or 1)

    def _start_profile(self) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        if self._work.answers:  # a round of answers is not a step like the others
            os._exit(0)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        plan = schedule(wait=0, warmup=1, active=PROFILED, repeat=1)
        self._profiler = profile(activities=activities, schedule=plan, record_shapes=True)
        self._profiler.start()
        self._profiled_until = self._step + 1 + PROFILED

    def _profile(self) -> None:
        if self._step in (self._profiled_until - PROFILED, self._profiled_until):
            self._synchronize()  # the recording holds the kernels of its steps and no others
        if self._step < self._profiled_until:
            self._profiler.step()
            return
        self._profiler.stop()
        self._result["profile"] = self._groups()
        self._write()
        os._exit(0)

    def _groups(self) -> dict[str, float]:
        """Return milliseconds per step by group: artel's table of a profile, with the head apart from other matmuls."""
        from artel.training.profile import HOST, MATRIX, time_table

        table = time_table(self._profiler, PROFILED)
        time_of = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        ids = range(self._about["vocabulary"], self._about["vocabulary"] + 256)  # also padded ones
        head = sum(
            getattr(row, time_of)
            for row in self._profiler.key_averages(group_by_input_shape=True)
            if MATMUL.match(row.key) and any(size in ids for shape in row.input_shapes for size in _sizes(shape))
        )
        kinds = dict(table.kinds)
        head_ms = min(head / 1e3 / PROFILED, kinds[MATRIX])
        groups = {"layers' matmuls": kinds.pop(MATRIX) - head_ms, "head": head_ms}
        waits = kinds.pop(HOST)
        return {**groups, **kinds, "waits and gaps": waits, "wall": table.milliseconds}


def _sizes(shape: Any) -> list[int]:
    return [size for size in shape if isinstance(size, int)] if isinstance(shape, (list, tuple)) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("function")
    parser.add_argument("result", type=Path)
    parser.add_argument("started", type=float)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision")
    asked = parser.parse_args()
    work = Work(**json.loads((asked.folder / "work.json").read_text(encoding="utf-8")))
    work = replace(work, precision=asked.precision or work.precision)
    torch.set_num_threads(work.threads)
    try:
        function = function_of(asked.function)
        precision = getattr(function, "precision", work.precision)
        after_step: AfterStep = Meter(work, asked.steps, precision, asked.started, asked.result)
        function(work, after_step)
        reason = "it returned before it was measured"
    except ModuleNotFoundError as error:
        traceback.print_exc()
        reason = f"not installed: {error.name}"
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    result = json.loads(asked.result.read_text(encoding="utf-8")) if asked.result.exists() else {}
    asked.result.write_text(json.dumps(result | {"not run" if not result else "profile failed": reason}))
    os._exit(1)  # a library's threads or workers may still run


if __name__ == "__main__":
    main()
