"""Advice as people read it, and as programs do: each way as a line to paste."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from artel.config import Overrides
from artel.planning.fit.advice import Advice, Advised
from artel.planning.hardware import Hardware
from artel.planning.machine import in_gib

SAME, DIFFERENT, LARGER = "same_training", "different_training", "larger_hardware"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the user wrote, and what the lines to paste repeat."""

    name: str
    """The run file."""
    overrides: Overrides
    options: Mapping[str, str] = field(default_factory=dict)
    """Of `artel plan`, beside the hardware: `--host-memory` and its value."""

    def train(self, advised: Advised) -> str:
        hardware = advised.hardware
        words = ["--nproc", str(advised.plan.processes // hardware.nodes)] if advised.plan.processes > 1 else []
        words += ["--nnodes", str(hardware.nodes)] if hardware.nodes > 1 else []
        return self._line("train", words, advised)

    def plan(self, advised: Advised) -> str:
        hardware = advised.hardware
        nodes = ["--nodes", str(hardware.nodes)] if hardware.nodes > 1 else []
        return self._line(
            "plan", ["--hardware", f"{hardware.name}:{hardware.count}", *nodes, *chain(*self.options.items())], advised
        )

    def _line(self, verb: str, options: Sequence[str], advised: Advised) -> str:
        own = Overrides({key: value for key, value in self.overrides.items() if key not in advised.overrides}).words
        return shlex.join(["artel", verb, self.name, *options, *own, *advised.words])


def advice_json(advice: Advice, line: CommandLine) -> list[dict[str, Any]]:
    """The `advice` of `artel plan --json --fit`; `group` says at what price."""
    groups = {SAME: advice.same, DIFFERENT: advice.different, LARGER: advice.larger}
    return [_entry(group, advised, line) for group, each in groups.items() for advised in each]


def _entry(group: str, advised: Advised, line: CommandLine) -> dict[str, Any]:
    plan = advised.plan
    planned = plan.to_json()
    kept = ("fits", "verdict", "processes", "micro_batch", "activation_checkpointing", "precision", "hours", "cost")
    return {
        "group": group,
        "overrides": advised.words,
        "command": line.plan(advised) if group == LARGER else line.train(advised),
        "hardware": {"name": plan.hardware.name, "count": plan.hardware.count, "nodes": plan.hardware.nodes},
        **{key: planned[key] for key in kept},
        "per_rank_gib": planned["per_rank_gib"],
        "host_gib": planned["host_gib"],
        "tokens_per_second": None if plan.tokens_per_second is None else asdict(plan.tokens_per_second),
    }


def describe_advice(advice: Advice, line: CommandLine, hardware: Hardware) -> str:
    """The lines to paste, with what each would need and how fast it would be."""
    many = "processes on this machine" if hardware.shares_memory else f"{hardware.world_size} × {hardware.name}"
    parts = []
    if advice.same:
        parts.append([f"advice: the fastest that fit {many}", *_entries(advice.same, line.train)])
    else:
        parts.append([f"advice: nothing that was planned fits {many} with the training as it is"])
    if advice.different:
        parts.append(["if you accept a different training", *_entries(advice.different, line.train)])
    if advice.larger:
        parts.append(["the smallest hardware that would do", *_entries(advice.larger, line.plan)])
    return "\n\n".join("\n".join(part) for part in parts)


def _entries(advised: Sequence[Advised], command: Callable[[Advised], str]) -> list[str]:
    lines = []
    for number, each in enumerate(advised, 1):
        lines += [f"  {number}  {command(each)}", f"     {_figures(each)}"]
    return lines


def _figures(advised: Advised) -> str:
    plan = advised.plan
    speed = "speed unknown"
    if plan.tokens_per_second is not None:
        speed = f"{plan.tokens_per_second.mid:,.0f} tokens/s"
    figures = f"{plan.verdict}: {plan.fullest.reserved / 2**30:.1f} GiB on the fullest rank, {speed}"
    if advised.offloads:
        unknown = "if each host has" if plan.host_room is None else "with"
        figures += f", {unknown} {in_gib(plan.host_bytes)} of host memory"
    return figures
