"""Bad steps: a gradient that is NaN or infinite, or a loss that spikes. `train.on_bad_step` says what happens then.

`stop` ends the run. `skip` leaves the step out: neither the weights nor the optimizer's state change. `rewind` goes
back to the weights and state of the last checkpoint, and on with the batches after the bad step, so that the batches
since the checkpoint are not seen again: so PaLM was trained past its spikes (Chowdhery et al. 2022, arXiv:2204.02311,
section 5.1).

The device knows first whether a gradient is finite. The host reads it once the device has been given the next step's
forward and backward passes, and so waits for nothing. Only a spike must be known before the optimizer steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from artel.errors import InputError, WorkError
from artel.tokens import step_numbers
from artel.training.checkpoint.format import Progress, load_checkpoint
from artel.training.faults.async_scalar import AsyncScalar
from artel.training.metrics.jsonl import Lines
from artel.training.run import Run

# A spike is measured against the mean loss of the newest 100 good steps, once there are 20: fewer say little, and the
# first steps of a run, whose losses are the highest, are among them for long enough.
_MOST, _LEAST = 100, 20
# So many bad steps one after another are no accident of the data: the run stops, whatever `on_bad_step` says.
_IN_A_ROW = 10
_NAMED = 20  # documents named in the message; the file has all

_NOT_FINITE = "the loss or its gradient is NaN or infinite"


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that the optimizer has taken and whose verdict has not been read yet."""

    step: int
    """Counted from 1."""
    sums: torch.Tensor
    norm: torch.Tensor
    good: AsyncScalar
    loss: float | None
    """Mean over the global batch, where spikes are looked for."""
    spike: str | None
    """What is wrong with the loss, if anything is."""


class Guard:
    """Takes the optimizer's steps of a run and handles the bad ones, on all ranks alike."""

    def __init__(self, run: Run) -> None:
        self._train = run.config.train
        self._pending: _Pending | None = None

    def optimizer_step(self, run: Run, sums: torch.Tensor) -> None:
        """Clip the gradients, set the learning rate, step, and add this rank's `sums` to those of the log window.

        A bad step changes nothing, unless the run is to stop there, and is left out of the window in any case. Called
        when `rewound` has read the verdict on the step before.
        """
        loss = None if self._train.spike is None else _mean_loss(run, sums)
        spike = None if loss is None else self._spike(run, loss)
        norm, good = run.optimizer.clip_and_step(
            run.lr_multiplier(run.step),
            run.strategy.norm(),
            guarded=self._train.on_bad_step != "stop",
            spike=spike is not None,
        )
        run.window += torch.where(good, sums, torch.zeros_like(sums))
        run.norm = torch.where(good, norm, run.norm)
        self._pending = _Pending(run.step + 1, sums, norm, AsyncScalar(good), loss, spike)

    def rewound(self, run: Run) -> bool:
        """Read the verdict on the newest step and handle it if it was bad.

        Returns True when the weights went back to those of a checkpoint: gradients computed since are not theirs.
        Raises WorkError when the run is to stop.
        """
        pending, progress = self._pending, run.progress
        if pending is None:
            return False
        self._pending = None
        if not pending.good.read():
            progress.bad_in_a_row += 1
            return self._handle(run, pending)
        progress.bad_in_a_row = 0
        if pending.loss is not None and math.isfinite(pending.loss):
            progress.losses = [*progress.losses, pending.loss][-_MOST:]
        return False

    def _spike(self, run: Run, loss: float) -> str | None:
        """What is wrong with a step of that mean loss; None when nothing is."""
        if not math.isfinite(loss):
            return _NOT_FINITE if run.optimizer.loss_factor is None else None  # else the loss scale sees to it
        known, factor = run.progress.losses, self._train.spike
        mean = math.fsum(known) / max(1, len(known))
        if factor is None or len(known) < _LEAST or loss <= factor * mean:
            return None
        return f"the loss, {loss:.4g}, is above {factor:g} times {mean:.4g}, the mean of the {len(known)} before"

    def _handle(self, run: Run, bad: _Pending) -> bool:
        """Skip, rewind or stop, and tell of it. Returns True when the weights went back to those of a checkpoint."""
        what, did = bad.spike or _NOT_FINITE, self._train.on_bad_step
        if run.progress.bad_in_a_row >= _IN_A_ROW:
            what, did = f"{what}; this is the {_IN_A_ROW}th bad step in a row", "stop"
        back = _rewind(run) if did == "rewind" else None
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

    def _write(self, run: Run, bad: _Pending, what: str, did: str, documents: list[str]) -> None:
        loss = _mean_loss(run, bad.sums) if bad.loss is None else bad.loss  # all ranks sum it
        if not run.world.first:
            return
        line = {"step": bad.step, "loss": loss, "gradient_norm": float(bad.norm), "what": what, "did": did}
        lines = Lines(run.folder.bad_steps)
        lines.add(line | {"documents": documents})
        lines.close()


def _rewind(run: Run) -> Progress | None:
    """Load the newest whole checkpoint on all ranks; None where there is none."""
    run.saver.wait()  # the newest may still be being written
    run.world.barrier()
    try:
        back = load_checkpoint(run.folder.checkpoints, run.items, run.tell)
    except InputError as error:  # all are damaged: once it has started, that is no longer wrong input
        raise WorkError(error.problems) from None
    run.strategy.model.zero_grad(set_to_none=True)
    step = -1 if back is None else back.step
    if run.strategy.all_reduce_sum([float(step)]) != [float(step * run.world.size)]:
        what = f"process {run.world.rank} found step {step}, others found another"
        raise WorkError.at(str(run.folder.checkpoints), what, "the same command resumes")
    return back


def _mean_loss(run: Run, sums: torch.Tensor) -> float:
    """Over all targets of the global batch, from this process's sums of it."""
    loss, targets = run.strategy.all_reduce_sum(sums[:2].double().tolist())
    return loss / targets


def _documents(run: Run, step: int) -> list[str]:
    """Where the documents of a step, counted from 1, come from: each `file:line` once."""
    samples = run.order.at(step_numbers(step - 1, run.length.batch, run.length.total))
    return list(dict.fromkeys(name for index in samples for name in run.samples.origins(int(index))))


def _stopped(step: int, what: str, named: str) -> WorkError:
    message = f"{what}; nothing of this step was saved. Documents: {named}"
    fix = (
        "lower train.learning_rate, lengthen train.warmup, write train.on_bad_step: skip or rewind, or look at these "
        "documents; the same command resumes from the last checkpoint"
    )
    return WorkError.at(f"step {step}", message, fix)
