"""Bad steps, whose gradient is NaN or infinite or whose loss is a spike: found, told, and then `train.on_bad_step`.

`stop` ends the run. `skip` leaves the step out: neither weights nor the optimizer's state change. `rewind` goes back to
those of the last checkpoint, and on with the batches after the bad step, so that what was seen since the checkpoint is
not seen again: so PaLM was trained past its spikes (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1).

Whether a gradient is finite is known to the device first. The host asks for it when the device has been given the next
step's forward and backward passes, and so waits for nothing. Only a spike must be known before the optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from artel.config import TrainConfig
from artel.errors import InputError, WorkError
from artel.training.checkpoint.format import Progress, load_checkpoint
from artel.training.faults.async_scalar import AsyncScalar
from artel.training.metrics.jsonl import Lines, drop_lines_after

if TYPE_CHECKING:
    from artel.training.loop import Run

# A spike is measured by the mean of the newest 100 good steps, once there are 20: fewer say little, and the first steps
# of a run, whose losses are the highest, are among them for long enough.
_MOST, _LEAST = 100, 20
# So many bad steps one after another are no accident of the data: the run stops, whatever is wanted of one.
_IN_A_ROW = 10
_NAMED = 20  # documents, in what is told; the file has all

_NOT_FINITE = "the loss or its gradient is NaN or infinite"


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest step, until it is known to be good or has been dealt with."""

    step: int
    """Counted from 1."""
    sums: torch.Tensor
    norm: torch.Tensor
    good: AsyncScalar
    loss: float | None
    """Mean over the global batch, where spikes are looked for."""
    spike: str | None
    """What is wrong with it."""


class Guard:
    """Has the optimizer take the steps of a run, and sees to the bad ones; on all processes alike."""

    def __init__(self, train: TrainConfig, file: Path, step: int, *, first: bool) -> None:
        """`file` gets a line for each bad step, from the first process; those after `step`, now done again, go."""
        self._train, self._file, self._first = train, file, first
        self._newest: _Newest | None = None
        if first and file.exists():
            drop_lines_after(file, step)

    def step(self, run: Run, sums: torch.Tensor, share: float) -> None:
        """The optimizer's step at `share` of the peak learning rate, and the step's `sums` to those of the window.

        Unless the run is to stop there, a bad step changes nothing; it is left out of the window in any case. Called
        when `settle` has seen to the step before.
        """
        loss = None if self._train.spike is None else _mean_loss(run, sums)
        spike = None if loss is None else self._spike(run, loss)
        norm, good = run.optimizer.clip_and_step(
            share, run.strategy.norm(), guarded=self._train.on_bad_step != "stop", spike=spike is not None
        )
        run.window += torch.where(good, sums, torch.zeros_like(sums))
        run.norm = torch.where(good, norm, run.norm)
        self._newest = _Newest(run.step + 1, sums, norm, AsyncScalar(good), loss, spike)

    def settled(self, run: Run, gradients: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `gradients` gives for the next step, with the newest one seen to while the device is at it.

        It is asked twice where the weights went back meanwhile: the first gradients are not theirs.
        """
        sums = gradients()
        return gradients() if self.settle(run) else sums

    def settle(self, run: Run) -> bool:
        """See to the newest step, if it was bad. Whether the weights went back to those of a checkpoint.

        Raises WorkError where the run is to stop.
        """
        newest, progress = self._newest, run.progress
        if newest is None:
            return False
        self._newest = None
        if not newest.good.read():
            progress.bad_in_a_row += 1
            return self._deal_with(run, newest)
        progress.bad_in_a_row = 0
        if newest.loss is not None and math.isfinite(newest.loss):
            progress.losses = [*progress.losses, newest.loss][-_MOST:]
        return False

    def _spike(self, run: Run, loss: float) -> str | None:
        """What is wrong with a step of that mean loss, if anything is."""
        if not math.isfinite(loss):
            return _NOT_FINITE if run.optimizer.loss_factor is None else None  # else the loss scale sees to it
        known, factor = run.progress.losses, self._train.spike
        mean = math.fsum(known) / max(1, len(known))
        if factor is None or len(known) < _LEAST or loss <= factor * mean:
            return None
        return f"the loss, {loss:.4g}, is above {factor:g} times {mean:.4g}, the mean of the {len(known)} before"

    def _deal_with(self, run: Run, bad: _Newest) -> bool:
        what, did = bad.spike or _NOT_FINITE, self._train.on_bad_step
        if run.progress.bad_in_a_row >= _IN_A_ROW:
            what, did = f"{what}; this is the {_IN_A_ROW}th bad step in a row", "stop"
        back = _go_back(run) if did == "rewind" else None
        if did == "rewind" and back is None:
            did = "skip"
        if did == "skip" and bad.spike is None and run.optimizer.loss_factor is not None:
            what, did = f"{what}, however small the loss is scaled", "stop"
        documents = _documents(run, bad.step)
        self._write(run, bad, what, did, documents)
        named = "; ".join(documents[:_NAMED])
        named += f"; and {len(documents) - _NAMED} more" if len(documents) > _NAMED else ""
        if did == "stop":
            raise _stopped(bad.step, what, named)
        then = "it is left out"
        if back is not None:
            run.progress.losses = back.losses
            then = f"on with the next one, from the weights of step {back.step}"
        elif self._train.on_bad_step == "rewind":
            then = "it is left out, since there is no checkpoint yet to go back to"
        run.tell(f"step {bad.step}: {what}; {then}. Documents: {named}")
        return back is not None

    def _write(self, run: Run, bad: _Newest, what: str, did: str, documents: list[str]) -> None:
        loss = _mean_loss(run, bad.sums) if bad.loss is None else bad.loss  # all processes add it up
        if not self._first:
            return
        lines = Lines(self._file)
        lines.add({"step": bad.step, "loss": loss, "gradient_norm": float(bad.norm), "what": what, "did": did,
                   "documents": documents})  # fmt: skip
        lines.close()


def _go_back(run: Run) -> Progress | None:
    """Put weights and state of the newest whole checkpoint in place, on all processes; None where there is none."""
    run.saver.wait()  # the newest may still be being written
    run.world.barrier()
    try:
        back = load_checkpoint(run.folder.checkpoints, run.optimizer, run.tell)
    except InputError as error:  # all are damaged: once it has started, that is no longer wrong input
        raise WorkError(error.problems) from None
    run.strategy.model.zero_grad(set_to_none=True)
    step = -1 if back is None else back.step
    if run.strategy.all_reduce_sum([float(step)]) != [float(step * run.world.size)]:
        what = f"process {run.world.rank} found step {step}, others found another"
        raise WorkError.at(str(run.folder.checkpoints), what, "the same command goes on")
    return back


def _mean_loss(run: Run, sums: torch.Tensor) -> float:
    """Over all targets of the global batch, from this process's sums of it."""
    loss, targets = run.strategy.all_reduce_sum(sums[:2].double().tolist())
    return loss / targets


def _documents(run: Run, step: int) -> list[str]:
    """Where the documents of a step, counted from 1, come from: each `file:line` once."""
    samples = run.order.at(run.numbers(step - 1))
    return list(dict.fromkeys(name for index in samples for name in run.samples.origins(int(index))))


def _stopped(step: int, what: str, named: str) -> WorkError:
    told = f"{what}; nothing of this step was saved. Documents: {named}"
    fix = (
        "lower train.learning_rate, lengthen train.warmup, write train.on_bad_step: skip or rewind, or look at these "
        "documents; the same command goes on from the last checkpoint"
    )
    return WorkError.at(f"step {step}", told, fix)
