"""Traffic of a step whose weights and optimizer state are in host memory or on disks (`parallel.offload`, DeepSpeed).

Bytes are those of one process. `artel.planning.performance` has their rates.
"""

from __future__ import annotations

from collections.abc import Mapping

from artel.planning.operations import (
    DISK,
    HOST,
    PAGEABLE,
    PINNED,
    TO_DEVICE,
    TO_HOST,
    TRANSFER,
    WAITED,
    Operation,
)

_ADDITION_BYTES = 12
"""Read two float32 numbers, write one."""


def transfer(direction: str, num_bytes: float, *, pinned: bool = True) -> Operation:
    """Return a copy between host and device. `direction`: TO_DEVICE, TO_HOST or WAITED."""
    return Operation(TRANSFER, direction, PINNED if pinned else PAGEABLE, bytes=round(num_bytes))


def host_step(
    operations: Mapping[Operation, int], factor: float = 1.0, more_bytes: float = 0.0
) -> dict[Operation, int]:
    """Return the optimizer's step on the host: `factor` times the bytes of its operators."""
    num_bytes = factor * sum(operation.bytes * count for operation, count in operations.items())
    return {Operation(HOST, "optimizer", bytes=round(num_bytes + more_bytes)): 1}


def disk(access: str, num_bytes: float) -> Operation:
    """Return access to local disks. `access`: READ_AHEAD or WAITED."""
    return Operation(DISK, access, bytes=round(num_bytes))


def fsdp_traffic(
    weight_bytes: int, gradient_bytes: int, gathers: int, micro_batches: int, *, pinned: bool
) -> dict[Operation, int]:
    """Return the traffic of fully_shard's CPUOffloadPolicy, with float32 shards.

    Every gather copies the weights' shards to the device. The first gradients are copied to pinned memory beside the
    backward pass; the backward pass waits for later ones, which the host adds, and for all of them if memory is not
    pinned (torch 2.13, `foreach_reduce`).
    """
    beside = 1 if pinned else 0
    traffic = {
        transfer(TO_DEVICE, gathers * weight_bytes, pinned=pinned): 1,
        transfer(TO_HOST, beside * gradient_bytes): 1,
        transfer(WAITED, (micro_batches - beside) * gradient_bytes, pinned=pinned): 1,
        Operation(HOST, "sum", bytes=(micro_batches - 1) * gradient_bytes // 4 * _ADDITION_BYTES): 1,
    }
    return {operation: count for operation, count in traffic.items() if operation.bytes}
