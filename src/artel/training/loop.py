"""The training loop: the heart of artel. Who has read this file knows how the system works.

open the store, the model, the layout, the optimizer; resume if there is something to resume
for each step: take its samples from the order, let the layout run them, clip, step
once in a while: log, validate, show samples, save, look for signals
close: final model, result
"""

from __future__ import annotations

import resource
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import xxhash

from artel.config import RunConfig, dump_run
from artel.config.schema.quantities import Interval
from artel.models.compile import try_compiled
from artel.models.flops import device_name, flops_a_token, peak_flops, tokens_a_second
from artel.models.loading.save import save_model
from artel.models.profiler_ranges import profiler_range
from artel.objectives import Batch, Objective, objective_of
from artel.parallel import ParallelStrategy, World
from artel.preparing import Prepared
from artel.storage import write_file
from artel.tokens import BalancedOrder, Order, Samples, Tokenizer, micro_batches, step_numbers
from artel.training.callbacks import Callback, Clock, Log, Save, ShowSamples, StopOnSignal, Validate
from artel.training.checkpoint.async_saver import Saver
from artel.training.checkpoint.format import (
    Progress,
    checkpoint_path,
    full_weights,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    read_progress,
)
from artel.training.checkpoint.retention import check_space, checkpoint_bytes, commit
from artel.training.checkpoint.s3_mirror import fetch_newest
from artel.training.evaluation import Validation
from artel.training.faults.bad_steps import Guard
from artel.training.faults.out_of_memory import Feed, gradients, optimizer_memory_told
from artel.training.faults.watchdog import beat, watched
from artel.training.first_step import check_blocks, check_same_step, check_same_store
from artel.training.memory.cpu_allocator import retained_host_memory
from artel.training.memory.micro_batch import MemoryLimit, MicroBatchPlan
from artel.training.metrics.profiler import Profile
from artel.training.metrics.trackers import Trackers
from artel.training.model_setup import set_up_model
from artel.training.optim.optimizer import OptimizerProtocol
from artel.training.prefetch import gc_between_steps
from artel.training.reference_log_probs import set_reference
from artel.training.run_folder import RunFolder
from artel.training.schedule import Length, rate, run_length

Result = dict[str, Any]


