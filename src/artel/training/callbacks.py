"""What happens once in a while: small objects with one method, called after every step, each deciding for itself.

The order in which the loop calls them matters: figures are logged before a validation is, and both before a save.
"""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from artel.config.schema.quantities import Interval
from artel.errors import Interrupted, Problem, WorkError
from artel.models.flops import tokens_a_second, utilization
from artel.models.generate import Sampling
from artel.training.metrics.jsonl import Lines

if TYPE_CHECKING:
    from artel.training.loop import Run


class Callback(Protocol):
    def __call__(self, run: Run) -> None: ...


class Log:
    """A line of figures every `log.every` steps and at the end: means over the good steps since the line before."""

    def __call__(self, run: Run) -> None:
        run.trackers.step(run.step)
        if not (run.step % run.config.log.every == 0 or run.is_over):
            return
        run.guard.settle(run)
        sums = run.strategy.all_reduce_sum(run.window.double().tolist())
        totals = dict(zip(run.objective.sums, sums, strict=True))
        if not totals["targets"]:  # bad steps alone: bad_steps.jsonl has them
            return
        run.check_folder()
        run.window.zero_()
        seconds, run.window_seconds = run.window_seconds, 0.0
        tokens, run.window_tokens = run.window_tokens, 0
        run.progress.train_loss = totals["loss"] / totals["targets"]
        speed = tokens_a_second(tokens, seconds)
        used = utilization(run.flops, speed, run.peak, run.world.size)
        balance = totals.get("balance", 0.0) / totals["targets"]
        run.trackers.training(
            {
                "step": run.step,
                "epoch": round(run.length.epoch(run.step), 6),
                "loss": run.progress.train_loss,
                **({"balance": balance} if balance else {}),  # of a mixture of experts
                "gradient_norm": float(run.norm),
                "learning_rate": run.learning_rate,
                "tokens": run.progress.tokens,
                "tokens_per_second": speed,
                **({"mfu": used} if used is not None else {}),
            }
        )


class Validate:
    """The objective's figures on the validation part, at `validate.every` and at the end; do they still improve?"""

    def __init__(self) -> None:
        self._clock = Clock()

    def __call__(self, run: Run) -> None:
        wanted = run.config.validate_
        if len(run.validation.samples) == 0:
            return
        is_due = run.is_due(wanted.every, self._clock)
        if not (is_due or run.is_over):
            return
        run.guard.settle(run)
        run.trackers.busy("evaluating", 0.0)
        progress = partial(run.trackers.busy, "evaluating")
        figures, _ = run.validation.judge(run.strategy, run.micro_batch, wanted.blocks, progress)
        run.progress.validation = figures
        run.newest_validation = run.step
        run.check_folder()
        self._compare(run, figures, is_due)
        run.trackers.validation(
            {"step": run.step, "epoch": round(run.length.epoch(run.step), 6), "validation": figures}
        )

    def _compare(self, run: Run, figures: dict[str, float], is_due: bool) -> None:
        """One at the end alone does not count toward `patience`: a run made longer later would not have had it."""
        name, progress = run.config.checkpoint.best, run.progress
        if name is None or name not in figures:
            return
        higher = run.objective.better[name] == "higher"
        if progress.best is None or (figures[name] > progress.best if higher else figures[name] < progress.best):
            progress.best, progress.best_step, progress.best_validation = figures[name], run.step, figures
            progress.validations_since_best = 0
            return
        progress.validations_since_best += is_due
        patience = run.config.validate_.patience
        if patience is not None and progress.validations_since_best >= patience and run.step < run.length.steps:
            progress.stopped_early = True
            run.tell(f"step {run.step}: {name} has not improved since step {progress.best_step}; stopping")


class ShowSamples:
    """What the model makes of `validate.prompts`, kept in samples.jsonl; only the first process writes."""

    def __call__(self, run: Run) -> None:
        if run.newest_validation != run.step:
            return
        with run.strategy.generating() as takes_part:
            for prompt in run.config.validate_.prompts if takes_part else ():
                self._show(run, prompt)

    def _show(self, run: Run, prompt: str) -> None:
        sampling = Sampling(new_tokens=run.config.validate_.new_tokens, seed=run.config.seed)
        text = "".join(run.objective.show(run.strategy.model, prompt, sampling))
        run.tell(f"step {run.step}: {prompt} → {text}")
        if run.world.first:
            lines = Lines(run.folder.samples)
            lines.add({"step": run.step, "prompt": prompt, "text": text})
            lines.close()


class Save:
    """A checkpoint at `checkpoint.every`, at the end, and when a stop was asked for; `best` after each validation."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._started = False

    def __call__(self, run: Run) -> None:
        wanted = run.config.checkpoint
        better = run.newest_validation == run.step == run.progress.best_step
        if not self._started and wanted.every != Interval():  # not never
            run.saver.touch_memory()
        self._started = True
        if not (better or run.stop_asked or run.is_over or run.is_due(wanted.every, self._clock)):
            return
        run.guard.settle(run)
        run.check_folder()
        last = run.stop_asked or run.is_over
        if last:
            run.trackers.busy("writing the checkpoint")
        saved = run.saver.save(run.progress_now(), last=last)
        if last and run.strategy.all_reduce_sum([float(not saved)])[0]:
            lines = run.saver.failures or ["the checkpoint could not be written"]
            raise WorkError([Problem(f"step {run.step}", line) for line in lines])


class StopOnSignal:
    """SIGTERM, Ctrl-C and Slurm's warning SIGUSR1 end the run after this step, saved; a second Ctrl-C at once."""

    # One Ctrl-C can arrive twice: from the terminal, and passed on by a launcher. Two within a second are one.
    _SAME = 1.0

    def __init__(self) -> None:
        self.asked = False
        self._when = 0.0
        heard = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._on_signal) for number in heard}

    def _on_signal(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.asked and number == signal.SIGINT and now - self._when > self._SAME:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        if not self.asked:
            self._when = now
        self.asked = True

    def __call__(self, run: Run) -> None:
        if run.stop_asked and not run.is_over:
            raise Interrupted.at(
                "", f"stopped and saved after step {run.step} of {run.length.steps}", "the same command goes on"
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
