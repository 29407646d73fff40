"""The callback that has lm-evaluation-harness ask the model while it is trained."""

from __future__ import annotations

from typing import Any

from artel.training.best import compare_with_best
from artel.training.faults.bad_steps import Guard
from artel.training.run import IntervalClock, Run
from artel.training.tasks.harness import goes_by_task, run_tasks, task_directions, task_figures


class EvaluateTasks:
    """The figures of `validate.tasks`, at `validate.tasks_every` and at the end. `checkpoint.best` may be one of them.

    Processes that have the model whole share the questions; where they share the weights, each asks all of them. Under
    `train.budget` the tasks are also asked after the second step of this start, which tells what they take at the end.
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
        measures = run.config.train.budget is not None and self._steps == 2
        is_due = self._clock.is_due(run, config.tasks_every)
        if not (is_due or measures or run.finished):
            return
        self._guard.rewound(run)
        results = self._ask(run)
        if results is not None:
            self._note(run, task_figures(results))
        if goes_by_task(run.config):
            self._compare(run, results, is_due)

    def _ask(self, run: Run) -> dict[str, Any] | None:
        """The harness's results; None where a task failed, and on ranks that are not asked."""
        run.trackers.busy("asking the tasks")
        config, strategy = run.config.validate_, run.strategy
        world = run.world if strategy.holds_full_model else None
        with run.timed_end("tasks"), strategy.generating() as takes_part:
            if not (takes_part or strategy.holds_full_model):
                return None
            try:
                return run_tasks(
                    strategy.model, run.tokenizer, config.tasks, limit=config.tasks_limit, world=world, quiet=True
                )
            except Exception as error:  # the harness and its tasks are others' programs: the run goes on without
                if not strategy.holds_full_model:
                    raise  # the others wait for this process within a layer
                reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
                run.tell(f"step {run.step}: validate.tasks could not be asked: {reason}")
                return None

    def _note(self, run: Run, figures: dict[str, float]) -> None:
        progress = run.progress
        progress.validation = progress.validation | figures
        if progress.best_step == run.step:
            progress.best_validation = progress.best_validation | figures
        run.check_folder()
        run.trackers.tasks({"step": run.step, "epoch": round(run.length.epoch(run.step), 6), "tasks": figures})

    def _compare(self, run: Run, results: dict[str, Any] | None, is_due: bool) -> None:
        """By the first rank's figure, so that all ranks save the same step."""
        name = run.config.checkpoint.best
        assert name is not None
        figures = {} if results is None else task_figures(results)
        known = run.world.first and name in figures
        higher = known and results is not None and task_directions(results)[name]
        value, is_known, is_higher = run.strategy.all_reduce_sum(
            [figures[name] if known else 0.0, float(known), float(bool(higher))]
        )
        if is_known:
            at_step = run.progress.validation if run.newest_validation == run.step else figures
            compare_with_best(run, value, at_step, higher_is_better=bool(is_higher), counts=is_due)
