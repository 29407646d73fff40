"""Where a step's time goes: from the Chrome trace of a few steps to a table that adds up to their wall time.

Every instant of the recorded steps belongs to exactly one kind. On a CPU it belongs to the operator that runs in the
training thread, the innermost where they are nested; where none runs, to communication in another thread, else to the
host. On a GPU it belongs to the kernel that runs, under the kind of the operator that launched it; where several run,
compute goes before copies and copies before communication, so that only what nothing hides is counted as such; where
none runs the GPU is idle, which is the host's doing or the data's.

An operator is known by its name, or by what it stands in: a range of the loop (`RANGES`), attention or the loss. What
runs backward has the sequence number of what ran forward. Figures are in milliseconds a step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

MATRIX = "matrix products"
ATTENTION = "attention"
LOSS = "loss"
ELEMENTWISE = "elementwise and norms"
OPTIMIZER = "optimizer and clipping"
COMMUNICATION = "communication"
COPIES = "copies"
DATA = "waiting for data"
CALLBACKS = "callbacks (log, validate, save)"
HOST = "the host's own time"

RANGES = {"artel: data": DATA, "artel: loss": LOSS, "artel: optimizer": OPTIMIZER, "artel: callbacks": CALLBACKS}
"""Ranges of the step, by `profiler_range`; one that is missing costs its kind only its precision."""

_STEP = "ProfilerStep#"
_LISTED = 20
_HOST = ("cpu_op", "user_annotation")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

_COMMUNICATION = re.compile(r"nccl|gloo:|c10d|ddp\.reducer|distributed::reducer|record_param_comms", re.IGNORECASE)
_COLLECTIVES = {
    "all-reduce": re.compile(r"all_?reduce", re.IGNORECASE),
    "all-gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce-scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all-to-all": re.compile(r"all_?to_?all", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast", re.IGNORECASE),
    "send and receive": re.compile(r"send|recv", re.IGNORECASE),
    "gradients in and out of buckets": re.compile(r"reducer::"),
}
# Generated kernels carry the names of all that was fused into them (triton_poi_fused__scaled_dot_product_…): what they
# do themselves is elementwise, unless they are filled templates.
_GENERATED = re.compile(r"^(triton_(?!tem_)|cpp_fused)")
_ATTENTION = re.compile(r"scaled_?dot_?product|flash|fmha|(flex|efficient|cpu)_attention", re.IGNORECASE)
_LOSS = re.compile(r"cross_?entropy|nll_?loss|log_?softmax", re.IGNORECASE)
_OPTIMIZER = re.compile(r"^Optimizer\.|_foreach_|_fused_(adam|sgd|adagrad)|multi_tensor_apply", re.IGNORECASE)
_MATRIX = re.compile(
    r"(^|::|_)(mm|addmm|bmm|baddbmm|addbmm|matmul|mv|addmv|dot|vdot|linear|linear_pointwise|linear_backward|einsum"
    r"|scaled_mm|grouped_mm|convolution\w*)(_|$)|gemm|cutlass|nvjet|triton_tem_fused\w*mm",
    re.IGNORECASE,
)
_COPIES = re.compile(r"^Mem(cpy|set)|^aten::(copy_|clone|contiguous|_?to_copy|to|cat|stack|fill_|zero_)$")
# They make a tensor's description or its memory and touch no number in it.
_VIEWS = re.compile(
    r"^aten::(\w*view\w*|reshape\w*|t|transpose|permute|expand\w*|as_strided\w*|slice|select|narrow|squeeze|unsqueeze|"
    r"detach\w*|alias|empty\w*|resize\w*|split\w*|chunk|unbind|unflatten|flatten|lift_fresh|resolve_\w+|size|result_type)$"
)


@dataclass(slots=True)
class _Span:
    """A range of one thread, in microseconds."""

    name: str
    start: float
    end: float
    thread: tuple[Any, Any]
    is_operator: bool
    id: int | None
    sequence: int | None
    is_backward: bool
    context: str | None = None
    """The kind of all that stands in it, whatever it is."""
    kind: str = HOST
    """The kind of the time in it that is no operator's within."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What an operator took, where it was of one kind: that of training is not that of a validation."""

    name: str
    kind: str
    milliseconds: float
    calls: float
    """Both a step. On a GPU, kernels launched by it."""


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Milliseconds of wall time a step by kind, adding up to `milliseconds`; operators by their own time."""

    device: str
    steps: int
    milliseconds: float
    kinds: dict[str, float]
    operators: list[Operator]

    def to_json(self) -> dict[str, Any]:
        """As in table.json: figures a step, percentages of the step's wall time."""
        return {
            "device": self.device,
            "steps": self.steps,
            "milliseconds": round(self.milliseconds, 4),
            "kinds": [
                {"kind": kind, "milliseconds": round(value, 4), "percent": round(self._percent(value), 2)}
                for kind, value in self.kinds.items()
            ],
            "operators": [
                {
                    "name": operator.name,
                    "kind": operator.kind,
                    "milliseconds": round(operator.milliseconds, 4),
                    "percent": round(self._percent(operator.milliseconds), 2),
                    "calls": round(operator.calls, 2),
                }
                for operator in self.operators
            ],
        }

    def __str__(self) -> str:
        how = (
            "a kernel's time counts for the operator that launched it; idle time is the host's or the data's"
            if self.device == "cuda"
            else "an operator's time is its own, without that of operators within it"
        )
        width = max(map(len, self.kinds))
        lines = [f"{'':<{width}} {'ms a step':>12} {'%':>7}"]
        lines += [f"{kind:<{width}} {value:>12.3f} {self._percent(value):>7.1f}" for kind, value in self.kinds.items()]
        lines += [f"{'together':<{width}} {self.milliseconds:>12.3f} {100:>7.1f}", "", f"On {self.device}: {how}.", ""]
        lines.append(f"{'ms a step':>12} {'%':>7} {'calls':>8}  the {_LISTED} most expensive operators")
        lines += [
            f"{operator.milliseconds:>12.3f} {self._percent(operator.milliseconds):>7.1f} {operator.calls:>8.1f}  "
            f"{_shortened(operator.name)} ({operator.kind})"
            for operator in self.operators
        ]
        return "\n".join(lines) + "\n"

    def largest(self, count: int) -> str:
        """The largest kinds in a line."""
        kinds = sorted(self.kinds.items(), key=lambda item: -item[1])[:count]
        return ", ".join(f"{kind} {self._percent(value):.0f} %" for kind, value in kinds)

    def _percent(self, value: float) -> float:
        return 100 * value / self.milliseconds if self.milliseconds else 0.0