def train(
    config: RunConfig,
    prepared: Prepared,
    world: World,
    tell: Callable[[str], None],
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train, or go on training, the run that `config` describes; its result, as in result.json.

    `callbacks` of the caller's come before those that are always there.

    Raises InputError before the first step, WorkError when the work fails, Interrupted when asked to stop.
    """
    signals = StopOnSignal()
    run = open_run(config, prepared, world, tell if world.first else lambda _: None)
    profile = Profile(run)
    # The profile comes last: it sees each step together with what is done after it.
    callbacks = [*callbacks, Log(), Validate(), ShowSamples(), Save(), signals, profile]
    try:
        with watched(run), retained_host_memory(world.device), gc_between_steps() as collect, Feed(run) as feed:
            while not run.is_over:
                started = time.monotonic()
                with profiler_range("artel: data"):
                    batches = feed.take()
                run.agree(signals.asked, batches)
                sums = run.guard.settled(run, lambda: gradients(run, feed))
                with profiler_range("artel: optimizer"), optimizer_memory_told():
                    run.guard.step(run, sums, run.rate(run.step))
                run.count_step(time.monotonic() - started)
                beat("a step")
                with profiler_range("artel: once in a while"):
                    for callback in callbacks:
                        callback(run)
                        beat(type(callback).__name__)
                collect(run.step)
        return close_run(run)
    finally:
        profile.close()
        run.saver.close()
        run.trackers.close()
        signals.close()


@dataclass(slots=True)
class Run:
    """All that a running training consists of; the callbacks read it."""

    config: RunConfig
    folder: RunFolder
    mark: str
    """What tells the folder from one that is made anew in its place while the run is at work."""
    world: World
    tokenizer: Tokenizer
    objective: Objective
    samples: Samples
    validation: Validation
    order: Order | BalancedOrder
    length: Length
    found: MicroBatchPlan
    """Rows of a micro-batch, and what is computed again."""
    limit: MemoryLimit
    strategy: ParallelStrategy
    optimizer: OptimizerProtocol
    guard: Guard
    saver: Saver
    trackers: Trackers
    progress: Progress
    tell: Callable[[str], None]
    started: float
    window: torch.Tensor
    """Sums of the objective over the good steps since the last logged line, on the device."""
    norm: torch.Tensor
    """Gradient norm of the newest good step, before clipping, on the device."""
    window_seconds: float = 0.0
    window_tokens: int = 0
    targets: float = 0.0
    """Targets in the newest global batch."""
    tokens: int = 0
    """Input tokens in it, without filler."""
    stop_asked: bool = False
    newest_validation: int = -1
    flops: float | None = None
    """Of training on one token; known only where the device's peak is."""
    peak: float | None = None
    """FLOP/s that one device reaches at most, in the run's precision."""
    first_seconds: float = 0.0
    """The first process's clock, so that all processes see the same intervals end."""

    @property
    def step(self) -> int:
        """Steps done."""
        return self.progress.step

    @property
    def micro_batch(self) -> int:
        """Rows that one process runs at a time."""
        return self.found.size

    @property
    def is_over(self) -> bool:
        """Whether the newest step was the last: of all, or because validations did not get better."""
        return self.step >= self.length.steps or self.progress.stopped_early

    @property
    def learning_rate(self) -> float:
        """Of the newest step."""
        return self.config.train.learning_rate * self.rate(self.step - 1)

    def rate(self, step: int) -> float:
        """Of a step, counted from 0, as a fraction of the peak."""
        return rate(self.config.train, step, self.length.steps, self.progress.warmup)

    def numbers(self, step: int) -> np.ndarray:
        """Running sample numbers of a step, counted from the start of the run."""
        return step_numbers(step, self.length.batch, self.length.total)

    def take(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step: a pure function of the step."""
        numbers = self.numbers(step)
        rows = micro_batches(
            self.samples,
            self.order.at(numbers),
            numbers // self.length.samples,
            rank=self.strategy.dp_rank,
            world=self.strategy.dims.dp_degree,
            batch=self.length.batch,
            size=self.micro_batch,
        )
        return [self.objective.batch(part) for part in rows]

    def agree(self, stop: bool, batches: list[Batch]) -> None:
        """What all ranks must know alike: the batch's counts, whether one was asked to stop, the first one's clock."""
        clock = time.monotonic() - self.started if self.world.first else 0.0
        mine = [float(sum(batch.targets for batch in batches)), float(sum(batch.tokens for batch in batches))]
        mine = mine if self.strategy.is_reporting_rank else [0.0, 0.0]
        self.targets, tokens, stops, self.first_seconds = self.strategy.all_reduce_sum([*mine, float(stop), clock])
        self.tokens = int(tokens)
        self.stop_asked = stops > 0

    def gradients(self, batches: list[Batch]) -> torch.Tensor:
        """Forward and backward of the next step's micro-batches; this process's sums, on the device."""
        torch.manual_seed(_dropout_seed(self.config.seed, self.step, self.strategy.dp_rank))
        return self.strategy.run(batches, self.targets, self.optimizer.loss_factor)

    def check_folder(self) -> None:
        """Raise WorkError where the run's folder is gone: before anything is written into another in its place."""
        if self.mark:  # empty on a host whose network disk did not show it yet: the others look
            self.folder.check_there(self.mark)

    def count_step(self, seconds: float) -> None:
        self.progress.step += 1
        self.progress.tokens += self.tokens
        self.window_tokens += self.tokens
        self.progress.train_seconds += seconds
        self.window_seconds += seconds

    def is_due(self, interval: Interval, clock: Clock) -> bool:
        """Whether an interval of steps, epochs or time ends with the newest step."""
        if interval.seconds is not None:
            return clock.is_due(interval.seconds, self.first_seconds)
        return self.length.is_due(interval, self.step)

    def progress_now(self) -> Progress:
        return replace(self.progress, seconds=self.progress.seconds + time.monotonic() - self.started)


def open_run(config: RunConfig, prepared: Prepared, world: World, tell: Callable[[str], None]) -> Run:
    """Open the store, the model, the layout, the optimizer; resume if there is something to resume."""
    folder = RunFolder(Path(config.run))
    store, tokenizer = prepared.open(), prepared.tokenizer()
    objective = objective_of(config, tokenizer)
    if world.first:
        folder.claim()
    samples, validation = objective.dataset(store.train), Validation(objective, store.validation)
    check_blocks(samples, store.train, validation, config)
    objective.fit_statistics(store.train)
    length = run_length(config, samples, store.train)

    if config.checkpoint.copy_to is not None:
        if world.first:
            fetch_newest(folder.checkpoints, config, tell)
        world.barrier()
    tell("loading the model")
    ready = set_up_model(config, tokenizer, objective, samples, world, length.steps, tell)
    strategy, optimizer = ready.strategy, ready.optimizer
    resumed = bool(list_checkpoints(folder.checkpoints))
    set_reference(objective, store, strategy, world, ready.found.size, folder.before, resumed, tell)
    progress = load_checkpoint(folder.checkpoints, optimizer, tell) or Progress(store=store.digest)
    check_same_store(progress, store.digest)
    if progress.warmup is None:
        progress.warmup = config.train.warmup.of(length.steps)
    if world.first:
        if progress.step:
            commit(folder.checkpoints, progress, config.checkpoint)
        check_space(folder.checkpoints, checkpoint_bytes(strategy.model, config.train, strategy.dims.pipeline), tell)
    check_same_step(progress, strategy, world)

    tell(
        f"{len(samples):,} samples of up to {config.data.block} tokens · {length.steps:,} steps of "
        f"{config.train.batch} · {ready.told}"
    )
    if progress.step:
        tell(f"going on after step {progress.step}")
    steps = {"step": progress.step, "steps": length.steps}
    first = world.first
    peak = peak_flops(device_name(world.device), ready.precision)
    run = Run(
        config=config,
        folder=folder,
        mark=folder.identity(),  # after the first process has made it: all have met since
        world=world,
        tokenizer=tokenizer,
        objective=objective,
        samples=samples,
        validation=validation,
        order=objective.order(store.train, len(samples)),
        length=length,
        found=ready.found,
        limit=ready.limit,
        strategy=strategy,
        optimizer=optimizer,
        guard=Guard(config.train, folder.bad_steps, progress.step, first=first),
        saver=Saver(
            folder.checkpoints,
            optimizer,
            world,
            config.checkpoint,
            dump_run(config),
            shared=not strategy.dims.is_plain,
            tell=tell,
        ),
        trackers=Trackers(config if first else config.model_copy(update={"track": []}), folder, **steps),
        progress=progress,
        tell=tell,
        started=time.monotonic(),
        window=torch.zeros(len(objective.sums), device=world.device),
        norm=torch.zeros((), device=world.device),
        flops=None if peak is None else flops_a_token(strategy.model.config, objective.auto_class, config.data.block),
        peak=peak,
    )
    if ready.compiled and not run.is_over:
        tell("compiling the layers")
        run.trackers.busy("compiling")
        reason = try_compiled(strategy.model, lambda: strategy.probe_memory(run.take(run.step)[0]))
        if reason is not None:
            tell(f"the layers cannot be compiled, so they run as they are: {reason}")
    return run


def close_run(run: Run) -> Result:
    """Write the final model and the result; called when the last step is saved."""
    run.check_folder()
    for failure in run.saver.failures:
        run.tell(failure)
    progress = run.progress_now()
    model_step, saved = progress.step, checkpoint_path(run.folder.checkpoints, progress.step)
    whole = run.strategy.dims.is_plain and not run.optimizer.saves_collectively  # this process has all of the model
    best = run.folder.checkpoints / "best"
    if progress.stopped_early and best.exists():  # the last validations were worse; on a full disk there may be no best
        saved = best
        if whole:
            load_weights(best, run.strategy.model)
        found = read_progress(best)  # an earlier one, where the disk was full when the best was to be written
        model_step, progress.validation = found.step, found.best_validation
    result = {
        "run": str(run.folder.path),
        "steps": progress.step,
        "model_step": model_step,
        "tokens": progress.tokens,
        "train_loss": progress.train_loss,
        "validation": progress.validation,
        "tokens_per_second": tokens_a_second(progress.tokens, progress.train_seconds),
        "wall_seconds": progress.seconds,
        "peak_memory_gib": _peak_memory(run.world.device) / 2**30,
    }
    if run.world.first:
        weights = None if whole else full_weights(saved)
        save_model(
            run.strategy.model, run.tokenizer, run.folder.model, weights,
            kept=run.folder.foreign_in_model(), note=run.folder.note_model,
        )  # fmt: skip
        write_file(run.folder.result, orjson.dumps(result, option=orjson.OPT_INDENT_2))
        name = shlex.quote(str(run.folder.path))
        run.trackers.close()  # the bar ends before what is said of the end
        run.tell(f"{run.folder.path}: {progress.step:,} steps are done, the model is in {run.folder.model}; next:")
        run.tell(f"    {run.objective.command(name)}")
        for hint in run.trackers.hints:
            run.tell(f"    {hint}")
    run.world.barrier()
    return result


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Dropout depends on the step alone, not on what ran before it: a resumed run needs no stored random state."""
    return xxhash.xxh3_64_intdigest(f"dropout:{seed}:{step}:{rank}".encode()) >> 1


def _peak_memory(device: torch.device) -> int:
    """Bytes: of the device where there is one, else the largest resident size this process has had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
