"""Start or resume a run on this host: `artel train`.

One process leads the run. It holds the run's lock, checks the run, prepares its text and compares the run file with
the one of an earlier start. Then it starts the processes of this host. A single-process run trains in this process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artel.config import Overrides, RunConfig, RunFile, load_run
from artel.errors import InputError
from artel.integers import ceil_div
from artel.interrupts import explain_interrupt, in_main_thread
from artel.launching.hosts import Hosts, choose_process_interface
from artel.launching.launcher_environment import accelerate_settings, check_counts, check_worker, is_pod, read_launcher
from artel.launching.local import launch, log_waiting
from artel.launching.plan_run import plan_at_start
from artel.launching.quiet_libraries import quiet_libraries
from artel.launching.read_run import SECRETS_NOTE, has_secrets, validate_run_file
from artel.launching.rendezvous import Rendezvous
from artel.launching.worker import end_with_launcher, is_worker, raise_lost_peers
from artel.messages import logger
from artel.preparing import prepare, with_recorded_values
from artel.storage import check_cache, lock, write_file
from artel.storage.locks import lock_holders
from artel.training.rank_file import mark_start, start_status
from artel.training.run_folder import RunFolder, is_done

if TYPE_CHECKING:
    from artel.planning.budget.choose import ModelChoice
    from artel.preparing import PreparedText
    from artel.training.callbacks import Callback


LAUNCHED = "ARTEL_LAUNCHED"
"""Variable with the process id of a parent that has prepared everything; set for the processes that it starts."""
_SAVE_SECONDS = 600  # as long as a launcher gives its processes to save


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options for starting a run on this host. None is read from the environment of a launcher."""

    nproc: int | None = None
    """Processes on this host."""
    nnodes: str | None = None
    """Number of hosts, `4` or `1:4`."""
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    """Maximum number of restarts of the processes of this host after a failure."""
    local_rank: int | None = None
    """Local rank of this process, from the launcher of deepspeed."""
    from_deepspeed: Path | None = None
    """A DeepSpeed checkpoint to begin a new run from."""
    restart: bool = False
    """Empty the run's folder first."""
    force: bool = False
    """Train even if the plan says that it cannot fit."""
    trackers: tuple[str, ...] = ()
    """Trackers to add to the run file's."""


