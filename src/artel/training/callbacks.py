"""Callbacks: small objects that the loop calls after every step. Each decides for itself whether it is due.

The host learns late if a step was good, so callbacks that depend on it ask the guard first. A user's callback runs
before them: with `train.on_bad_step: stop` it may see the weights of a bad step, after which the run ends.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, Protocol

import orjson

from artel.config.schema.quantities import Interval
from artel.errors import Interrupted, Problem, WorkError
from artel.interrupts import SAME_SIGNAL_SECONDS, answer_interrupts_with, in_main_thread
from artel.messages import logger
from artel.models.flops import token_rate, utilization
from artel.storage import write_file
from artel.training.evaluation import Validation
from artel.training.faults.bad_steps import Guard
from artel.training.memory import memory_in_use
from artel.training.metrics.jsonl import JsonLinesFile
from artel.training.run import IntervalClock, Run
from artel.training.task_harness import best_is_task, run_tasks, task_directions, task_metrics


class Callback(Protocol):
    def __call__(self, run: Run) -> None: ...


class Log:
    """Logs metrics every `log.every` steps and at the end: means over the good steps since the last line."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __call__(self, run: Run) -> None:
        run.trackers.on_step(run.step)
        if not (run.step % run.config.log.every == 0 or run.finished):
            return
        self._guard.check_newest_step(run)
        sums = run.strategy.all_reduce_sum(run.window.double().tolist())
        totals = dict(zip(run.objective.sums, sums, strict=True))
        if not totals["targets"] and run.rounds is None:  # only bad steps, which are in bad_steps.jsonl
            return
        run.check_folder()
        run.window.zero_()
        seconds, run.window_seconds = run.window_seconds, 0.0
        tokens, run.window_tokens = run.window_tokens, 0
        positions, run.window_positions = run.window_positions, 0
        targets = totals["targets"] or 1.0  # a round without signal has none
        run.progress.train_loss = totals["loss"] / targets
        speed = token_rate(tokens, seconds)
        mfu = utilization(run.flops_per_token, speed, run.peak_flops, run.world.size)
        balance = totals.get("balance", 0.0) / targets
        objective_metrics = run.objective.training_metrics(totals)
        run.trackers.log_training(
            {
                "step": run.step,
                "epoch": round(run.length.epoch(run.step), 6),
                "loss": run.progress.train_loss,
                **({"balance": balance} if balance else {}),  # only for a mixture of experts
                **objective_metrics,
                "gradient_norm": float(run.norm),
                "learning_rate": run.learning_rate,
                "tokens": run.progress.tokens,
                "tokens_per_second": speed,
                "run_tokens_per_second": run.progress.tokens_per_second,
                **({"filler": round(1 - tokens / positions, 6)} if tokens < positions else {}),  # fraction of padding
                "seconds": round(run.progress.seconds + run.first_rank_seconds, 3),
                "memory_gib": round(memory_in_use(run.world.device) / 2**30, 4),
                **({"mfu": mfu} if mfu is not None else {}),
                **({"budget_used": round(run.budget_used, 6)} if run.budget_used is not None else {}),
            }
        )


class Validate:
    """Evaluates the validation split at `validate.every` and at the end. Stops the run early by `validate.patience`."""

    def __init__(self, guard: Guard, validation: Validation) -> None:
        self._guard, self._validation = guard, validation
        self._clock = IntervalClock()

    def __call__(self, run: Run) -> None:
        config = run.config.validate_
        if len(self._validation.samples) == 0:
            return
        is_due = self._clock.is_due(run, config.every)
        if not (is_due or run.finished):
            return
        self._guard.check_newest_step(run)
        run.trackers.show_progress("evaluating", 0.0)
        progress = partial(run.trackers.show_progress, "evaluating")
        with run.timed_end("validation"):
            metrics, outputs = self._validation.evaluate(run.strategy, run.batch_plan.rows, config.blocks, progress)
        run.progress.validation, run.progress.calibration = metrics, run.objective.calibration()
        run.newest_validation = run.step
        run.check_folder()
        if run.world.first and (details := run.objective.details(outputs, self._validation.split)):
            write_file(run.folder.validation, orjson.dumps({"step": run.step, **details}, option=orjson.OPT_INDENT_2))
        best_metric = run.config.checkpoint.best
        if best_metric is not None and best_metric in metrics:
            higher = run.objective.metric_directions[best_metric] == "higher"
            compare_with_best(run, metrics[best_metric], metrics, higher_is_better=higher, counts=is_due)
        run.trackers.log_validation(
            {"step": run.step, "epoch": round(run.length.epoch(run.step), 6), "validation": metrics}
        )


