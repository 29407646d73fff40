"""A plan as text."""

from __future__ import annotations

from textwrap import wrap

from artel.planning.machine import format_gib
from artel.planning.performance import Forecast
from artel.planning.plan.run_plan import Plan
from artel.training.budget import FEWEST_STEPS

_INDENT = 17 * " "
"""Indent of a continuation line."""


def describe(plan: Plan, other_speed: str | None = None) -> str:
    """Format the verdict, then the details. `other_speed` explains a different speed shown earlier."""
    rank, parameters = plan.fullest, plan.parameters
    active = f", {parameters['active']:,} for a token" if parameters["active"] < parameters["total"] else ""
    lines = [
        f"{plan.verdict}: {plan.memory_fraction:.0%} of the {_scarcest(plan)}",
        "",
        f"parameters       {parameters['total']:,}{active}, {parameters['trained']:,} trained",
        f"processes        {plan.processes:,} · {plan.precision}, micro-batches of {plan.micro_batch}, "
        f"recomputed: {plan.recompute}",
        f"data             {plan.data_note}",
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
        f"speed            {_speed(plan)}",
        *wrap(other_speed or "", 100, initial_indent=_INDENT, subsequent_indent=_INDENT),
        f"time             {_time(plan)}",
        f"host memory      {format_gib(plan.host_bytes)}",
        "disk             " + ", ".join(f"{name} {_size(size)}" for name, size in plan.disk.items()),
    ]
    return "\n".join(lines)


def describe_briefly(plan: Plan) -> list[str]:
    """Format the plan in three lines."""
    rank = plan.fullest
    kinds = sorted(rank.by_kind.items(), key=lambda kind: -kind[1])[:4]
    largest_kinds = ", ".join(f"{kind.replace('_', ' ')} {size / 2**30:.1f}" for kind, size in kinds)
    ranks = f"{'the fullest' if len(plan.ranks) > 1 else 'each'} of {plan.processes:,} processes"
    ranks = "the process" if plan.processes == 1 else ranks
    disk = _size(sum(plan.disk.values()))
    return [
        f"{plan.verdict}: {plan.memory_fraction:.0%} of the {_scarcest(plan)}",
        f"{ranks} holds {rank.reserved / 2**30:.1f} GiB: {largest_kinds}; {disk} of disk",
        f"speed {_speed(plan)}; {_time(plan)}" if plan.step is None else f"{_speed(plan)}; {_time(plan)}",
    ]


def _speed(plan: Plan) -> str:
    step, tokens = plan.step, plan.tokens_per_second
    if step is not None and tokens is not None:
        return f"{tokens.mid:,.0f} tokens/s ({tokens.low:,.0f} to {tokens.high:,.0f}), by {step.source}"
    if plan.hardware.shares_memory:
        return "unknown. Run `artel hardware` once to measure this machine"
    if not plan.hardware.has_rates:
        return f"unknown: {plan.hardware.name} is not in the table of accelerators"
    return "unknown: transfers of parallel.offload are not planned"


def _time(plan: Plan) -> str:
    """Return the run's time, length, energy and cost."""
    if plan.budget is not None:
        return _time_of_budget(plan, plan.budget / 3600)
    if plan.length is None:
        return "length unknown until `artel prepare` has counted the text"
    length = f"{plan.length.steps:,} steps = {plan.length.tokens:,.0f} tokens ({plan.length.note})"
    if plan.forecast is None:
        return length
    hours = plan.forecast.hours
    parts = [f"{_duration(hours.mid)} ({_duration(hours.low)} to {_duration(hours.high)})", length]
    return " · ".join([*parts, *_price(plan.forecast)])


def _time_of_budget(plan: Plan, hours: float) -> str:
    parts = [f"{_duration(hours)}, by train.budget"]
    if plan.shortest_budget is not None and plan.shortest_budget > 3600 * hours:
        parts[0] += f", too short: {FEWEST_STEPS} steps take at least {_duration(plan.shortest_budget / 3600)}"
    if plan.forecast is None:
        return parts[0]
    tokens = plan.forecast.tokens_per_second.scaled(3600 * hours)
    parts.append(f"at most {tokens.mid:,.0f} tokens ({tokens.low:,.0f} to {tokens.high:,.0f})")
    return " · ".join([*parts, *_price(plan.forecast)])


def _price(forecast: Forecast) -> list[str]:
    """Return energy and cost, if they are known."""
    energy, cost, parts = forecast.energy_kwh, forecast.cost, []
    if energy is not None:
        parts.append(f"at most {energy.mid:,.4g} kWh")
    if cost is not None:
        parts.append(f"costs {cost.mid:,.2f} ({cost.low:,.2f} to {cost.high:,.2f})")
    return parts


def _duration(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    if hours >= 1.5:
        return f"{hours:.1f} h"
    return f"{hours * 60:.0f} min" if hours * 60 >= 2 else f"{hours * 3600:.3g} s"


def _size(count: int) -> str:
    """Return bytes in GiB, or in MiB below one GiB."""
    return format_gib(count) if count >= 2**30 or not count else f"{count / 2**20:,.1f} MiB"


def _scarcest(plan: Plan) -> str:
    """Return the name and size of the memory with the largest used fraction."""
    hardware = plan.hardware
    host = format_gib(plan.host_capacity or hardware.memory_bytes)
    if hardware.shares_memory:
        return f"memory of this machine, {host}"
    if plan.host_fraction > plan.device_fraction:
        return f"host memory, {host} on each host"
    nodes = f" on {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return f"memory of {hardware.world_size} × {hardware.name}{nodes}, {format_gib(hardware.memory_bytes)} each"
