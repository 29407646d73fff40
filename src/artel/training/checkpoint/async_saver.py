"""Writes checkpoints while training continues: the loop waits for a copy in host memory, and a thread does the rest.

The buffers are reused from one checkpoint to the next, and allocated while the second step runs: memory that a process
has not touched before comes slowly (0.26 GB/s, on a virtual machine that copied into touched memory at 4.8 GB/s).

If a checkpoint cannot be written (a full disk), its files are removed and training continues. The failure is reported
at once, and again at the end.
"""

from __future__ import annotations

import sys
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
from artel.messages import logger
from artel.models.device import compute_on_one_core
from artel.parallel import World
from artel.training.checkpoint.format import CheckpointContent, Progress, checkpoint_path, write_full, write_sharded
from artel.training.checkpoint.items import CheckpointItem, Tensors, collect_states
from artel.training.checkpoint.retention import commit
from artel.training.checkpoint.s3_mirror import copy_checkpoints

_MEMORY_FRACTION = 0.5  # fraction of the free memory that the buffers may take when they are allocated


class Saver:
    """Writes a run's checkpoints, one at a time. Every process of the run has a Saver and makes the same calls."""

    def __init__(
        self,
        folder: Path,
        items: list[CheckpointItem],
        world: World,
        config: CheckpointConfig,
        run_file: str,
        *,
        sharded: bool,
        gathers: bool,
    ) -> None:
        """`sharded`: every rank writes its own shards. Otherwise the first rank writes everything.

        `gathers`: the first rank gathers the tensors of all ranks, and training waits for the checkpoint.
        """
        self._folder, self._items, self._world = folder, items, world
        self._config, self._run_file, self._sharded, self._gathers = config, run_file, sharded, gathers
        # A separate group, so that the thread's collectives do not mix with the loop's.
        self._group = dist.new_group(backend="gloo") if sharded else None
        self._thread = ThreadPoolExecutor(1, "checkpoints", initializer=_init_thread, initargs=(world.device,))
        self._pending: Future[bool] | None = None
        self._buffers: dict[str, Tensors] = {}
        self._has_memory: bool | None = None
        self.failures: list[str] = []
        """A message for each checkpoint that could not be written or copied."""

    def touch_memory(self) -> None:
        """Allocate the buffers in the thread. Call it once the optimizer has its state."""
        if self._is_writer and self._is_asynchronous():
            self._pending = self._thread.submit(self._allocate, collect_states(self._items))

    def save(self, progress: Progress, *, is_last: bool) -> bool:
        """Start writing a checkpoint, and finish it if `is_last`. Return False if it is known to have failed."""
        self.wait()
        if not (self._is_writer or self._gathers):
            return True
        files = collect_states(self._items)
        if not self._is_writer:
            return True
        in_background = not is_last and self._is_asynchronous()
        if in_background:
            files = self._copy(files)
        content = CheckpointContent(files, deepcopy(progress), self._run_file)
        self._pending = self._thread.submit(self._write_checkpoint, content)
        return in_background or self.wait()

    def wait(self) -> bool:
        """Wait until the pending checkpoint is on the disk. Return False if it could not be written."""
        pending, self._pending = self._pending, None
        return pending is None or pending.result()

    def close(self) -> None:
        """Finish the pending checkpoint and end the thread, without raising errors."""
        with suppress(Exception):
            self.wait()
        self._thread.shutdown()

    @property
    def _is_writer(self) -> bool:
        return self._sharded or self._world.first

    def _is_asynchronous(self) -> bool:
        """True if there is memory for the buffers. Decided once."""
        if not self._config.asynchronous or self._gathers:
            return False
        if self._has_memory is None:
            files = collect_states(self._items).values()
            needed = sum(_buffer_bytes(_local_shard(tensor)) for tensors in files for tensor in tensors.values())
            limit = _MEMORY_FRACTION * memory().free / self._world.on_host
            self._has_memory = sys.platform != "linux" or needed <= limit
            if not self._has_memory:
                copy = f"a copy in host memory, {needed / 1e9:.1f} GB, would take more than half of the free memory"
                logger.info("checkpoints are written while training waits: %s", copy)
        return self._has_memory

    def _allocate(self, files: dict[str, Tensors]) -> bool:
        for file, tensors in files.items():
            self._buffers[file] = {name: _empty_like(tensor).zero_() for name, tensor in tensors.items()}
        return True

    def _copy(self, files: dict[str, Tensors]) -> dict[str, Tensors]:
        """Return copies in host memory that training does not change."""
        copied = {}
        for file, tensors in files.items():
            buffers = self._buffers.setdefault(file, {})
            copied[file] = {name: _copy_into(buffers, name, tensor) for name, tensor in tensors.items()}
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return copied

    def _write_checkpoint(self, content: CheckpointContent) -> bool:
        """Return True if the checkpoint was written. If uploading fails, the next upload includes this checkpoint."""
        step = content.progress.step
        path = checkpoint_path(self._folder, step)
        try:
            if self._sharded:
                write_sharded(path, content, is_first=self._world.first, group=self._group)
            else:
                write_full(path, content)
            if self._world.first:
                commit(self._folder, content.progress, self._config)
        except ArtelError as error:
            self._report_failure(f"the checkpoint of step {step} could not be written: {error.one_line}")
            return False
        if self._world.first and self._config.copy_to is not None:
            try:
                copy_checkpoints(self._folder, self._config)
            except ArtelError as error:
                self._report_failure(
                    f"the checkpoint of step {step} could not be copied to {self._config.copy_to}: {error.one_line}"
                )
        return True

    def _report_failure(self, message: str) -> None:
        self.failures.append(message)
        logger.info(message)


def _local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _copy_into(buffers: Tensors, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into its buffer. Allocate a new buffer if shape or dtype differ."""
    local = _local_shard(tensor)
    copy = buffers.get(name)
    if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
        copy = buffers[name] = _empty_like(tensor)
    copy.copy_(local, non_blocking=True)
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy


def _init_thread(device: torch.device) -> None:
    """Leave the cores to training, and select the GPU: each thread has its own current GPU."""
    compute_on_one_core()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _buffer_bytes(tensor: torch.Tensor) -> int:
    """Return the host memory of a buffer. Pinned memory is rounded up to a power of two (CachingHostAllocator)."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda and tensor.nbytes else tensor.nbytes


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate host memory, pinned if the tensor is on a GPU, so that it is copied asynchronously."""
    local = _local_shard(tensor)
    return torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
