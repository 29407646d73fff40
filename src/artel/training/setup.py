"""Opens a run: token store, model, strategy, optimizer; resumes from a checkpoint if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from artel.config import RunConfig, dump_run
from artel.config.schema.quantities import duration
from artel.errors import InputError
from artel.host import reset_peak_memory
from artel.interrupts import ended_at_once
from artel.models.compile import try_compiled
from artel.models.flops import device_name, flops_a_token, peak_flops
from artel.objectives import objective_of
from artel.parallel import World
from artel.preparing import Prepared
from artel.storage import write_file
from artel.tokens import PackedSamples, Samples
from artel.training.budget import Budget
from artel.training.checkpoint.async_saver import Saver
from artel.training.checkpoint.format import Progress, list_checkpoints, load_checkpoint
from artel.training.checkpoint.items import CheckpointItems
from artel.training.checkpoint.retention import check_space, checkpoint_bytes, commit
from artel.training.checkpoint.s3_mirror import fetch_newest
from artel.training.evaluation import Validation
from artel.training.first_step import check_blocks, check_same_step, check_same_store
from artel.training.metrics.jsonl import drop_lines_after
from artel.training.metrics.trackers import Trackers
from artel.training.model_setup import set_up_model
from artel.training.packing import ALONE, AUTO, choose_packing, may_unpack, with_packing
from artel.training.prefetch import local_batches
from artel.training.rank_file import mark_start
from artel.training.reference_log_probs import set_reference
from artel.training.run import Run
from artel.training.run_folder import RunFolder
from artel.training.schedule import Length, position, run_length, warmup_steps
from artel.training.starts import note_start
from artel.training.tasks.harness import check_best, check_data
from artel.training.teacher.teacher import set_teacher

_KEEPS_APART = ("data.packing", "parallel.exchange")
"""Keys at which a model, or its parallel strategy, is said not to keep packed samples apart."""


def open_run(
    config: RunConfig,
    prepared: Prepared,
    world: World,
    tell: Callable[[str], None],
    callbacks: Sequence[object] = (),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Run, Validation]:
    """The run, ready for its next step, and its validation split. Raises InputError.

    Messages of the first rank alone go to `tell`. Those of `callbacks` that have a state resume with the run.
    Where packing was chosen for the run, and its model turns out not to keep samples apart, they are not packed.
    """
    if not world.first:
        tell = _silent
    reset_peak_memory()  # reading the text and choosing a model took memory that is free again
    if config.data.packing == AUTO:
        config = with_packing(config, choose_packing(config, prepared.open().train).value)
    try:
        return _open_run(config, prepared, world, tell, callbacks, clock)
    except InputError as error:
        if not may_unpack(config) or any(problem.where not in _KEEPS_APART for problem in error.problems):
            raise
        tell(f"data.packing={ALONE}: {error.problems[0].what}")
    config = with_packing(config, ALONE)
    world.barrier()  # all have read what was chosen before
    if world.first:
        write_file(RunFolder(Path(config.run)).config, dump_run(config))
    return _open_run(config, prepared, world, tell, callbacks, clock)


def _open_run(
    config: RunConfig,
    prepared: Prepared,
    world: World,
    tell: Callable[[str], None],
    callbacks: Sequence[object],
    clock: Callable[[], float],
) -> tuple[Run, Validation]:
    started = clock()
    folder = RunFolder(Path(config.run))
    store, tokenizer = prepared.open(), prepared.tokenizer()
    objective = objective_of(config, tokenizer)
    samples, validation = objective.dataset(store.train), Validation(objective, store.validation)
    check_blocks(samples, store.train, validation, config)
    objective.fit_statistics(store.train)
    length = run_length(config, samples, store.train)
    check_data(config.validate_.tasks)
    check_best(config)

    if config.checkpoint.copy_to is not None:
        if world.first:
            fetch_newest(folder.checkpoints, config, tell)
        world.barrier()
    resumes = bool(list_checkpoints(folder.checkpoints))
    set_teacher(objective, config, store, world, folder.teacher, resumes, tell)
    tell("loading the model")
    model = set_up_model(config, tokenizer, objective, samples, world, length.steps, tell)
    strategy, optimizer = model.strategy, model.optimizer
    items = CheckpointItems(optimizer, callbacks)
    set_reference(objective, store, strategy, world, model.batch_plan.size, folder.before, resumes, tell)
    progress = load_checkpoint(folder.checkpoints, items, tell) or Progress(store=store.digest)
    check_same_store(progress, store.digest)
    if progress.warmup is None:
        progress.warmup = warmup_steps(config.train, length.steps)
    if config.train.budget is not None and progress.share == 0.0:
        progress.seconds = 0.0  # spent on finding out whether the budget suffices, perhaps another one
    if world.first:
        if progress.step:
            commit(folder.checkpoints, progress, config.checkpoint)
        check_space(folder.checkpoints, checkpoint_bytes(strategy.model, config.train, strategy.stages), tell)
    check_same_step(progress, strategy, world)
    if world.first:
        drop_lines_after(folder.bad_steps, progress.step)
        drop_lines_after(folder.samples, progress.step or -1)  # a run from its beginning writes those of step 0 again

    tell(f"{_described(samples, config)} · {_length(config, length)} · {model.summary}")
    if progress.step:  # said before a tracker drops the figures of later steps: a kill in between leaves no riddle
        tell(f"resuming from {position(config.train, length, progress.step, progress.seconds)}")
    peak = peak_flops(device_name(world.device), model.precision)
    flops_per_token = None
    if peak is not None:
        flops_per_token = flops_a_token(strategy.model.config, objective.auto_class, config.data.block)
    run = Run(
        config=config,
        folder=folder,
        folder_identity=folder.identity(),  # after the first rank has made it: all have met since
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
            tell=tell,
        ),
        trackers=Trackers(
            config if world.first else config.model_copy(update={"track": []}),
            folder,
            step=progress.step,
            steps=length.steps,
        ),
        progress=progress,
        tell=tell,
        flops_per_token=flops_per_token,
        peak_flops=peak,
        window=torch.zeros(len(objective.sums), device=world.device),
        norm=torch.zeros((), device=world.device),
        budget=_budget(config.train.budget, progress),
        clock=clock,
        started=started,
    )
    if world.first:
        note_start(run, model.chosen)
    if model.compiled and not run.finished:
        _compile(run)
    return run, validation


def _budget(seconds: float | None, progress: Progress) -> Budget:
    """The budget of this start. The share that has passed is kept, unless it is a share of another budget."""
    return Budget(seconds, progress.end, progress.share if progress.share_of == seconds else 0.0)


def _described(samples: Samples, config: RunConfig) -> str:
    block = config.data.block
    if not isinstance(samples, PackedSamples):
        return f"{len(samples):,} samples of up to {block} tokens"
    packed, batch = samples.samples_in(len(samples)), config.train.batch
    return (
        f"{packed:,} samples packed into {len(samples):,} blocks of {block} tokens, {samples.filler:.1%} filler; "
        f"a step of {batch} blocks holds {packed / len(samples) * batch:,.0f} samples on average"
    )


def _length(config: RunConfig, length: Length) -> str:
    train = config.train
    if train.budget is not None:
        return f"steps of {train.batch} for {duration(train.budget)}, learning rate by {train.schedule}"
    return f"{length.steps:,} steps of {train.batch}"


def _compile(run: Run) -> None:
    """Compile the layers now, rather than in the first step; where that fails they run as they are."""
    batch = local_batches(run, run.step)[0]

    def last_line() -> str:
        mark_start(run.folder, "stopped")
        return f"stopped while compiling the layers\n    {run.folder.how_to_continue}"

    with ended_at_once(last_line):  # the compilers, which take minutes, must not be killed
        run.tell("compiling the layers")
        run.trackers.busy("compiling")
        failure = try_compiled(
            run.strategy.model, lambda: run.strategy.probe_memory(batch), run.strategy.forget_failed_pass
        )
    if failure is not None:
        run.tell(f"the layers cannot be compiled, so they run as they are: {failure}")


def _silent(message: str) -> None:
    pass
