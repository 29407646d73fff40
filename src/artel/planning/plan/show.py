"""A plan as text."""

from __future__ import annotations

from textwrap import wrap

from artel.planning.machine import format_gib
from artel.planning.operations import DISK, HOST, TRANSFER
from artel.planning.performance import Forecast
from artel.planning.plan.run_plan import Plan
from artel.training.budget import FEWEST_STEPS

_OFFLOAD_PARTS = {TRANSFER: "waiting for copies", HOST: "optimizer on the host", DISK: "disks"}
_INDENT = 17 * " "
"""Indent of a continuation line."""


def describe(plan: Plan, other_speed: str | None = None) -> str:
    """Format the verdict, then the details. `other_speed` explains a different speed shown earlier."""
    rank = plan.fullest
    parameters = plan.parameters
    active = f", {parameters['active']:,} for a token" if parameters["active"] < parameters["total"] else ""
    lines = [
        f"{plan.verdict}: {plan.memory_fraction:.0%} of the {_describe_scarcest_memory(plan)}",
        "",
        f"parameters       {parameters['total']:,}{active}, {parameters['trained']:,} trained",
        f"processes        {plan.processes:,} · {plan.precision}, micro-batches of {plan.micro_batch}, "
        f"recomputed: {plan.recompute}",
        f"data             {plan.data_note}",
        *_describe_round(plan),
        f"memory of {'the fullest rank' if len(plan.ranks) > 1 else 'each rank'}, at its fullest moment",
    ]
    kinds = rank.by_kind | {"allocated": rank.allocated, "reserved": rank.reserved}
    unit, bytes_of_unit, digits = ("GiB", 2**30, 2) if rank.reserved >= 2**30 else ("MiB", 2**20, 1)
    if plan.hardware.shares_memory:
        digits -= 1  # off by up to 10 %
    lines += [
        f"  {kind.replace('_', ' '):<27}{size / bytes_of_unit:>8.{digits}f} {unit}"
        for kind, size in kinds.items()
        if size
    ]
    lines += [
        f"speed            {_format_speed(plan)}",
        *wrap(other_speed or "", 100, initial_indent=_INDENT, subsequent_indent=_INDENT),
        *_describe_offload(plan),
        f"time             {_format_time(plan)}",
        f"host memory      {format_gib(plan.host_bytes)}{_describe_gathering(plan)}",
        "disk             " + ", ".join(f"{name} {_format_size(size)}" for name, size in plan.disk.items()),
    ]
    return "\n".join(lines)


def describe_briefly(plan: Plan) -> list[str]:
    """Format the plan in three lines."""
    rank = plan.fullest
    kinds = sorted(rank.by_kind.items(), key=lambda kind: -kind[1])[:4]
    largest_kinds = ", ".join(f"{kind.replace('_', ' ')} {size / 2**30:.1f}" for kind, size in kinds)
    ranks = f"{'the fullest' if len(plan.ranks) > 1 else 'each'} of {plan.processes:,} processes"
    ranks = "the process" if plan.processes == 1 else ranks
    disk = _format_size(sum(plan.disk.values()))
    return [
        f"{plan.verdict}: {plan.memory_fraction:.0%} of the {_describe_scarcest_memory(plan)}",
        f"{ranks} holds {rank.reserved / 2**30:.1f} GiB: {largest_kinds}; {disk} of disk",
        f"{'speed ' if plan.step is None else ''}{_format_speed(plan)}; {_format_time(plan)}",
    ]


def _describe_round(plan: Plan) -> list[str]:
    """Describe a round: its answers, and the time of each of its parts. Empty without rounds."""
    round_ = plan.round
    if round_ is None:
        return []
    lengths = (
        f"at most {round_.max_length:,} tokens"
        if round_.from_round is None
        else f"{round_.mean_length:,.0f} tokens on average, as in round {round_.from_round}"
    )
    answers = f"{round_.prompts:,} × {round_.settings.answers} answers of {lengths}: {round_.tokens:,.0f} tokens"
    times = [
        f"{name} {'unknown' if seconds is None else _format_hours(seconds / 3600)}"
        for name, seconds in plan.round_seconds.items()
    ]
    return [f"round            {answers}", *([_INDENT + ", ".join(times)] if times else [])]


