"""Bad steps: a gradient that is NaN or infinite, or a loss that spikes. `train.on_bad_step` decides what happens.

`stop` ends the run. `skip` drops the step: neither weights nor optimizer state change. `rewind` restores the last
checkpoint and continues with the batches after the bad step; the batches since the checkpoint are not repeated. PaLM
was trained past its spikes this way (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1).

The device checks if the gradient is finite. The host reads the result after it has launched the next step's forward
and backward passes, so it never waits. Only a spike must be known before the optimizer steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from artel.errors import InputError, WorkError
from artel.messages import Phrase, logger, to_json
from artel.tokens import step_positions
from artel.training.checkpoint.format import Progress, load_checkpoint
from artel.training.metrics.jsonl import JsonLinesFile
from artel.training.run import Run

# A spike is measured against the mean loss of the newest 100 good steps, once there are 20: fewer are too noisy, and
# the first steps of a run have the highest losses.
_MAX_LOSSES, _MIN_LOSSES = 100, 20
# So many bad steps in a row are not due to the data: the run stops, whatever `on_bad_step` says.
_MAX_IN_A_ROW = 10
_MAX_LISTED = 20  # documents named in the message; the file has all of them

_NOT_FINITE = Phrase("the loss or its gradient is NaN or infinite")


class AsyncScalar:
    """A number on the device that the host reads later, without waiting.

    Reading a GPU tensor waits for all work that is queued on the GPU. This class copies the value as soon as it is
    computed, so one step later the copy is ready.
    """

    def __init__(self, value: torch.Tensor) -> None:
        """Start copying `value`, a scalar on any device."""
        self._value, self._copy_event = value, None
        if value.device.type == "cuda":
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copy_event = torch.cuda.Event()
            self._copy_event.record()

    def read(self) -> float:
        """Wait for the copy and return the value."""
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return float(self._value)


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step that the optimizer has taken, not yet known to be good or bad."""

    step: int
    """Number of the step, from 1."""
    sums: torch.Tensor
    norm: torch.Tensor
    is_good: AsyncScalar
    loss: float | None
    """Mean over the global batch, if `train.spike` is set."""
    spike: Phrase | None
    """Description of the spike, or None."""