def time_table(trace: dict[str, Any], steps: int) -> TimeTable:
    """The table of the first `steps` steps of a Chrome trace as torch.profiler writes it."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = sorted((e for e in events if e["name"].startswith(_STEP) and e["cat"] == "user_annotation"), key=_start)
    begin, end = marks[0]["ts"], marks[steps - 1]["ts"] + marks[steps - 1]["dur"]
    main = (marks[0]["pid"], marks[0]["tid"])
    spans = [_span(event) for event in events if event.get("cat") in _HOST and not event["name"].startswith(_STEP)]
    _classify(spans, main)
    kernels = [event for event in events if event.get("cat") in _DEVICE]
    if kernels:
        device, counted, used = "cuda", *_on_gpu(spans, kernels, main, begin, end)
    else:
        device, counted, used = "cpu", *_on_cpu(spans, main, begin, end)
    totals = _partition(counted, begin, end)
    scale = 1e-3 / steps
    kinds = {kind: totals[kind] * scale for kind in _rows(totals)}
    return TimeTable(device, steps, (end - begin) * scale, kinds, _operators(used, scale, steps))


def _start(event: dict[str, Any]) -> float:
    return event["ts"]


def _span(event: dict[str, Any]) -> _Span:
    details = event.get("args", {})
    return _Span(
        name=event["name"],
        start=event["ts"],
        end=event["ts"] + event["dur"],
        thread=(event["pid"], event["tid"]),
        is_operator=event["cat"] == "cpu_op",
        id=details.get("External id"),
        sequence=details.get("Sequence number"),
        is_backward=bool(details.get("Fwd thread id")),
    )


def _classify(spans: list[_Span], main: tuple[Any, Any]) -> None:
    """Order spans by thread and time, nest them, and give each its context and kind.

    The training thread comes first: what runs backward, there or in a thread of its own, is known by what ran forward.
    """
    spans.sort(key=lambda span: (span.thread != main, str(span.thread), span.start, -span.end))
    forward: dict[int | None, str | None] = {}
    for _, group in groupby(spans, key=attrgetter("thread")):
        stack: list[_Span] = []
        for span in group:
            while stack and stack[-1].end <= span.start:
                stack.pop()
            parent = stack[-1] if stack else None
            if parent is not None:
                span.end = min(span.end, parent.end)  # the clock's rounding lets it stand out
            stack.append(span)
            span.context = _context(span, parent, forward.get(span.sequence) if span.is_backward else None)
            span.kind = _kind(span)
            if span.thread == main and not span.is_backward:
                # A span's number is that of the next node: the last one to begin with it is the one that makes it.
                forward[span.sequence] = span.context


def _context(span: _Span, parent: _Span | None, of_forward: str | None) -> str | None:
    """The kind that a span gives to all within it: its parent's, its own, or that of what it is the backward of."""
    within = parent.context if parent is not None else None
    if within == CALLBACKS:
        return within
    if _COMMUNICATION.search(span.name):
        return _collective(span.name)
    if within is not None:
        return within
    if span.name in RANGES:
        return RANGES[span.name]
    if _OPTIMIZER.search(span.name):
        return OPTIMIZER
    if not _GENERATED.search(span.name):
        if _ATTENTION.search(span.name):
            return ATTENTION
        if _LOSS.search(span.name):
            return LOSS
    return of_forward if of_forward in (ATTENTION, LOSS) else None