class ShowSamples:
    """Continues `validate.prompts` before the first step and after each validation, into samples.jsonl."""

    def __call__(self, run: Run) -> None:
        if run.newest_validation == run.step:
            self.show(run)

    def show(self, run: Run) -> None:
        with run.timed_end("samples"), run.strategy.generating() as takes_part:
            lines = [self._log_sample(run, prompt) for prompt in run.config.validate_.prompts] if takes_part else []
        if lines:
            run.trackers.log_samples(lines)

    def _log_sample(self, run: Run, prompt: str) -> dict[str, Any]:
        line = {"step": run.step, "prompt": prompt, "text": _generate_sample(run, prompt)}
        logger.info("step %s: %s → %s", run.step, prompt, line["text"])
        if run.world.first:
            lines = JsonLinesFile(run.folder.samples)
            lines.add(line)
            lines.close()
        return line


def _generate_sample(run: Run, prompt: str) -> str:
    decoding = run.objective.decoding
    sampling = decoding.sampling(new_tokens=run.config.validate_.new_tokens, seed=run.config.seed)
    return "".join(decoding.reply(run.strategy.model, prompt, "", sampling).pieces)


class MeasureEnd:
    """Times the end of a run with `train.budget`, after the second step of this start.

    It evaluates a few micro-batches, continues one prompt, and writes one checkpoint, even if `checkpoint.every` is
    never. The loop waits for this checkpoint, as for the last one. The final model is assumed to take as long as a
    checkpoint, which contains it. Raise WorkError if the checkpoint cannot be written, since the last one would fail
    too.
    """

    _MICRO_BATCHES = 4  # timed micro-batches of the validation, after one for warm-up

    def __init__(self, guard: Guard, validation: Validation) -> None:
        self._guard, self._validation = guard, validation
        self._steps = 0

    def __call__(self, run: Run) -> None:
        self._steps += 1
        if run.config.train.budget is None or self._steps != 2 or run.finished:
            return
        self._guard.check_newest_step(run)
        run.trackers.show_progress("measuring the time that the end takes")
        self._validate(run)
        self._generate_first_sample(run)
        run.saver.wait()
        run.check_folder()
        started = run.clock()
        _save_and_wait(run)
        for phase in ("checkpoint", "model"):
            run.budget.note_end(phase, run.clock() - started)
        run.budget.is_measured = True

    def _validate(self, run: Run) -> None:
        rows = run.batch_plan.rows * run.strategy.dp_degree
        num_samples = self._validation.num_samples(run.config.validate_.blocks)
        if num_samples == 0:
            return
        timed_samples = min(num_samples, self._MICRO_BATCHES * rows)
        self._validation.evaluate(run.strategy, run.batch_plan.rows, min(timed_samples, rows))
        start = run.clock()
        self._validation.evaluate(run.strategy, run.batch_plan.rows, timed_samples)
        seconds = run.clock() - start
        run.budget.note_end("validation", seconds * math.ceil(num_samples / rows) / math.ceil(timed_samples / rows))

    def _generate_first_sample(self, run: Run) -> None:
        prompts = run.config.validate_.prompts
        start = run.clock()
        with run.strategy.generating() as takes_part:
            if prompts and takes_part:
                _generate_sample(run, prompts[0])
        run.budget.note_end("samples", (run.clock() - start) * len(prompts))


