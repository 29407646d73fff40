"""A plan as people read it."""

from __future__ import annotations

from artel.planning.machine import in_gib
from artel.planning.plan.plan import Plan


def describe(plan: Plan) -> str:
    """The verdict first, then what it comes from."""
    rank, parameters = plan.fullest, plan.parameters
    active = f", {parameters['active']:,} for a token" if parameters["active"] < parameters["total"] else ""
    lines = [
        f"{plan.verdict}: {plan.share:.0%} of the {_scarcest(plan)}",
        "",
        f"parameters       {parameters['total']:,}{active}, {parameters['trained']:,} trained",
        f"processes        {plan.processes:,} · {plan.precision}, micro-batches of {plan.micro_batch}, "
        f"recomputed: {plan.recompute}",
        f"data             {plan.data_note}",
        f"memory of {'the fullest rank' if len(plan.ranks) > 1 else 'each rank'}, at its fullest moment",
    ]
    lines += [f"  {kind.replace('_', ' '):<27}{size / 2**30:>8.2f} GiB" for kind, size in rank.kinds.items() if size]
    lines += [
        f"  {'allocated':<27}{rank.allocated / 2**30:>8.2f} GiB",
        f"  {'reserved':<27}{rank.reserved / 2**30:>8.2f} GiB",
        f"speed            {_speed(plan)}",
        f"host memory      {in_gib(plan.host_bytes)}",
        "disk             " + ", ".join(f"{name} {in_gib(size)}" for name, size in plan.disk.items()),
    ]
    return "\n".join(lines)


def _speed(plan: Plan) -> str:
    if plan.step is None and plan.hardware.shares_memory:
        return "unknown: measure this machine once, artel bench hardware"
    if plan.step is None:
        return "unknown: transfers of parallel.offload are not planned"
    tokens = plan.step.tokens_per_second(plan.tokens)
    return f"{tokens.mid:,.0f} tokens/s ({tokens.low:,.0f} to {tokens.high:,.0f}), by {plan.step.source}"


def _scarcest(plan: Plan) -> str:
    """The memory of which the largest part is used, and how large it is."""
    hardware = plan.hardware
    host = in_gib(plan.host_room or hardware.memory_bytes)
    if hardware.shares_memory:
        return f"memory of this machine, {host}"
    if plan.host_share > plan.device_share:
        return f"host memory, {host} on each host"
    nodes = f" on {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return f"memory of {hardware.world_size} × {hardware.name}{nodes}, {in_gib(hardware.memory_bytes)} each"