def _kind(span: _Span) -> str:
    """The kind of the span's own time. Matrix products of the loss count as such: they belong to the model's FLOPs."""
    if span.context == LOSS:
        named = _kind_by_name(span.name) if span.is_operator else HOST
        return named if named in (MATRIX, HOST) else LOSS
    if span.context is not None:
        return span.context
    return _kind_by_name(span.name) if span.is_operator else HOST


def _kind_by_name(name: str) -> str:
    """Of an operator or kernel that stands in nothing else. Engine and compiler wrap operators: that is the host's."""
    if _COMMUNICATION.search(name):
        return _collective(name)
    if _GENERATED.search(name):
        return ELEMENTWISE
    if _VIEWS.search(name):
        return HOST
    for kind, pattern in ((ATTENTION, _ATTENTION), (MATRIX, _MATRIX), (COPIES, _COPIES), (OPTIMIZER, _OPTIMIZER)):
        if pattern.search(name):
            return kind
    if "CompiledFxGraph" in name:  # on a CPU generated kernels are no operators: they are what this does itself
        return ELEMENTWISE
    is_wrapper = name.startswith(("autograd::", "torch::autograd")) or "::" not in name
    return HOST if is_wrapper and "kernel" not in name else ELEMENTWISE


def _collective(name: str) -> str:
    kind = next((kind for kind, pattern in _COLLECTIVES.items() if pattern.search(name)), "other")
    return f"{COMMUNICATION}: {kind}"


_Counted = tuple[float, float, int, str]
"""Start, end, rank, kind: of what runs at the same time the lowest rank counts."""
_Used = tuple[str, str, float]
"""An operator's name, its kind and microseconds."""


def _on_cpu(spans: list[_Span], main: tuple[Any, Any], begin: float, end: float) -> tuple[list[_Counted], list[_Used]]:
    counted: list[_Counted] = []
    own: dict[int, float] = defaultdict(float)
    here = [span for span in spans if span.thread == main]
    for span, start, stop in _own_times(here):
        own[id(span)] += stop - start
        if span.is_operator or span.kind != HOST:
            counted.append((start, stop, 0, span.kind))
    for span in spans:
        if span.thread != main and span.kind.startswith(COMMUNICATION):
            counted.append((span.start, span.end, 1, span.kind))
    used = [(span.name, span.kind, own[id(span)]) for span in here if span.is_operator and begin <= span.start < end]
    return counted, used


