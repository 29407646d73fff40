"""Time of a training step by kind of work, summed over the operators of torch.profiler.

On a CPU an operator counts with its own time, on a GPU a kernel does. What no row accounts for is the host's own time:
on a GPU, all the time in which the GPU waits. Communication counts in full, also while something else runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch.profiler import profile

MATRIX = "matrix products"
ELEMENTWISE = "elementwise and norms"
HOST = "the host's own time"
_LISTED = 20

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
        """Return what table.json holds."""
        kinds = [
            {"kind": kind, "milliseconds": round(value, 4), "percent": self._percent(value)}
            for kind, value in self.kinds.items()
        ]
        operators = [{**row, "percent": self._percent(row["milliseconds"])} for row in self.operators]
        about = {"device": self.device, "steps": self.steps, "milliseconds": round(self.milliseconds, 4)}
        return {**about, "kinds": kinds, "operators": operators}

    def __str__(self) -> str:
        rows = [f"{kind:<32} {value:>12.3f} {self._percent(value):>7.1f}" for kind, value in self.kinds.items()]
        wall = f"{'wall time':<32} {self.milliseconds:>12.3f}"
        return "\n".join([f"{'':<32} {'ms a step':>12} {'%':>7}", *rows, wall, "", self.text])

    def largest(self, count: int) -> str:
        """Return the largest kinds, in a line."""
        kinds = sorted(self.kinds.items(), key=lambda item: -item[1])[:count]
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
        kind = _kind(row.key, is_kernel=device == "cuda")
        kinds[kind] += milliseconds
        if not row.is_user_annotation:
            calls = round(row.count / steps, 2)
            operators.append({"name": row.key, "kind": kind, "milliseconds": round(milliseconds, 4), "calls": calls})
    kinds[HOST] = max(0.0, wall - sum(value for kind, value in kinds.items() if kind != HOST))
    operators.sort(key=lambda row: (-row["milliseconds"], row["name"]))
    order = f"self_{device}_time_total" if device == "cpu" else "self_device_time_total"
    text = averages.table(sort_by=order, row_limit=_LISTED, max_name_column_width=80)
    return TimeTable(device, steps, wall, {k: kinds[k] for k in (*_KINDS, HOST)}, operators[:_LISTED], text)


def _kind(name: str, *, is_kernel: bool) -> str:
    for kind, pattern in _PATTERNS.items():
        if pattern.search(name):
            return kind
    return ELEMENTWISE if is_kernel or name.startswith(("aten::", "artel::")) else HOST
