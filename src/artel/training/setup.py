"""Opens a run: token store, model, strategy, optimizer; resumes from a checkpoint if there is one."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import artel
from artel.config import RunConfig, dump_run
from artel.config.schema.quantities import format_duration
from artel.errors import InputError, Problem
from artel.host import processor_name, reset_peak_memory
from artel.integers import ceil_div
from artel.interrupts import exit_on_signal
from artel.messages import logger, to_json
from artel.models.compile import try_compiled
from artel.models.flops import device_name, estimate_flops_per_token, peak_flops
from artel.objectives import Objective, build_objective
from artel.parallel import ParallelStrategy, World
from artel.preparing import PreparedText
from artel.storage import write_file
from artel.tokens import PackedSamples, Samples, StoreSplit, TokenStore
from artel.training.answer_writer import open_round_rewards
from artel.training.budget import Budget
from artel.training.checkpoint.async_saver import Saver
from artel.training.checkpoint.format import Progress, list_checkpoints, load_checkpoint
from artel.training.checkpoint.items import checkpoint_items
from artel.training.checkpoint.retention import check_space, checkpoint_bytes, commit
from artel.training.checkpoint.s3_mirror import fetch_newest
from artel.training.evaluation import Validation, set_reference
from artel.training.metrics.jsonl import JsonLinesFile, drop_lines_after
from artel.training.metrics.trackers import Trackers
from artel.training.model_setup import set_up_model
from artel.training.packing import AUTO, UNPACKED, choose_packing, may_unpack, with_packing
from artel.training.prefetch import local_batches
from artel.training.rank_file import mark_start
from artel.training.remote_engine import check_engine
from artel.training.reward_validation import make_validation
from artel.training.rounds import Rounds
from artel.training.run import Run
from artel.training.run_folder import RunFolder
from artel.training.schedule import Length, describe_position, run_length, warmup_steps
from artel.training.task_harness import check_best, check_data
from artel.training.teacher import set_teacher

_ISOLATION_KEYS = ("data.packing", "parallel.exchange")
"""Keys of problems that report a model or strategy that cannot isolate packed samples."""


def open_run(
    config: RunConfig,
    prepared: PreparedText,
    world: World,
    callbacks: Sequence[object] = (),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Run, Validation]:
    """Return the run, ready for its next step, and its validation split. Raise InputError if the run cannot start.

    `callbacks` that have a state resume with the run. If packing was chosen automatically, but the model turns out
    unable to isolate samples, they are not packed.
    """
    reset_peak_memory()  # ignore the memory of preparing text and choosing a model, which is free again
    if config.data.packing == AUTO:
        config = with_packing(config, choose_packing(config, prepared.open().train).value)
    try:
        return _open_run(config, prepared, world, callbacks, clock)
    except InputError as error:
        if not may_unpack(config) or any(problem.where not in _ISOLATION_KEYS for problem in error.problems):
            raise
        logger.info("data.packing=%s: %s", UNPACKED, error.problems[0].what)
    config = with_packing(config, UNPACKED)
    world.barrier()  # all ranks have read the earlier choice
    if world.first:
        write_file(RunFolder(Path(config.run)).config, dump_run(config))
    return _open_run(config, prepared, world, callbacks, clock)


def _open_run(
    config: RunConfig, prepared: PreparedText, world: World, callbacks: Sequence[object], clock: Callable[[], float]
) -> tuple[Run, Validation]:
    started = clock()
    objective = build_objective(config, prepared.tokenizer())
    if config.checkpoint.best == "loss":
        checkpoint = config.checkpoint.model_copy(update={"best": objective.main_metric})
        config = config.model_copy(update={"checkpoint": checkpoint})
    store, rounds, pool = prepared.open(), objective.rounds, None
    with ExitStack() as on_error:  # end the processes of rewards
        if rounds is not None and rounds.engine is not None:
            check_engine(rounds.engine)
        if rounds is not None and rounds.is_scored:
            pool = open_round_rewards(rounds, config.plugins)
            on_error.callback(pool.close)
        validation = make_validation(objective, store.validation, config, world, pool)
        on_error.callback(validation.close)
        run = _create_run(config, store, objective, validation, world, callbacks, clock, started)
        on_error.pop_all()
    if rounds is not None:
        run.rounds = Rounds(run, store.train, pool)
    return run, validation


def _create_run(
    config: RunConfig,
    store: TokenStore,
    objective: Objective,
    validation: Validation,
    world: World,
    callbacks: Sequence[object],
    clock: Callable[[], float],
    started: float,
) -> Run:
    """Return the run with its model, restored from its newest checkpoint if there is one."""
    budget, tokenizer = config.train.budget, objective.tokenizer
    folder = RunFolder(Path(config.run))
    samples = objective.dataset(store.train)
    _check_blocks(samples, store.train, validation, config)
    objective.fit_statistics(store.train)
    length = run_length(config, samples, store.train)
    check_data(config.validate_.tasks)
    check_best(config)

    if config.checkpoint.copy_to is not None:
        if world.first:
            fetch_newest(folder.checkpoints, config)
        world.barrier()
    resumes = bool(list_checkpoints(folder.checkpoints))
    set_teacher(objective, config, store, world, folder.teacher, resumes)
    logger.info("loading the model")
    model = set_up_model(config, tokenizer, objective, samples, world, length.steps)
    strategy, optimizer = model.strategy, model.optimizer
    items = checkpoint_items(optimizer, callbacks)
    set_reference(objective, store, strategy, world, model.batch_plan.rows, folder.reference_outputs, resumes)
    progress = load_checkpoint(folder.checkpoints, items) or Progress(store=store.digest)
    if progress.step and progress.store != store.digest:
        raise InputError.at(
            "data",
            "the text is not what this run began with (the token store's digest differs)",
            "restore the text, choose another folder (run=…), or start over with --restart",
        )
    if progress.warmup is None:
        progress.warmup = warmup_steps(config.train, length.steps)
    if budget is not None and progress.share == 0.0:
        progress.seconds = 0.0  # the run has only tested a budget so far, perhaps a different one
    if world.first:
        if progress.step:
            commit(folder.checkpoints, progress, config.checkpoint)
        check_space(folder.checkpoints, checkpoint_bytes(strategy.model, config.train, strategy.stages))
    _check_same_step(progress, strategy, world)
    if world.first:
        drop_lines_after(folder.bad_steps, progress.step)
        drop_lines_after(folder.samples, progress.step or -1)  # a run that starts over repeats the samples of step 0

    logger.info("%s · %s · %s", _describe_samples(samples, config), _describe_length(config, length), model.summary)
    if progress.step:  # log this before a tracker drops metrics of later steps, in case of a kill in between
        logger.info("resuming from %s", describe_position(config.train, length, progress.step, progress.seconds))
    peak = peak_flops(device_name(world.device), model.precision)
    flops_per_token = None
    if peak is not None:
        flops_per_token = estimate_flops_per_token(strategy.model.config, objective.auto_class, config.data.block)
    run = Run(
        config=config,
        folder=folder,
        folder_identity=folder.identity(),  # the first rank has created it, and all ranks have synchronized since
        world=world,
        tokenizer=tokenizer,
        objective=objective,
        samples=samples,
        order=objective.order(store.train, len(samples)),
        length=length,
        batch_plan=model.batch_plan,
        memory_limit=model.memory_limit,
        strategy=strategy,
        optimizer=optimizer,
        items=items,
        saver=Saver(
            folder.checkpoints,
            items,
            world,
            config.checkpoint,
            dump_run(config),
            sharded=not (strategy.holds_full_model or optimizer.saves_collectively),
            gathers=optimizer.saves_collectively,
        ),
        trackers=Trackers(
            config if world.first else config.model_copy(update={"track": []}),
            folder,
            step=progress.step,
            steps=length.steps,
        ),
        progress=progress,
        flops_per_token=flops_per_token,
        peak_flops=peak,
        window=torch.zeros(len(objective.sums), device=world.device),
        norm=torch.zeros((), device=world.device),
        # The used fraction stays, unless it refers to a different budget.
        budget=Budget(budget, progress.end, progress.share if progress.share_of == budget else 0.0),
        clock=clock,
        started=started,
    )
    if world.first:
        _record_start(run, model.chosen)
    if model.compiled and not run.finished:
        _compile_layers(run)
    return run


def _check_same_step(progress: Progress, strategy: ParallelStrategy, world: World) -> None:
    """Raise InputError if processes found different checkpoints: all hosts must see the same run folder."""
    if strategy.all_reduce_sum([float(progress.step)]) != [float(progress.step * world.size)]:
        raise InputError.at(
            "run",
            f"process {world.rank} found step {progress.step}, others found another",
            "put the run's folder on a disk that all hosts share",
        )


def _check_blocks(samples: Samples, split: StoreSplit, validation: Validation, config: RunConfig) -> None:
    """Raise InputError if the text is shorter than a block, or if the run needs validation text and has none."""
    problems = []
    block = config.data.block
    if len(samples) == 0:
        message = f"the training text has {split.tokens:,} tokens, less than a block of {block:,} needs"
        fix = f"write data.block: {max(2, split.tokens - 1)} or less, or add more text"
        problems.append(Problem("data.block", message, fix))
    if validation.split.samples and len(validation.samples) == 0:
        message = f"the validation text has {validation.split.tokens:,} tokens, less than a block of {block:,} needs"
        fix = "write a larger data.validation, a smaller data.block, or data.validation: 0"
        problems.append(Problem("data.validation", message, fix))
    if config.validate_.patience is not None and not validation.split.samples:
        problems.append(Problem("validate.patience", "needs a validation split", "write data.validation"))
    if problems:
        raise InputError(problems)


def _record_start(run: Run, chosen: dict[str, Any]) -> None:
    """Add a line to RUN/starts.jsonl: the environment, and the values `chosen` for keys that are `auto`."""
    world = run.world
    lines = JsonLinesFile(run.folder.starts)
    lines.add(
        {
            "step": run.step,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "processes": world.size,
            "environment": {
                "hosts": ceil_div(world.size, world.on_host),
                "device": processor_name() if world.device.type == "cpu" else device_name(world.device),
                "platform": platform.platform(),
                "python": platform.python_version(),
                "artel": artel.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "chosen": to_json(chosen) | {"train.steps": run.length.steps},
        }
    )
    lines.close()


def _describe_samples(samples: Samples, config: RunConfig) -> str:
    block = config.data.block
    if not isinstance(samples, PackedSamples):
        return f"{len(samples):,} samples of up to {block} tokens"
    num_packed, batch = samples.samples_in(len(samples)), config.train.batch
    return (
        f"{num_packed:,} samples packed into {len(samples):,} blocks of {block} tokens, {samples.padding:.1%} padding; "
        f"a step of {batch} blocks holds {num_packed / len(samples) * batch:,.0f} samples on average"
    )


def _describe_length(config: RunConfig, length: Length) -> str:
    train = config.train
    if train.budget is not None:
        return f"steps of {train.batch} for {format_duration(train.budget)}, learning rate by {train.schedule}"
    return f"{length.steps:,} steps of {train.batch}"


def _compile_layers(run: Run) -> None:
    """Compile the layers before the first step. If that fails they run uncompiled."""
    batch = local_batches(run, run.step)[0]

    def last_line() -> str:
        mark_start(run.folder, "stopped")
        return f"stopped while compiling the layers\n    {run.folder.continue_hint}"

    with exit_on_signal(last_line):  # a compiler takes minutes and cannot be interrupted cleanly
        logger.info("compiling the layers")
        run.trackers.show_progress("compiling")
        failure = try_compiled(
            run.strategy.model, lambda: run.strategy.probe_memory(batch), run.strategy.forget_failed_pass
        )
    if failure is not None:
        logger.info("the layers cannot be compiled and run uncompiled: %s", failure)