class Save:
    """Saves a checkpoint at `checkpoint.every`, if `checkpoint.best` improves, on a requested stop, and at the end."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._clock = IntervalClock()
        self._started = False

    def __call__(self, run: Run) -> None:
        every = run.config.checkpoint.every
        is_best = run.step == run.progress.best_step
        if not self._started and every != Interval():  # an empty interval means never
            run.saver.touch_memory()
        self._started = True
        if not (is_best or run.stop_requested or run.finished or self._clock.is_due(run, every)):
            return
        self._guard.check_newest_step(run)
        run.check_folder()
        if run.stop_requested or run.finished:
            run.trackers.show_progress("writing the checkpoint")
            _save_and_wait(run)
        else:
            run.saver.save(run.progress_so_far(), is_last=False)


def _save_and_wait(run: Run) -> None:
    """Write a checkpoint while the loop waits. Raise WorkError on all ranks if one of them fails."""
    saved = run.saver.save(run.progress_so_far(), is_last=True)
    if run.strategy.all_reduce_sum([float(not saved)])[0]:
        lines = run.saver.failures or ["the checkpoint could not be written"]
        raise WorkError([Problem(f"step {run.step}", line) for line in lines])


class EvaluateTasks:
    """Evaluates `validate.tasks` at `validate.tasks_every` and at the end. `checkpoint.best` may be one of the metrics.

    Ranks that hold the full model divide the questions; ranks that shard the weights each ask all of them. With
    `train.budget` the tasks also run after the second step of this start, to find out how long they take at the end.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._clock = IntervalClock()
        self._steps = 0

    def __call__(self, run: Run) -> None:
        config = run.config.validate_
        if not config.tasks:
            return
        self._steps += 1
        measures_end = run.config.train.budget is not None and self._steps == 2
        is_due = self._clock.is_due(run, config.tasks_every)
        if not (is_due or measures_end or run.finished):
            return
        self._guard.check_newest_step(run)
        results = self._evaluate(run)
        if results is not None:
            self._record(run, task_metrics(results))
        if best_is_task(run.config):
            self._update_best(run, results, is_due)

    def _evaluate(self, run: Run) -> dict[str, Any] | None:
        """Return the harness's results. None if a task failed, or on ranks that do not take part."""
        run.trackers.show_progress("evaluating the tasks")
        config, strategy = run.config.validate_, run.strategy
        world = run.world if strategy.holds_full_model else None
        with run.timed_end("tasks"), strategy.generating() as takes_part:
            if not (takes_part or strategy.holds_full_model):
                return None
            try:
                return run_tasks(
                    strategy.model, run.tokenizer, config.tasks, limit=config.tasks_limit, world=world, quiet=True
                )
            except Exception as error:  # the harness and tasks raise all types; the run continues without the results
                if not strategy.holds_full_model:
                    raise  # the other ranks wait for this one within a layer
                reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
                logger.info("step %s: validate.tasks could not be evaluated: %s", run.step, reason)
                return None

    def _record(self, run: Run, metrics: dict[str, float]) -> None:
        progress = run.progress
        progress.validation = progress.validation | metrics
        if progress.best_step == run.step:
            progress.best_validation = progress.best_validation | metrics
        run.check_folder()
        run.trackers.log_tasks({"step": run.step, "epoch": round(run.length.epoch(run.step), 6), "tasks": metrics})

    def _update_best(self, run: Run, results: dict[str, Any] | None, is_due: bool) -> None:
        """Compare the first rank's metric with the best, so that all ranks save the same step."""
        name = run.config.checkpoint.best
        assert name is not None
        metrics = {} if results is None else task_metrics(results)
        has_value = run.world.first and name in metrics
        higher = has_value and results is not None and task_directions(results)[name]
        value, is_known, is_higher = run.strategy.all_reduce_sum(
            [metrics[name] if has_value else 0.0, float(has_value), float(bool(higher))]
        )
        if is_known:
            step_metrics = run.progress.validation if run.newest_validation == run.step else metrics
            compare_with_best(run, value, step_metrics, higher_is_better=bool(is_higher), counts=is_due)


