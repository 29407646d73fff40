"""Start a run, or resume it: what `artel train` does on one host.

One process of the run leads: it holds the run's lock, checks the run, prepares its text and compares the run file with
that of an earlier start. Only then are the processes of this host started. A run of one process is trained in this one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artel.config import Overrides, RunConfig, RunFile, load_run
from artel.errors import InputError
from artel.interrupts import explained, in_main_thread
from artel.launching.accelerate import take_over
from artel.launching.begin_with_plan import begin_with_plan
from artel.launching.hosts import Hosts
from artel.launching.interface import choose_interface_of_process
from artel.launching.local import launch
from artel.launching.meeting import Meeting
from artel.launching.quiet_libraries import quiet_libraries
from artel.launching.read_run import SECRETS_NOTE, checked_run, has_secrets
from artel.launching.started import check_counts, check_worker, is_pod, read_launcher
from artel.launching.worker import end_with_launcher, is_worker, raising_lost_others
from artel.preparing import as_begun, prepare
from artel.preparing.progress import reporting
from artel.storage import check_cache, lock, write_file
from artel.storage.locks import holders
from artel.training.rank_file import mark_start, start_status
from artel.training.run_folder import RunFolder, is_done

if TYPE_CHECKING:
    from artel.planning.budget.choose import Choice
    from artel.preparing import Prepared
    from artel.training.callbacks import Callback

Announce = Callable[[str], None]

LED = "ARTEL_LED"
"""Variable with the process id of a parent that has prepared everything; set for the processes that it starts."""
_SAVE_SECONDS = 600  # as long as a launcher gives its processes to save


@dataclass(frozen=True, slots=True)
class StartOptions:
    """How a run is started on this host; the environment of a launcher says what is None."""

    nproc: int | None = None
    """Processes on this host."""
    nnodes: str | None = None
    """Hosts, `4` or `1:4`."""
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    """How often the processes of this host are started again after a failure."""
    local_rank: int | None = None
    """Of this process, from the launcher of deepspeed."""
    from_deepspeed: Path | None = None
    """A checkpoint of DeepSpeed with which a new run begins."""
    restart: bool = False
    """Empty the run's folder first."""
    force: bool = False
    """Train although the plan says that it cannot fit."""
    trackers: tuple[str, ...] = ()
    """Added to those of the run file."""


