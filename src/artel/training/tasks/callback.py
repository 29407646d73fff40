"""The callback that has lm-evaluation-harness ask the model while it is trained."""

from __future__ import annotations

from artel.training.faults.bad_steps import Guard
from artel.training.run import IntervalClock, Run
from artel.training.tasks.harness import run_tasks, task_figures


class EvaluateTasks:
    """The figures of `validate.tasks`, at `validate.tasks_every` and at the end.

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
        if not (self._clock.is_due(run, config.tasks_every) or measures or run.finished):
            return
        self._guard.rewound(run)
        run.trackers.busy("asking the tasks")
        strategy = run.strategy
        world = run.world if strategy.holds_full_model else None
        with run.timed_end("tasks"), strategy.generating() as takes_part:
            if not (takes_part or strategy.holds_full_model):
                return
            try:
                results = run_tasks(
                    strategy.model, run.tokenizer, config.tasks, limit=config.tasks_limit, world=world, quiet=True
                )
            except Exception as error:  # the harness and its tasks are others' programs: the run goes on without
                if not strategy.holds_full_model:
                    raise  # the others wait for this process within a layer
                reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
                run.tell(f"step {run.step}: validate.tasks could not be asked: {reason}")
                return
        self._note(run, task_figures(results))

    def _note(self, run: Run, figures: dict[str, float]) -> None:
        progress = run.progress
        progress.validation = progress.validation | figures
        if progress.best_step == run.step:
            progress.best_validation = progress.best_validation | figures
        run.check_folder()
        run.trackers.tasks({"step": run.step, "epoch": round(run.length.epoch(run.step), 6), "tasks": figures})