class Guard:
    """Takes the optimizer's steps and handles bad ones, in the same way on all ranks."""

    def __init__(self, run: Run) -> None:
        self._train = run.config.train
        self._pending: _PendingStep | None = None

    def optimizer_step(self, run: Run, sums: torch.Tensor) -> None:
        """Clip the gradients, set the learning rate, take a step, and add this rank's `sums` to the log window.

        A bad step leaves the weights unchanged, except with `on_bad_step: stop`, and never counts in the window. Call
        `check_newest_step` for the previous step first.
        """
        loss = None if self._train.spike is None else _compute_mean_loss(run, sums)
        spike = None if loss is None else self._find_spike(run, loss)
        norm, is_good = run.optimizer.clip_and_step(
            run.lr_multiplier(run.step),
            run.strategy.gradient_norm(),
            guarded=self._train.on_bad_step != "stop",
            spike=spike is not None,
        )
        run.window += torch.where(is_good, sums, torch.zeros_like(sums))
        run.norm = torch.where(is_good, norm, run.norm)
        self._pending = _PendingStep(run.step + 1, sums, norm, AsyncScalar(is_good), loss, spike)

    def check_newest_step(self, run: Run) -> bool:
        """Handle the newest step if it was bad. Return True if a checkpoint was restored.

        Gradients computed since that step are then invalid. Raise WorkError if the run must stop.
        """
        pending, progress = self._pending, run.progress
        if pending is None:
            return False
        self._pending = None
        if not pending.is_good.read():
            progress.bad_in_a_row += 1
            return self._handle(run, pending)
        progress.bad_in_a_row = 0
        if pending.loss is not None and math.isfinite(pending.loss):
            progress.losses = [*progress.losses, pending.loss][-_MAX_LOSSES:]
        return False

    def _find_spike(self, run: Run, loss: float) -> Phrase | None:
        """Return a description of the spike if a step's mean loss is one, or None."""
        if not math.isfinite(loss):
            return _NOT_FINITE if run.optimizer.loss_factor is None else None  # the loss scale handles it, if any
        losses, factor = run.progress.losses, self._train.spike
        mean = math.fsum(losses) / max(1, len(losses))
        if factor is None or len(losses) < _MIN_LOSSES or loss <= factor * mean:
            return None
        template = "the loss, {loss:.4g}, is above {factor:g} times {mean:.4g}, the mean of the {count} before"
        return Phrase(template, loss=loss, factor=factor, mean=mean, count=len(losses))

    def _handle(self, run: Run, bad: _PendingStep) -> bool:
        """Skip, rewind or stop, and log it. Return True if a checkpoint was restored."""
        reason, action = bad.spike or _NOT_FINITE, self._train.on_bad_step
        if run.progress.bad_in_a_row >= _MAX_IN_A_ROW:
            reason = Phrase("{what}; this is the {count}th bad step in a row", what=reason, count=_MAX_IN_A_ROW)
            action = "stop"
        restored = _rewind(run) if action == "rewind" else None
        if action == "rewind" and restored is None:
            action = "skip"
        if action == "skip" and bad.spike is None and run.optimizer.loss_factor is not None:
            reason, action = Phrase("{what}, however small the loss is scaled", what=reason), "stop"
        documents = _document_origins(run, bad.step)
        self._record(run, bad, reason, action, documents)
        listed = "; ".join(documents[:_MAX_LISTED])
        listed += f"; and {len(documents) - _MAX_LISTED} more" if len(documents) > _MAX_LISTED else ""
        if action == "stop":
            message = f"{reason}; nothing of this step was saved. Documents: {listed}"
            fix = (
                "lower train.learning_rate, lengthen train.warmup, write train.on_bad_step: skip or rewind, or look at "
                "these documents; the same command resumes from the last checkpoint"
            )
            raise WorkError.at(f"step {bad.step}", message, fix)
        outcome = "the step is skipped"
        if restored is not None:
            run.progress.losses = restored.losses
            outcome = f"continuing with the next step, from the weights of step {restored.step}"
        elif self._train.on_bad_step == "rewind":
            outcome = "the step is skipped, since there is no checkpoint to return to yet"
        logger.info("step %s: %s; %s. Documents: %s", bad.step, reason, outcome, listed)
        return restored is not None

    def _record(self, run: Run, bad: _PendingStep, reason: str, action: str, documents: list[str]) -> None:
        loss = _compute_mean_loss(run, bad.sums) if bad.loss is None else bad.loss  # collective
        if not run.world.first:
            return
        line = {"step": bad.step, "loss": loss, "gradient_norm": float(bad.norm), "what": to_json(reason)}
        lines = JsonLinesFile(run.folder.bad_steps)
        lines.add(line | {"did": action, "documents": documents})
        lines.close()


def _rewind(run: Run) -> Progress | None:
    """Load the newest undamaged checkpoint on all ranks. Return its progress, or None if there is none."""
    run.saver.wait()  # the newest checkpoint may still be in progress
    run.world.barrier()
    try:
        restored = load_checkpoint(run.folder.checkpoints, run.items)
    except InputError as error:  # all are damaged; during a run this is no fault of the user's input
        raise WorkError(error.problems) from None
    run.strategy.model.zero_grad(set_to_none=True)
    step = -1 if restored is None else restored.step
    if run.strategy.all_reduce_sum([float(step)]) != [float(step * run.world.size)]:
        message = f"process {run.world.rank} found step {step}, others found another"
        raise WorkError.at(str(run.folder.checkpoints), message, "the same command resumes")
    return restored


def _compute_mean_loss(run: Run, sums: torch.Tensor) -> float:
    """Return the mean loss of the global batch, from this process's sums. Collective."""
    loss, targets = run.strategy.all_reduce_sum(sums[:2].double().tolist())
    return loss / (targets or 1.0)


def _document_origins(run: Run, step: int) -> list[str]:
    """Return the origin `file:line` of each document in a step, counted from 1."""
    samples = run.order.at(step_positions(step - 1, run.length.batch, run.length.total_samples))
    return list(dict.fromkeys(name for index in samples for name in run.samples.origins(int(index))))