def start_run(
    file: RunFile,
    overrides: Overrides,
    options: StartOptions,
    announce: Announce,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train the run of a run file, or resume it; its result. `callbacks` go before those that the run file names.

    Raises InputError, WorkError, and Interrupted where a signal stopped the run after it was saved.
    """
    if in_main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):  # USR1: Slurm's warning that the time is nearly over
            signal.signal(number, signal.default_int_handler)  # like Ctrl-C, until the loop runs
    options = _read_environment(options)
    run, overrides = _read_run(file, overrides, options, announce)
    hosts = Hosts.read(
        options.nnodes,
        options.node_rank,
        options.master_addr,
        options.master_port,
        options.rdzv_endpoint,
        options.max_restarts,
    )
    processes = _processes_on_host(run, options.nproc, hosts)
    starts_others = not is_worker() and (processes > 1 or hosts.count > 1 or hosts.restarts > 0)
    if callbacks and starts_others:
        what, fix = "are objects of this process, and the run trains in others", "register them in a module: `plugins`"
        raise InputError.at("callbacks", what, fix)
    meeting = Meeting.of(hosts) if starts_others else None  # a wrong address fails before any text is prepared
    folder = RunFolder(Path(run.run))
    leads = LED not in os.environ and (os.environ.get("RANK", "0") == "0" if meeting is None else meeting.leads)
    if leads:
        folder.check_claim()  # before the lock, which is a file in it
        original = folder.original
        if original is not None:
            _check_copy(run, original)
        check_cache()
    with explained(lambda: folder.how_to_continue), lock(folder.lock, wait=False) if leads else nullcontext():
        if leads:
            if original is None:  # a copy is claimed when nothing of its run is refused
                folder.claim()
            announce(f"{folder.path}: checking the run, its model and its texts")
            _wait_for_earlier_processes(folder, announce)
        with start_status(folder) if leads else nullcontext():
            if leads:
                run = _lead(run, folder, options, processes, hosts, announce)
            else:
                run = _as_begun(prepare(run, announce).config)
            if not options.restart and is_done(run):  # with --restart the leader is emptying the folder
                folder.newest_model()  # refused if these are the weights of another model
                announce(f"{folder.path} is complete, its model is in {folder.model}; --restart starts over")
                return folder.read_result()
            if leads:
                mark_start(folder)  # --restart has emptied the folder, or a complete run is made longer
            if meeting is None:
                return _train_in_this_process(run, callbacks, announce)
            os.environ[LED] = str(os.getpid())
            with file.named() as name:
                launch(["train", name, *overrides.words], processes, meeting, folder, announce)
            return folder.read_result() if leads else {}


def _check_copy(run: RunConfig, original: Path) -> None:
    """Raise InputError if a copied run would write its checkpoints over those of the original, on S3."""
    address, has_begun = run.checkpoint.copy_to, RunFolder(original).config.is_file()
    if address is not None and has_begun and load_run(str(original)).checkpoint.copy_to == address:
        what = f"the run is a copy of {original}, whose checkpoints are copied to {address}"
        raise InputError.at("checkpoint.copy_to", what, "write another address for this run")


def _read_environment(options: StartOptions) -> StartOptions:
    """Options with what a launcher says of this process. Raises InputError where that cannot be true."""
    if options.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(options.local_rank))
    if options.nnodes is None and options.rdzv_endpoint is None:
        options = replace(options, **read_launcher(options.nproc))
        check_counts(options.nproc)
    elif is_pod():  # the options say which host this is, and RANK may count hosts or processes
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    check_worker()
    if LED in os.environ:
        end_with_launcher(int(os.environ[LED]))
    return options


def _read_run(
    file: RunFile, overrides: Overrides, options: StartOptions, announce: Announce
) -> tuple[RunConfig, Overrides]:
    """The run with the keys that accelerate and `options.trackers` set, and all overrides."""
    run = checked_run(file, overrides)
    taken = take_over(run)
    for note in taken.notes:
        announce(note)
    words = list(taken.overrides)
    trackers = [tracker for tracker in options.trackers if tracker not in run.track]
    if trackers:
        words.append(f"track={json.dumps([*run.track, *trackers])}")
    if words:
        overrides = overrides.adding(words)
        run = file.run(overrides)
    return run, overrides


def _wait_for_earlier_processes(folder: RunFolder, announce: Announce) -> None:
    """Wait until processes of an earlier start, whose launcher was killed, have saved and ended. Raises WorkError."""

    def waiting() -> None:
        announce(f"waiting for processes of an earlier start to save and end: {holders(folder.processes_lock)}")

    with lock(folder.processes_lock, waiting, wait=_SAVE_SECONDS):
        pass


def _processes_on_host(run: RunConfig, nproc: int | None, hosts: Hosts) -> int:
    """How many processes run on this host. Raises InputError where options or launcher and `parallel` disagree."""
    needed = run.parallel.processes
    if not isinstance(run.parallel.data, int):
        return nproc or (1 if is_worker() else -(-needed // hosts.count))
    if hosts.elastic:
        what = f"the run wants {needed} processes, and hosts may come and go"
        raise InputError.at("parallel.data", what, "write parallel.data=auto")
    on_host, rest = divmod(needed, hosts.count)
    started = needed if nproc is None else nproc * hosts.count
    if is_worker():
        started = int(os.environ["WORLD_SIZE"])
    elif nproc is None and rest:
        what = f"{hosts.count} hosts cannot share {needed} processes evenly"
        raise InputError.at("parallel.data", what, f"write a multiple of {hosts.count}")
    if started != needed:
        what = f"the run wants {needed} processes, and {started} are started"
        raise InputError.at("parallel.data", what, f"start {needed}, or write parallel.data=auto")
    return on_host


def _lead(
    run: RunConfig, folder: RunFolder, options: StartOptions, processes: int, hosts: Hosts, announce: Announce
) -> RunConfig:
    """Check the run with all its processes, prepare its text, and make its folder ready for this start.

    Returns the run with what was chosen for it.
    """
    quiet_libraries()
    from artel.planning import Check, Start, check_run
    from artel.preparing import remember
    from artel.training.same_run import check_same_run

    restart, from_deepspeed = options.restart, options.from_deepspeed
    original = folder.original
    restored = None if restart else folder.restore_config()
    if restored is not None:
        announce(f"{folder.config} was gone: it is written again from {restored}")
    if from_deepspeed is not None and not restart and any(folder.checkpoints.glob("step-*")):
        announce(
            f"{folder.path} has begun, and resumes from its own checkpoint; --restart begins from {from_deepspeed}"
        )
        from_deepspeed = None
    checks = [Check(("model", "train", "parallel"), lambda: _check_deepspeed(run, from_deepspeed))]
    if restart:
        checks.append(Check(("run",), folder.check_model_is_artels))
    world = int(os.environ.get("WORLD_SIZE", processes * hosts.count))
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    check_run(run, Start(world, on_host, hub=True), checks)  # text and model together, before hours of tokenizing
    if has_secrets(run):
        announce(SECRETS_NOTE)
    began = time.monotonic()
    is_over = not restart and is_done(_as_begun(run))
    if run.model.auto and not is_over:
        _check_shortest(run, world, on_host, restart, announce)
    prepared = prepare(run, announce, verify=not is_over)
    run = prepared.config
    announce(prepared.summary())
    if run.train.budget is not None:
        seconds = time.monotonic() - began
        announce(f"preparing the text took {seconds:,.1f} s; that does not count towards train.budget")
    choice = None
    if run.model.auto:
        run, choice = _with_choice(run, world, on_host, restart, announce)
    run = _with_packing(run, prepared, restart, announce)
    if not is_over:
        if restart or not any(folder.checkpoints.glob("step-*")):
            _note_unreached(run, prepared, announce)
        nodes = hosts.least if hosts.elastic else world // on_host
        begin_with_plan(run, prepared, on_host, nodes, options.force, announce)
        if choice is not None and folder.plan.exists():
            announce(f"plan: {choice.expected.beside_plan()}")
    if not restart:
        check_same_run(run, prepared)
    if copied := folder.claim(original):
        announce(copied)
    if restart:  # only now: a mistake in the run file or the texts must not cost the earlier run
        _remove_earlier(run, folder)
        check_same_run(run, prepared)
    if choice is not None:  # only now: the folder may be another run's
        write_file(folder.choice, json.dumps(choice.to_json(), indent=2).encode())
    remember(run, prepared)
    shutil.copyfile(prepared.folder / "ledger.json", folder.ledger)
    if from_deepspeed is not None:
        _begin_from_deepspeed(run, prepared, from_deepspeed, announce)
    return run


def _as_begun(run: RunConfig) -> RunConfig:
    """The run with what was chosen for it as it began (`model.auto`, `data.packing: auto`), where it has begun."""
    from artel.training.same_run import with_earlier_choice, with_earlier_packing

    return as_begun(with_earlier_packing((with_earlier_choice(run) or run) if run.model.auto else run))


def _note_unreached(run: RunConfig, prepared: Prepared, announce: Announce) -> None:
    """Announce settings that cannot act in a run of this length. Raises InputError for a warmup far beyond its end."""
    from artel.training.lengthening import prepared_length
    from artel.training.unreached import unreached_settings

    length = prepared_length(run, prepared)
    for note in unreached_settings(run, length) if length.samples else ():
        announce(note)


def _with_packing(run: RunConfig, prepared: Prepared, restart: bool, announce: Announce) -> RunConfig:
    """The run with a choice in place of `data.packing: auto`: that with which it began, or one that is made now."""
    from artel.training.packing import AUTO, choose_packing, with_packing
    from artel.training.same_run import with_earlier_packing

    run = run if restart else with_earlier_packing(run)
    if run.data.packing != AUTO:
        return run
    choice = choose_packing(run, prepared.open().train)
    if choice.why:
        announce(f"data.packing={choice.value}: {choice.why}")
    return with_packing(run, choice.value)


def _check_shortest(run: RunConfig, world: int, on_host: int, restart: bool, announce: Announce) -> None:
    """Raise InputError, before a text is prepared, for a budget too short for the smallest model."""
    from artel.planning.budget.choose import TRYING, check_before_text, is_doubtful
    from artel.planning.hardware import find_hardware
    from artel.preparing import is_prepared
    from artel.training.same_run import with_earlier_choice

    has_begun = not restart and with_earlier_choice(run) is not None
    if not has_begun and is_doubtful(run, find_hardware()) and not is_prepared(run):
        announce(TRYING)
        check_before_text(run, world, on_host)


def _with_choice(
    run: RunConfig, world: int, on_host: int, restart: bool, announce: Announce
) -> tuple[RunConfig, Choice | None]:
    """The run with a model in place of `model.auto`, and the choice; None where the run began with an earlier one."""
    from artel.planning import Start, check_run
    from artel.planning.budget.choose import CHOOSING, choose
    from artel.planning.hardware import find_hardware
    from artel.training.same_run import with_earlier_choice

    chosen, choice = None if restart else with_earlier_choice(run), None
    if chosen is None:
        announce(CHOOSING)
        choice = choose(run, find_hardware(), world, on_host, announce)
        for line in choice.lines:
            announce(line)
        chosen = choice.run
    check_run(chosen, Start(world, on_host, texts=False))
    return chosen, choice


def _remove_earlier(run: RunConfig, folder: RunFolder) -> None:
    from artel.training.checkpoint.s3_mirror import remove_copies

    if run.checkpoint.copy_to is not None:  # before the folder: copies that cannot be removed would come back
        remove_copies(run.checkpoint.copy_to)
    folder.empty()


def _check_deepspeed(run: RunConfig, from_deepspeed: Path | None) -> None:
    if from_deepspeed is not None:
        from artel.inference.deepspeed_checkpoints import check_beginning

        check_beginning(run, from_deepspeed)


def _begin_from_deepspeed(run: RunConfig, prepared: Prepared, from_deepspeed: Path, announce: Announce) -> None:
    from artel.inference.deepspeed_checkpoints import begin_run

    begin_run(run, prepared, from_deepspeed, announce)


def _train_in_this_process(run: RunConfig, callbacks: Sequence[Callback], announce: Announce) -> dict[str, Any]:
    announce("starting to train")
    quiet_libraries()
    from artel.parallel import join_world
    from artel.registry import CALLBACKS
    from artel.training.loop import train
    from artel.training.same_run import with_earlier_choice, with_earlier_packing

    choose_interface_of_process()
    processes_lock = lock(RunFolder(Path(run.run)).processes_lock, wait=False, shared=True)
    rank, size = (os.environ.get(name, "1") for name in ("RANK", "WORLD_SIZE"))
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    others = f"process {rank} waits for the other processes of {size}, which meet at {where}"
    says = size != "1" and os.environ.get("LOCAL_RANK", "0") == "0"
    with ExitStack() as stack:
        with reporting(announce, lambda: others) if says else nullcontext():
            world = stack.enter_context(join_world(run.train.threads))
        stack.enter_context(raising_lost_others())
        stack.enter_context(processes_lock)
        if LED in os.environ:  # now the next start of this run waits for this process
            end_with_launcher(int(os.environ[LED]))
        if run.model.auto:  # another process led the run, and has written what was chosen
            run = with_earlier_choice(run, begun=False) or run
        run = with_earlier_packing(run, begun=False)
        own = [CALLBACKS[name]() for name in run.callbacks]
        every = [*callbacks, *own]
        prepared = prepare(as_begun(run), announce)
        return train(prepared.config, prepared, world, announce, every, make_report=partial(_report, run.run))


def _report(folder: str) -> str | None:
    """The report of a run as a page, where plotly is installed."""
    if find_spec("plotly") is None:
        return None
    from artel.reports.page import Page
    from artel.reports.run_data import read_run

    return Page().html([read_run(folder)])