def compare_with_best(
    run: Run, value: float, metrics: dict[str, float], *, higher_is_better: bool, counts: bool
) -> None:
    """Record the value of `checkpoint.best` after the newest step, and stop the run early if `patience` is over.

    `metrics`: all metrics of this step. `counts`: True if the validation counts toward `patience`. One that is due only
    because the run ends does not count, since a longer run would not have it. All ranks pass the same values.
    """
    name, progress = run.config.checkpoint.best, run.progress
    assert name is not None
    if progress.best_figure != name:
        progress.best = None  # the run was resumed with another metric
    is_better = progress.best is None or (value > progress.best if higher_is_better else value < progress.best)
    if is_better and not math.isnan(value):
        progress.best, progress.best_figure, progress.best_step = value, name, run.step
        progress.best_validation, progress.best_calibration = metrics, progress.calibration
        progress.validations_since_best = 0
        return
    progress.validations_since_best += counts
    patience = run.config.validate_.patience
    if patience is not None and progress.validations_since_best >= patience and not run.finished:
        progress.stopped_early = True
        logger.info("step %s: %s has not improved since step %s; stopping", run.step, name, progress.best_step)


class StopOnSignal:
    """Ends the run after this step, saved, on SIGTERM, Ctrl-C or Slurm's SIGUSR1; at once on a second Ctrl-C.

    Before the first step there is nothing to finish, so each of these signals ends the run at once: through the handler
    that the caller of artel has set, or by ending the process. Signals arrive in the main thread only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = False
        """True once this process has been asked to stop."""
        self.finishes_step = False
        """True once steps are taken. Then a first Ctrl-C waits for the end of the step."""
        self._clock, self._signal_time = clock, 0.0
        self._interrupt_answers = ExitStack()
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) if in_main_thread() else ()
        self._old_handlers = {signal_number: signal.signal(signal_number, self._on_signal) for signal_number in signals}

    def follow(self, run: Run) -> StopOnSignal:
        """Finish the step of `run` before it stops, and tell the user so on Ctrl-C. Return this callback."""
        self.finishes_step = True
        self._interrupt_answers.enter_context(answer_interrupts_with(partial(_stop_message, run)))
        return self

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        now = self._clock()
        old_handler = self._old_handlers[signal.SIGINT]
        if not self.finishes_step and callable(old_handler):
            old_handler(signal_number, frame)
        if self.requested and signal_number == signal.SIGINT and now - self._signal_time > SAME_SIGNAL_SECONDS:
            handler = signal.SIG_DFL if old_handler is signal.default_int_handler else old_handler
            signal.signal(signal.SIGINT, handler)
            signal.raise_signal(signal.SIGINT)
        if not self.requested:
            self._signal_time = now
        self.requested = True

    def __call__(self, run: Run) -> None:
        if run.stop_requested and not run.finished:
            raise Interrupted.at("", f"stopped and saved after {run.position}", "the same command resumes")

    def close(self) -> None:
        self._interrupt_answers.close()
        for signal_number, handler in self._old_handlers.items():
            signal.signal(signal_number, handler)


def _stop_message(run: Run) -> str:
    """Return the message after Ctrl-C: when `run` will stop, and the effect of a second Ctrl-C."""
    step = run.folder.last_checkpoint
    second_effect = f"resume from the last checkpoint ({step})"
    if not step:
        second_effect = "lose its steps: no checkpoint is written yet"
    seconds = run.seconds_left_of_step
    estimate = f" (about {seconds:,.0f} s)" if seconds >= 1 else ""
    when = f"once this is done: {run.trackers.doing}" if run.trackers.doing else f"after this step{estimate}"
    return f"stopping {when}; press Ctrl-C again to stop at once and {second_effect}"
