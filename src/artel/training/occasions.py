"""What happens once in a while: small objects with one method, called after every step, each deciding for itself.

The order in which the loop calls them matters: figures are logged before a validation is, and both before a save.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
import orjson

from artel.errors import Interrupted, Problem, WorkError
from artel.models import Sampling, position_limit, write
from artel.objectives import Batch
from artel.tokens import Blocks, micro_batches
from artel.training.checkpoint import save_checkpoint

if TYPE_CHECKING:
    from artel.training.loop import Run


class Occasion(Protocol):
    def __call__(self, run: Run) -> None: ...


class Watch:
    """Stops the run at the step that gave NaN or infinity; on a GPU one step late, so as not to wait for the device."""

    def __call__(self, run: Run) -> None:
        run.check_finite(run.step if run.processes.device.type == "cpu" else run.step - 1)


class Log:
    """A line of figures every `log.every` steps and at the end: means over the steps since the line before."""

    def __call__(self, run: Run) -> None:
        if not (run.step % run.config.log.every == 0 or run.is_last):
            return
        run.check_finite(run.step)
        sums = run.layout.add_up(run.window.double().tolist())
        totals = dict(zip(run.objective.sums, sums, strict=True))
        run.window.zero_()
        seconds, run.window_seconds = run.window_seconds, 0.0
        run.progress.train_loss = totals["loss"] / totals["targets"]
        run.trackers.training(
            {
                "step": run.step,
                "epoch": round(run.length.epoch(run.step), 6),
                "loss": run.progress.train_loss,
                "gradient_norm": float(run.norm),
                "learning_rate": run.learning_rate,
                "tokens": run.progress.tokens,
                "tokens_per_second": totals["targets"] / seconds,
            }
        )


class Validate:
    """The objective's figures on the validation part, at `validate.every` and at the end."""

    def __init__(self, validation: Blocks) -> None:
        self._blocks = validation
        self._clock = Clock()

    def __call__(self, run: Run) -> None:
        wanted = run.config.validate_
        count = min(len(self._blocks), wanted.blocks or len(self._blocks))
        if count == 0 or not (run.is_due(wanted.every, self._clock) or run.is_last):
            return
        run.check_finite(run.step)
        totals = run.layout.judge(self._batches(run, count))
        part = self._blocks.part
        figures = run.objective.figures(totals, part.tokens / part.bytes)
        run.progress.validation = figures
        run.newest_validation = run.step
        run.trackers.validation(
            {"step": run.step, "epoch": round(run.length.epoch(run.step), 6), "validation": figures}
        )

    def _batches(self, run: Run, count: int) -> Iterator[Batch]:
        mine = np.arange(run.processes.rank, count, run.processes.world)
        for start in range(0, len(mine), run.micro_batch):
            part = mine[start : start + run.micro_batch]
            # Always of full shape, filled up where the last is short: another shape would be compiled anew.
            size = run.micro_batch
            yield run.objective.batch(micro_batches(self._blocks, part, rank=0, world=1, batch=size, size=size)[0])


class ShowSamples:
    """What the model writes after `validate.prompts`, kept in samples.jsonl; only the first process writes."""

    def __call__(self, run: Run) -> None:
        if run.newest_validation != run.step or not run.processes.first:
            return
        window = position_limit(run.layout.model)
        for prompt in run.config.validate_.prompts:
            sampling = Sampling(new_tokens=run.config.validate_.new_tokens, seed=run.config.seed)
            text = "".join(write(run.layout.model, run.tokenizer, prompt, sampling, window))
            run.tell(f"step {run.step}: {prompt}{text}")
            with run.folder.samples.open("ab") as file:
                file.write(orjson.dumps({"step": run.step, "prompt": prompt, "text": text}) + b"\n")


class Save:
    """A checkpoint at `checkpoint.every`, at the end, and when a stop was asked for; `best` after each validation."""

    def __init__(self) -> None:
        self._clock = Clock()

    def __call__(self, run: Run) -> None:
        wanted = run.config.checkpoint
        better = self._is_better(run)
        if better:
            assert wanted.best is not None
            run.progress.best, run.progress.best_step = run.progress.validation[wanted.best], run.step
        if not (better or run.stop_asked or run.is_last or run.is_due(wanted.every, self._clock)):
            return
        run.check_finite(run.step)
        if run.processes.first:
            progress = run.progress_now()
            save_checkpoint(
                run.folder.checkpoints, run.layout.model, run.optimizer, progress, keep=wanted.keep, is_best=better
            )
        run.processes.barrier()

    @staticmethod
    def _is_better(run: Run) -> bool:
        name = run.config.checkpoint.best
        if name is None or run.newest_validation != run.step:
            return False
        value, best = run.progress.validation[name], run.progress.best
        return best is None or (value > best if name == "accuracy" else value < best)


class StopOnSignal:
    """SIGTERM and Ctrl-C end the run after this step, saved; a second Ctrl-C ends it at once."""

    # One Ctrl-C can arrive twice: from the terminal, and passed on by a launcher. Two within a second are one.
    _SAME = 1.0

    def __init__(self) -> None:
        self.asked = False
        self._when = 0.0
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}

    def _on_signal(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.asked and number == signal.SIGINT and now - self._when > self._SAME:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        if not self.asked:
            self._when = now
        self.asked = True

    def __call__(self, run: Run) -> None:
        if run.stop_asked and not run.is_last:
            raise Interrupted(
                [
                    Problem(
                        "", f"stopped and saved after step {run.step} of {run.length.steps}", "the same command goes on"
                    )
                ]
            )

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Clock:
    """When an occasion that goes by time last came due, on the clock that all processes share."""

    def __init__(self) -> None:
        self._last = 0.0

    def is_due(self, every: float, now: float) -> bool:
        due = now - self._last >= every
        if due:
            self._last = now
        return due


def not_finite(step: int, origins: list[str]) -> WorkError:
    """The error of a step whose loss or gradient is NaN or infinite."""
    named = "; ".join(origins[:20]) + (f"; and {len(origins) - 20} more" if len(origins) > 20 else "")
    return WorkError(
        [
            Problem(
                f"step {step}",
                f"the loss or its gradient is NaN or infinite; nothing of this step was saved. Documents: {named}",
                "lower train.learning_rate, lengthen train.warmup, or look at these documents; "
                "the same command goes on from the last checkpoint",
            )
        ]
    )