def _on_gpu(
    spans: list[_Span], kernels: list[dict[str, Any]], main: tuple[Any, Any], begin: float, end: float
) -> tuple[list[_Counted], list[_Used]]:
    counted: list[_Counted] = []
    used: list[_Used] = []
    launchers = {span.id: span for span in spans if span.id is not None}
    for kernel in kernels:
        launcher = launchers.get(kernel.get("args", {}).get("External id"))
        kind = _kind_of_kernel(kernel["name"], launcher)
        rank = 2 if kind.startswith(COMMUNICATION) else 1 if kind == COPIES else 0
        counted.append((kernel["ts"], kernel["ts"] + kernel["dur"], rank, kind))
        if begin <= kernel["ts"] < end:
            name = launcher.name if launcher is not None and launcher.is_operator else kernel["name"]
            used.append((name, kind, kernel["dur"]))
    for span in spans:
        if span.thread == main and span.name in RANGES and span.context in (DATA, CALLBACKS):
            counted.append((span.start, span.end, 3, span.context))
    return counted, used


def _kind_of_kernel(name: str, launcher: _Span | None) -> str:
    by_name = _kind_by_name(name)
    if launcher is None:
        return by_name if by_name != HOST else ELEMENTWISE
    if launcher.kind != HOST:
        return launcher.kind
    if launcher.context == LOSS:  # launched by a range or by an operator of the compiler, not by one that has a kind
        return by_name if by_name == MATRIX else LOSS
    return by_name if by_name != HOST else ELEMENTWISE


def _own_times(spans: Iterable[_Span]) -> Iterable[tuple[_Span, float, float]]:
    """Of nested spans of one thread, in order: the stretches in which each is the innermost."""
    stack: list[_Span] = []
    time = 0.0
    for span in spans:
        while stack and stack[-1].end <= span.start:
            done = stack.pop()
            if done.end > time:
                yield done, time, done.end
                time = done.end
        if stack and span.start > time:
            yield stack[-1], time, span.start
        time = max(time, span.start)
        stack.append(span)
    while stack:
        done = stack.pop()
        if done.end > time:
            yield done, time, done.end
            time = done.end


def _partition(counted: list[_Counted], begin: float, end: float) -> dict[str, float]:
    """Microseconds of each kind from `begin` to `end`; what nothing counts is the host's. They add up exactly."""
    edges = []
    for start, stop, rank, kind in counted:
        start, stop = max(start, begin), min(stop, end)
        if stop > start:
            edges += [(start, 1, (rank, kind)), (stop, -1, (rank, kind))]
    edges.sort(key=lambda edge: edge[0])
    totals: dict[str, float] = defaultdict(float)
    running: dict[tuple[int, str], int] = {}
    time = begin
    for at, change, key in edges:
        if at > time:
            totals[min(running)[1] if running else HOST] += at - time
            time = at
        running[key] = running.get(key, 0) + change
        if not running[key]:
            del running[key]
    totals[HOST] += end - time
    return totals


def _rows(totals: dict[str, float]) -> list[str]:
    """The table's rows in their order: all kinds, communication by what it does, where there is any."""
    collectives = sorted(kind for kind in totals if kind.startswith(COMMUNICATION)) or [COMMUNICATION]
    return [MATRIX, ATTENTION, LOSS, ELEMENTWISE, OPTIMIZER, *collectives, COPIES, DATA, CALLBACKS, HOST]


def _operators(used: list[_Used], scale: float, steps: int) -> list[Operator]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, kind, microseconds in used:
        times[name, kind].append(microseconds)
    operators = [
        Operator(name, kind, sum(durations) * scale, len(durations) / steps)
        for (name, kind), durations in times.items()
    ]
    return sorted(operators, key=lambda operator: (-operator.milliseconds, operator.name))[:_LISTED]


def _shortened(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:79]}…"
