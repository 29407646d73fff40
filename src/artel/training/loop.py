"""The training loop, the heart of artel. Read this file first: it shows how training works.

The loop never asks which objective or parallel strategy it has. An objective turns a batch into a loss; a strategy
runs a global batch over one process or many; callbacks log, validate and save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import xxhash

from artel.config import RunConfig
from artel.models.forward_pass import architecture_error, profiler_range
from artel.objectives import Batch
from artel.parallel import World
from artel.preparing import PreparedText
from artel.training.callbacks import Callback, EvaluateTasks, Log, MeasureEnd, Save, ShowSamples, StopOnSignal, Validate
from artel.training.faults.bad_steps import Guard
from artel.training.faults.out_of_memory import optimizer_memory, use_less_memory
from artel.training.faults.rank_status import rank_status
from artel.training.faults.watchdog import watchdog
from artel.training.finish import close_trackers, finish, no_report
from artel.training.heartbeat import heartbeat
from artel.training.memory import retained_host_memory
from artel.training.micro_batch import is_out_of_memory
from artel.training.plan_file import CompareWithPlan
from artel.training.prefetch import Prefetcher, gc_between_steps
from artel.training.profile import StepProfiler
from artel.training.run import Run
from artel.training.run_folder import RunFolder
from artel.training.setup import open_run


def train(
    config: RunConfig,
    prepared: PreparedText,
    world: World,
    callbacks: Sequence[Callback] = (),
    clock: Callable[[], float] = time.monotonic,
    make_report: Callable[[], str | None] = no_report,
) -> dict[str, Any]:
    """Train, or resume, the run that `config` describes. Return the result, as in result.json.

    `callbacks` are called after every step, before the built-in ones. A callback that has `state_dict` and
    `load_state_dict` is saved in every checkpoint and resumes with the run. `clock` returns seconds, for intervals, the
    budget and the result. `make_report` returns the HTML report of the finished run, for trackers that keep it.

    Raise InputError before the first step, or if `train.budget` is too short; WorkError if the work fails; Interrupted
    if asked to stop.
    """
    folder = RunFolder(Path(config.run))
    if world.first:
        folder.claim()
    with ExitStack() as at_end:
        signals = StopOnSignal()
        at_end.callback(signals.close)
        with rank_status(folder, world) as status:
            with retained_host_memory(world.device):  # try micro-batches under the same conditions as steps
                run, validation = open_run(config, prepared, world, callbacks, clock)
            status.follow(run)
            guard, profiler = Guard(run), StepProfiler(run)
            if run.rounds is not None:
                at_end.callback(run.rounds.close)
            for resource in (validation, run.trackers, run.saver, profiler):  # the last is closed first
                at_end.callback(resource.close)
            # The order matters: metrics are logged before a validation, and both come before a save. The profiler comes
            # last, so that a profiled step includes the other callbacks.
            validate, samples, measure = Validate(guard, validation), ShowSamples(), MeasureEnd(guard, validation)
            callbacks = [*callbacks, Log(guard), validate, samples, EvaluateTasks(guard), measure, Save(guard)]
            callbacks += [CompareWithPlan(run), signals.follow(run), profiler]
            with (
                watchdog(run),
                retained_host_memory(world.device),
                gc_between_steps() as collect_garbage,
                closing(Prefetcher(run)) as prefetcher,
            ):
                if run.step == 0:
                    samples.show(run)
                while not run.finished:
                    with run.timed_step():
                        # The samples of a step are a function of its number alone (principle 1).
                        with profiler_range("artel: data"):
                            batches = prefetcher.next()
                        # All ranks agree on the number of targets in the global batch, which divides the loss
                        # (principle 2).
                        synchronize(run, batches, signals.requested)
                        sums = forward_backward(run, batches)
                        # Check the previous step only now, while the device is busy with this one, so that nothing
                        # waits. Repeat this step if memory ran out, or if the previous step was bad and a checkpoint
                        # was restored.
                        if sums is None or guard.check_newest_step(run):
                            continue
                        with profiler_range("artel: optimizer"), optimizer_memory():
                            guard.optimizer_step(run, sums)
                        run.count_step()
                    heartbeat("a step")
                    with profiler_range("artel: callbacks"):
                        for callback in callbacks:
                            callback(run)
                            heartbeat(type(callback).__name__)
                    collect_garbage(run.step)
            result = finish(run)
        close_trackers(run, make_report)  # the status in the run's folder is now "complete"
        return result


def synchronize(run: Run, batches: list[Batch], stop_requested: bool) -> None:
    """Share with all ranks the counts of the global batch, requests to stop, and the first rank's times."""
    times = run.times() if run.world.first else (0.0, 0.0, 0.0)
    counts = [0.0, 0.0, 0.0]
    if run.strategy.is_reporting_rank:
        batch_counts = [(batch.targets, batch.tokens, batch.computed_positions) for batch in batches]
        counts = [float(sum(values)) for values in zip(*batch_counts, strict=True)]
    run.targets, tokens, positions, stops, *first_rank_times = run.strategy.all_reduce_sum(
        [*counts, float(stop_requested), *times]
    )
    run.follow(*first_rank_times)
    run.tokens, run.positions = int(tokens), int(positions)
    run.stop_requested = stops > 0


def forward_backward(run: Run, batches: list[Batch]) -> torch.Tensor | None:
    """Run forward and backward over this rank's micro-batches, through the run's strategy.

    Return this rank's sums, float32 (len(objective.sums),), on the device; None if memory ran out and `run.batch_plan`
    is now smaller.

    Raise OutOfMemory if all processes must start again with smaller micro-batches, WorkError if no smaller size is
    left.
    """
    torch.manual_seed(_dropout_seed(run.config.seed, run.step, run.strategy.dp_rank))
    try:
        return run.strategy.run(batches, run.targets, run.optimizer.loss_factor)
    except Exception as error:
        if not is_out_of_memory(error):
            if run.step == 0 and (refusal := architecture_error(error, run.strategy.model)) is not None:
                raise refusal from error
            raise
    # The error's traceback held the frames of the attempt, and with them its tensors, until here.
    use_less_memory(run)
    return None


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed for dropout in a step. It depends only on the step, so checkpoints store no random state."""
    return xxhash.xxh3_64_intdigest(f"dropout:{seed}:{step}:{rank}".encode()) >> 1