def _format_speed(plan: Plan) -> str:
    speed = plan.tokens_per_second
    if plan.step is not None and speed is not None:
        return f"{speed.mid:,.0f} tokens/s ({speed.low:,.0f} to {speed.high:,.0f}), by {plan.step.source}"
    if plan.hardware.shares_memory:
        return "unknown. Run `artel hardware` once to measure this machine"
    return f"unknown: {plan.hardware.name} is not in the table of accelerators"


def _describe_offload(plan: Plan) -> list[str]:
    """Describe the parts of a step that offload adds. Empty without offload."""
    if plan.step is None or not plan.step.by_kind.keys() & _OFFLOAD_PARTS:
        return []
    by_kind = plan.step.by_kind
    rest = sum(seconds for kind, seconds in by_kind.items() if kind not in _OFFLOAD_PARTS)
    parts = [f"{name} {by_kind[kind]:,.3g}" for kind, name in _OFFLOAD_PARTS.items() if by_kind.get(kind)]
    host = plan.hardware.host
    machine = "" if host is None else f", as in {host.name}"
    return [f"a step           {plan.step.seconds.mid:,.3g} s: {', '.join([f'GPU {rest:,.3g}', *parts])}{machine}"]


def _describe_gathering(plan: Plan) -> str:
    """Say how much of the host memory only a checkpoint needs."""
    return f", of which {format_gib(plan.gathered_bytes)} on the first host to save" if plan.gathered_bytes else ""


def _format_time(plan: Plan) -> str:
    """Format the run's time, length, energy and cost."""
    if plan.budget is not None:
        return _format_budget(plan, plan.budget / 3600)
    if plan.length is None:
        return "length unknown until `artel prepare` has counted the text"
    length = f"{plan.length.steps:,} steps = {plan.length.tokens:,.0f} tokens ({plan.length.note})"
    if plan.forecast is None:
        return length
    hours = plan.forecast.hours
    duration = f"{_format_hours(hours.mid)} ({_format_hours(hours.low)} to {_format_hours(hours.high)})"
    return " · ".join([duration, length, *_format_price(plan.forecast)])


def _format_budget(plan: Plan, hours: float) -> str:
    phrases = [f"{_format_hours(hours)}, by train.budget"]
    if plan.shortest_budget is not None and plan.shortest_budget > 3600 * hours:
        phrases[0] += f", too short: {FEWEST_STEPS} steps take at least {_format_hours(plan.shortest_budget / 3600)}"
    if plan.forecast is None:
        return phrases[0]
    tokens = plan.forecast.tokens_per_second.scaled(3600 * hours)
    phrases.append(f"at most {tokens.mid:,.0f} tokens ({tokens.low:,.0f} to {tokens.high:,.0f})")
    return " · ".join([*phrases, *_format_price(plan.forecast)])


def _format_price(forecast: Forecast) -> list[str]:
    """Format energy and cost, if they are known."""
    energy, cost = forecast.energy_kwh, forecast.cost
    phrases = []
    if energy is not None:
        phrases.append(f"at most {energy.mid:,.4g} kWh")
    if cost is not None:
        phrases.append(f"costs {cost.mid:,.2f} ({cost.low:,.2f} to {cost.high:,.2f})")
    return phrases


def _format_hours(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    if hours >= 1.5:
        return f"{hours:.1f} h"
    return f"{hours * 60:.0f} min" if hours * 60 >= 2 else f"{hours * 3600:.3g} s"


def _format_size(num_bytes: int) -> str:
    """Format bytes in GiB, or in MiB below one GiB."""
    return format_gib(num_bytes) if num_bytes >= 2**30 or not num_bytes else f"{num_bytes / 2**20:,.1f} MiB"


def _describe_scarcest_memory(plan: Plan) -> str:
    """Describe the memory with the largest used fraction."""
    hardware = plan.hardware
    host = format_gib(plan.host_capacity or hardware.memory_bytes)
    if hardware.shares_memory:
        return f"memory of this machine, {host}"
    if plan.host_fraction > plan.device_fraction:
        return f"host memory, {host} on each host"
    nodes = f" on {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return f"memory of {hardware.world_size} × {hardware.name}{nodes}, {format_gib(hardware.memory_bytes)} each"