def start_run(
    file: RunFile, overrides: Overrides, options: StartOptions, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Train or resume the run of a run file and return its result. `callbacks` run before the run file's.

    Raise InputError, WorkError, or Interrupted if a signal stopped the run after saving.
    """
    if in_main_thread():
        for stop_signal in (signal.SIGTERM, signal.SIGUSR1):  # USR1: Slurm's warning that the time is nearly over
            signal.signal(stop_signal, signal.default_int_handler)  # like Ctrl-C, until the loop runs
    options = _read_environment(options)
    config, overrides = _read_run(file, overrides, options)
    hosts = Hosts.read(
        options.nnodes,
        options.node_rank,
        options.master_addr,
        options.master_port,
        options.rdzv_endpoint,
        options.max_restarts,
    )
    processes = _processes_on_host(config, options.nproc, hosts)
    starts_processes = not is_worker() and (processes > 1 or hosts.count > 1 or hosts.restarts > 0)
    if callbacks and starts_processes:
        what = "are objects of this process, but the run trains in other processes"
        fix = "register them in a module named in `plugins`"
        raise InputError.at("callbacks", what, fix)
    # Here, so that a wrong address fails before any text is prepared.
    rendezvous = Rendezvous.open(hosts) if starts_processes else None
    folder = RunFolder(Path(config.run))
    leads = LAUNCHED not in os.environ and (
        os.environ.get("RANK", "0") == "0" if rendezvous is None else rendezvous.leads
    )
    if leads:
        folder.check_claim()  # before the lock, which is a file in it
        original = folder.original
        if original is not None:
            _check_copy_address(config, original)
        check_cache()
    with explain_interrupt(lambda: folder.continue_hint), lock(folder.lock, wait=False) if leads else nullcontext():
        if leads:
            if original is None:  # a copy is claimed when nothing of its run is refused
                folder.claim()
            logger.info("%s: checking the run, its model and its texts", folder.path)
            _wait_for_earlier_processes(folder)
        with start_status(folder) if leads else nullcontext():
            config = (
                _prepare_as_leader(config, folder, options, processes, hosts)
                if leads
                else _with_recorded_values(prepare(config).config)
            )
            if not options.restart and is_done(config):  # with --restart the leader is emptying the folder
                folder.newest_model()  # refused if these are the weights of another model
                logger.info("%s is complete, its model is in %s; --restart starts over", folder.path, folder.model)
                return folder.read_result()
            if leads:
                mark_start(folder)  # --restart has emptied the folder, or a complete run is made longer
            if rendezvous is None:
                return _train_in_this_process(config, callbacks)
            os.environ[LAUNCHED] = str(os.getpid())
            with file.as_file() as name:
                launch(["train", name, *overrides.words], processes, rendezvous, folder)
            return folder.read_result() if leads else {}


def _check_copy_address(config: RunConfig, original: Path) -> None:
    """Raise InputError if a copied run would overwrite the checkpoints of the original on S3."""
    address = config.checkpoint.copy_to
    if address is None or not RunFolder(original).config.is_file():
        return
    if load_run(str(original)).checkpoint.copy_to == address:
        what = f"the run is a copy of {original}, whose checkpoints are copied to {address}"
        raise InputError.at("checkpoint.copy_to", what, "use another address for this run")


def _read_environment(options: StartOptions) -> StartOptions:
    """Complete options from the environment of a launcher. Raise InputError if that is inconsistent."""
    if options.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(options.local_rank))
    if options.nnodes is None and options.rdzv_endpoint is None:
        options = replace(options, **read_launcher(options.nproc))
        check_counts(options.nproc)
    elif is_pod():  # the options identify this host; RANK may count hosts or processes
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    check_worker()
    if LAUNCHED in os.environ:
        end_with_launcher(int(os.environ[LAUNCHED]))
    return options


def _read_run(file: RunFile, overrides: Overrides, options: StartOptions) -> tuple[RunConfig, Overrides]:
    """Return the run, and its overrides with the keys set by accelerate and `options.trackers`."""
    config = validate_run_file(file, overrides)
    accelerate = accelerate_settings(config)
    for note in accelerate.notes:
        logger.info(note)
    words = list(accelerate.overrides)
    trackers = [tracker for tracker in options.trackers if tracker not in config.track]
    if trackers:
        words.append(f"track={json.dumps([*config.track, *trackers])}")
    if words:
        overrides = overrides.with_arguments(words)
        config = file.run(overrides)
    return config, overrides


def _wait_for_earlier_processes(folder: RunFolder) -> None:
    """Wait until processes of an earlier start, whose launcher was killed, have ended. Raise WorkError if they hang."""

    def on_wait() -> None:
        logger.info(
            "waiting for processes of an earlier start to save and end: %s", lock_holders(folder.processes_lock)
        )

    with lock(folder.processes_lock, on_wait, wait=_SAVE_SECONDS):
        pass


def _processes_on_host(config: RunConfig, nproc: int | None, hosts: Hosts) -> int:
    """Return the number of processes on this host. Raise InputError if options, launcher and `parallel` disagree."""
    needed = config.parallel.processes
    if not isinstance(config.parallel.data, int):
        return nproc or (1 if is_worker() else ceil_div(needed, hosts.count))
    if hosts.elastic:
        what = f"the run needs {needed} processes, but hosts may join and leave"
        raise InputError.at("parallel.data", what, "set parallel.data=auto")
    local_size, remainder = divmod(needed, hosts.count)
    started = needed if nproc is None else nproc * hosts.count
    if is_worker():
        started = int(os.environ["WORLD_SIZE"])
    elif nproc is None and remainder:
        what = f"{hosts.count} hosts cannot share {needed} processes evenly"
        raise InputError.at("parallel.data", what, f"use a multiple of {hosts.count}")
    if started != needed:
        what = f"the run needs {needed} processes, but {started} are started"
        raise InputError.at("parallel.data", what, f"start {needed}, or set parallel.data=auto")
    return local_size


def _prepare_as_leader(
    config: RunConfig, folder: RunFolder, options: StartOptions, processes: int, hosts: Hosts
) -> RunConfig:
    """Check the run with all its processes, prepare its text, and make its folder ready for this start.

    Return the run with all choices made.
    """
    quiet_libraries()
    from artel.planning import Check, StartConditions, check_run
    from artel.preparing import record_prepared
    from artel.training.same_run import check_same_run

    restart = options.restart
    from_deepspeed = options.from_deepspeed
    original = folder.original
    restored = None if restart else folder.restore_config()
    if restored is not None:
        logger.info("%s was missing: restored it from %s", folder.config, restored)
    if from_deepspeed is not None and not restart and any(folder.checkpoints.glob("step-*")):
        logger.info(
            "%s has its own checkpoint and resumes from it; --restart would begin from %s", folder.path, from_deepspeed
        )
        from_deepspeed = None
    checks = [Check(("model", "train", "parallel"), lambda: _check_deepspeed(config, from_deepspeed))]
    if restart:
        checks.append(Check(("run",), folder.check_model_ownership))
    world = int(os.environ.get("WORLD_SIZE", processes * hosts.count))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    # Text and model together, before hours of tokenizing.
    check_run(config, StartConditions(world, local_size, may_download=True), checks)
    if has_secrets(config):
        logger.info(SECRETS_NOTE)
    start = time.monotonic()
    is_complete = not restart and is_done(_with_recorded_values(config))
    if config.model.auto and not is_complete:
        _check_min_budget(config, world, local_size, restart)
    prepared = prepare(config, verify=not is_complete)
    config = prepared.config
    logger.info(prepared.summary())
    if config.train.budget is not None:
        seconds = time.monotonic() - start
        logger.info("preparing the text took %s s, which does not count towards train.budget", f"{seconds:,.1f}")
    choice = None
    if config.model.auto:
        config, choice = _choose_model(config, world, local_size, restart)
    config = _choose_packing(config, prepared, restart)
    if not is_complete:
        if restart or not any(folder.checkpoints.glob("step-*")):
            _note_unreached_settings(config, prepared)
        nodes = hosts.least if hosts.elastic else world // local_size
        plan_at_start(config, prepared, local_size, nodes, options.force)
        if choice is not None and folder.plan.exists():
            logger.info("plan: %s", choice.expected.speed_note())
    if not restart:
        check_same_run(config, prepared)
    if copied := folder.claim(original):
        logger.info(copied)
    if restart:  # only now: a mistake in the run file or the texts must not cost the earlier run
        _remove_earlier_run(config, folder)
        check_same_run(config, prepared)
    if choice is not None:  # only now: the folder may be another run's
        write_file(folder.choice, json.dumps(choice.to_json(), indent=2).encode())
    record_prepared(config, prepared)
    shutil.copyfile(prepared.folder / "ledger.json", folder.ledger)
    if from_deepspeed is not None:
        from artel.inference.deepspeed_checkpoints import write_first_checkpoint

        write_first_checkpoint(config, prepared, from_deepspeed)
    return config


def _with_recorded_values(config: RunConfig) -> RunConfig:
    """Return the run with the choices of its first start (`model.auto`, `data.packing: auto`), if there was one."""
    from artel.training.same_run import restore_choice, restore_packing

    return with_recorded_values(restore_packing((restore_choice(config) or config) if config.model.auto else config))


def _note_unreached_settings(config: RunConfig, prepared: PreparedText) -> None:
    """Announce settings without effect in a run of this length. Raise InputError for a warmup far beyond its end."""
    from artel.training.lengthening import prepared_length
    from artel.training.unused_settings import find_unused_settings

    length = prepared_length(config, prepared)
    for note in find_unused_settings(config, length) if length.samples else ():
        logger.info(note)


def _choose_packing(config: RunConfig, prepared: PreparedText, restart: bool) -> RunConfig:
    """Return the run with `data.packing: auto` resolved: as in its first start, or now."""
    from artel.training.packing import AUTO, choose_packing, with_packing
    from artel.training.same_run import restore_packing

    config = config if restart else restore_packing(config)
    if config.data.packing != AUTO:
        return config
    choice = choose_packing(config, prepared.open().train)
    if choice.why:
        logger.info("data.packing=%s: %s", choice.value, choice.why)
    return with_packing(config, choice.value)


def _check_min_budget(config: RunConfig, world: int, local_size: int, restart: bool) -> None:
    """Raise InputError, before a text is prepared, for a budget too short for the smallest model."""
    from artel.planning.budget.choose import TRYING_MESSAGE, check_budget_before_text, is_doubtful
    from artel.planning.hardware import find_hardware
    from artel.preparing import is_prepared
    from artel.training.same_run import restore_choice

    has_begun = not restart and restore_choice(config) is not None
    if not has_begun and is_doubtful(config, find_hardware()) and not is_prepared(config):
        logger.info(TRYING_MESSAGE)
        check_budget_before_text(config, world, local_size)


def _choose_model(
    config: RunConfig, world: int, local_size: int, restart: bool
) -> tuple[RunConfig, ModelChoice | None]:
    """Return the run with a model in place of `model.auto`, and the choice; None if it was made in an earlier start."""
    from artel.planning import StartConditions, check_run
    from artel.planning.budget.choose import CHOOSING_MESSAGE, choose_model
    from artel.planning.hardware import find_hardware
    from artel.training.same_run import restore_choice

    chosen = None if restart else restore_choice(config)
    choice = None
    if chosen is None:
        logger.info(CHOOSING_MESSAGE)
        choice = choose_model(config, find_hardware(), world, local_size)
        for line in choice.lines:
            logger.info(line)
        chosen = choice.config
    check_run(chosen, StartConditions(world, local_size, checks_texts=False))
    return chosen, choice


def _remove_earlier_run(config: RunConfig, folder: RunFolder) -> None:
    from artel.training.checkpoint.s3_mirror import remove_copies

    if config.checkpoint.copy_to is not None:  # before the folder: copies that cannot be removed would come back
        remove_copies(config.checkpoint.copy_to)
    folder.empty()


def _check_deepspeed(config: RunConfig, from_deepspeed: Path | None) -> None:
    if from_deepspeed is not None:
        from artel.inference.deepspeed_checkpoints import check_deepspeed_checkpoint

        check_deepspeed_checkpoint(config, from_deepspeed)


def _train_in_this_process(config: RunConfig, callbacks: Sequence[Callback]) -> dict[str, Any]:
    logger.info("starting to train")
    quiet_libraries()
    from artel.parallel import join_world
    from artel.registry import CALLBACKS
    from artel.training.loop import train
    from artel.training.same_run import restore_choice, restore_packing

    choose_process_interface()
    folder = RunFolder(Path(config.run))
    processes_lock = lock(folder.processes_lock, wait=False, shared=True)
    rank, world_size = (os.environ.get(name, "1") for name in ("RANK", "WORLD_SIZE"))
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    message = f"process {rank} waits for the other processes ({world_size} in all) at {where}"
    logs_waiting = world_size != "1" and os.environ.get("LOCAL_RANK", "0") == "0"
    with ExitStack() as stack:
        leads = os.environ.get("RANK", "0") == "0"
        with log_waiting(folder, message if logs_waiting else "", leads=leads):
            world = stack.enter_context(join_world(config.train.threads))
        stack.enter_context(raise_lost_peers())
        stack.enter_context(processes_lock)
        if LAUNCHED in os.environ:  # now the next start of this run waits for this process
            end_with_launcher(int(os.environ[LAUNCHED]))
        if config.model.auto:  # another process led the run, and has written what was chosen
            config = restore_choice(config, needs_checkpoint=False) or config
        config = restore_packing(config, needs_checkpoint=False)
        callbacks = [*callbacks, *(CALLBACKS[name]() for name in config.callbacks)]
        prepared = prepare(with_recorded_values(config))
        return train(prepared.config, prepared, world, callbacks, make_report=partial(_render_report, config.run))


def _render_report(folder: str) -> str | None:
    """Return the report of a run as a page, if plotly is installed."""
    if find_spec("plotly") is None:
        return None
    from artel.reports.page import Page
    from artel.reports.run_data import read_run

    return Page().html([read_run(folder)])
