"""Checkpoints written while training goes on: the loop waits for a copy in host memory, a thread does the rest.

The copies are kept from one checkpoint to the next, and made while the second step runs: memory that a process has not
touched before comes slowly (0.26 GB/s on a virtual machine, where copying into touched memory went at 4.8).

A checkpoint that cannot be written (the disk is full) is taken away again and training goes on; what went wrong is said
at once, and again at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from artel.config.schema.run import CheckpointConfig
from artel.errors import ArtelError
from artel.host import memory
from artel.models.cpu.threads import compute_on_one_core
from artel.parallel import World
from artel.training.checkpoint.format import Content, Progress, checkpoint_path, write_shared, write_whole
from artel.training.checkpoint.items import CheckpointItems, Tensors
from artel.training.checkpoint.retention import commit
from artel.training.checkpoint.s3_mirror import copy_checkpoints

# Of the memory that is free when copies are first made, they may take half.
_SHARE = 0.5


class Saver:
    """Writes a run's checkpoints, one at a time; each process of the run has one and calls it alike."""

    def __init__(
        self,
        folder: Path,
        items: CheckpointItems,
        world: World,
        config: CheckpointConfig,
        run_file: str,
        *,
        sharded: bool,
        tell: Callable[[str], None],
    ) -> None:
        """`sharded`: every rank writes the shards that it has; otherwise the first rank has, and writes, all."""
        self._folder, self._items, self._world = folder, items, world
        self._config, self._run_file, self._sharded, self._tell = config, run_file, sharded, tell
        # Of its own, so that what its thread says to its peers does not mix with what the loop says.
        self._group = dist.new_group(backend="gloo") if sharded else None
        self._thread = ThreadPoolExecutor(1, "checkpoints", initializer=_begin_thread, initargs=(world.device,))
        self._pending: Future[bool] | None = None
        self._copies: dict[str, Tensors] = {}
        self._has_room: bool | None = None
        self.failures: list[str] = []
        """What is known of checkpoints that could not be written."""

    def touch_memory(self) -> None:
        """Make the memory that copies will lie in, aside; called when the optimizer has its state."""
        if self._writes and self._is_asynchronous():
            self._pending = self._thread.submit(self._make_copies, self._items.state())

    def save(self, progress: Progress, *, last: bool) -> bool:
        """Begin to write a checkpoint; with `last` end it, too. False where that was seen to fail."""
        self.wait()
        if not (self._writes or self._items.optimizer.saves_collectively):
            return True
        items = self._items.state()
        if not self._writes:
            return True
        behind = not last and self._is_asynchronous()
        if behind:
            items = self._copied(items)
        content = Content(items, deepcopy(progress), self._run_file)
        self._pending = self._thread.submit(self._write, content)
        return behind or self.wait()

    def wait(self) -> bool:
        """Until what was begun is on the disk; False where it could not be written."""
        pending, self._pending = self._pending, None
        return pending is None or pending.result()

    def close(self) -> None:
        """End the thread, when what was begun is done; what goes wrong with it now is not raised."""
        with suppress(Exception):
            self.wait()
        self._thread.shutdown()

    @property
    def _writes(self) -> bool:
        return self._sharded or self._world.first

    def _is_asynchronous(self) -> bool:
        """Whether there is room for the copies, decided once."""
        if not self._config.asynchronous or self._items.optimizer.saves_collectively:
            return False
        if self._has_room is None:
            items = self._items.state().values()
            needed = sum(_copy_bytes(_local(tensor)) for tensors in items for tensor in tensors.values())
            self._has_room = sys.platform != "linux" or needed <= _SHARE * memory().free / self._world.on_host
            if not self._has_room:
                copy = f"a copy in host memory, {needed / 1e9:.1f} GB, would take more than half of what is free"
                self._tell(f"checkpoints are written while training waits: {copy}")
        return self._has_room

    def _make_copies(self, items: dict[str, Tensors]) -> bool:
        for item, tensors in items.items():
            self._copies[item] = {name: _empty_like(tensor).zero_() for name, tensor in tensors.items()}
        return True

    def _copied(self, items: dict[str, Tensors]) -> dict[str, Tensors]:
        """The same tensors in host memory, which training does not touch."""
        copied = {}
        for item, tensors in items.items():
            copies = self._copies.setdefault(item, {})
            copied[item] = {name: _copy(tensor, name, copies) for name, tensor in tensors.items()}
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return copied

    def _write(self, content: Content) -> bool:
        """Whether it was written; a copy elsewhere that fails is said, and made with the next checkpoint."""
        step = content.progress.step
        path = checkpoint_path(self._folder, step)
        try:
            if self._sharded:
                write_shared(path, content, first=self._world.first, group=self._group)
            else:
                write_whole(path, content)
            if self._world.first:
                commit(self._folder, content.progress, self._config)
        except ArtelError as error:
            self._failed(f"the checkpoint of step {step} could not be written: {error.in_a_line}")
            return False
        if self._world.first and self._config.copy_to is not None:
            try:
                copy_checkpoints(self._folder, self._config)
            except ArtelError as error:
                self._failed(
                    f"the checkpoint of step {step} could not be copied to {self._config.copy_to}: {error.in_a_line}"
                )
        return True

    def _failed(self, message: str) -> None:
        self.failures.append(message)
        self._tell(message)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _copy(tensor: torch.Tensor, name: str, copies: Tensors) -> torch.Tensor:
    """Copy a tensor into the memory that `copies` has under its name; where none fits, it gets new memory."""
    local = _local(tensor)
    copy = copies.get(name)
    if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
        copy = copies[name] = _empty_like(tensor)
    copy.copy_(local, non_blocking=True)
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy


def _begin_thread(device: torch.device) -> None:
    """Leave the cores to training; and have the GPU that it has, since each thread has a current one of its own."""
    compute_on_one_core()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _copy_bytes(tensor: torch.Tensor) -> int:
    """What a copy takes in host memory: pinned, the next power of two (PyTorch's CachingHostAllocator)."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda and tensor.nbytes else tensor.nbytes


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory; where it comes from a GPU, pinned, so that it is copied without a stop in between."""
    local = _local(tensor)
    return torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
