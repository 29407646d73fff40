"""`artel train`: prepare, start the processes, train; the same command again goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from artel.cli.common import AsJson, Overrides, RunName, print_json, quiet_libraries, read_run, tell, tell_of_secrets

if TYPE_CHECKING:
    from artel.config import RunConfig
    from artel.launching import Hosts
    from artel.training.run_folder import RunFolder


def train(
    name: RunName,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on this host; else as many as the numbers in `parallel` need.")
    ] = None,
    nnodes: Annotated[
        str | None, typer.Option(help="Hosts, as 4, or as 1:4 when they may come and go; else NNODES.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(help="Which host this is, from 0; else NODE_RANK.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address of the first host; else MASTER_ADDR.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port there; else MASTER_PORT.")] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="ADDRESS:PORT of one host, at which all meet, without --node-rank.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often this host's processes are started again when one fails.")
    ] = 0,
    deepspeed: Annotated[
        str | None, typer.Option("--deepspeed", "--deepspeed_config", help="The same as parallel.deepspeed=FILE.")
    ] = None,
    from_deepspeed: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Begin where DeepSpeed's checkpoint in DIR stands: weights, optimizer, step."),
    ] = None,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew: the run's folder is emptied first.")] = False,
    report_to: Annotated[str | None, typer.Option(help="Add trackers, as tensorboard or wandb.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a run, or go on with it. Stop with Ctrl-C; the same command goes on from there.

    Example: artel train run.yaml --nproc 2 train.learning_rate=3e-4
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is there: it warns of hosts without names
    from artel.config import load_run
    from artel.launching import (
        Hosts,
        Meeting,
        check_worker,
        end_with_launcher,
        is_worker,
        launch,
        read_launcher,
        take_over,
    )
    from artel.preparing import prepare
    from artel.storage import check_cache, lock
    from artel.training.run_folder import RunFolder, is_done

    signal.signal(signal.SIGUSR1, signal.default_int_handler)  # Slurm's warning: until training listens, as Ctrl-C
    if local_rank is not None:  # which the launcher of deepspeed gives to each process
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    if nnodes is None and rdzv_endpoint is None:
        read_launcher(nproc)
    check_worker()
    if _LED in os.environ:
        end_with_launcher(int(os.environ[_LED]))
    values = list(overrides or [])
    if deepspeed is not None:
        values.append(f"parallel.deepspeed={json.dumps(deepspeed)}")
    run = read_run(name, values)
    taken = take_over(run)
    for line in taken.told:
        tell(line)
    if taken.overrides:
        values += taken.overrides
        run = load_run(name, values)
    if report_to:
        tracks = [*run.track, *(track for track in report_to.split(",") if track not in run.track)]
        values.append(f"track={json.dumps(tracks)}")
        run = load_run(name, values)
    hosts = Hosts.read(nnodes, node_rank, master_addr, master_port, rdzv_endpoint, max_restarts)
    processes = _processes_here(run, nproc, hosts)
    starts = not is_worker() and (processes > 1 or hosts.count > 1 or hosts.restarts > 0)
    meeting = Meeting.of(hosts) if starts else None  # a wrong address is told before any text is prepared
    folder = RunFolder(Path(run.run))
    # One process leads: it holds the run's lock, prepares the text and compares the run file before others start.
    leads = _LED not in os.environ and (os.environ.get("RANK", "0") == "0" if meeting is None else meeting.leads)
    if leads:
        folder.check_claim()  # before the lock, which is a file too
        check_cache()
    with lock(folder.lock, wait=False) if leads else nullcontext():
        if leads:
            folder.claim()
            tell(f"{folder.path}: checking the run, its model and its texts")
            _await_processes(folder)
            world = int(os.environ.get("WORLD_SIZE", processes * hosts.count))
            _lead(run, folder, restart, world, int(os.environ.get("LOCAL_WORLD_SIZE", processes)), from_deepspeed)
        else:
            prepare(run, tell)
        if not restart and is_done(run):  # with --restart the leader is just emptying the folder
            tell(f"{folder.path} is complete, its model is in {folder.model}; --restart begins anew")
            result = folder.read_result()
        elif meeting is not None:
            os.environ[_LED] = str(os.getpid())
            launch(["train", name, *values], processes, meeting, folder, tell)
            result = folder.read_result() if leads else {}
        else:
            result = _work(run)
    if as_json:
        print_json(result)


_LED = "ARTEL_LED"  # the process id of a parent that has prepared everything, set for its workers


# As long as a launcher gives its processes to save.
_ENDING_SECONDS = 600


def _await_processes(folder: RunFolder) -> None:
    """Wait for processes of an earlier start, whose launcher was killed: they save, and end. Raises WorkError."""
    from artel.storage.locks import holders, lock

    def waiting() -> None:
        tell(f"waiting for what an earlier start has left to save and end: {holders(folder.processes_lock)}")

    with lock(folder.processes_lock, waiting, wait=_ENDING_SECONDS):
        pass


def _processes_here(run: RunConfig, nproc: int | None, hosts: Hosts) -> int:
    """How many processes run on this host. Raises InputError when flags or launcher and `parallel` disagree."""
    from artel.errors import InputError
    from artel.launching import is_worker

    wanted = run.parallel.processes
    if not isinstance(run.parallel.data, int):
        return nproc or (1 if is_worker() else -(-wanted // hosts.count))
    if hosts.elastic:
        what, fix = f"the run wants {wanted} processes, and hosts may come and go", "write parallel.data=auto"
        raise InputError.at("parallel.data", what, fix)
    here, rest = divmod(wanted, hosts.count)
    started = wanted if nproc is None else nproc * hosts.count
    if is_worker():
        started = int(os.environ["WORLD_SIZE"])
    elif nproc is None and rest:
        what, fix = f"{hosts.count} hosts cannot share {wanted} processes evenly", f"write a multiple of {hosts.count}"
        raise InputError.at("parallel.data", what, fix)
    if started != wanted:
        what = f"the run wants {wanted} processes, and {started} are started"
        raise InputError.at("parallel.data", what, f"start {wanted}, or write parallel.data=auto")
    return here


def _lead(run: RunConfig, folder: RunFolder, restart: bool, world: int, here: int, from_deepspeed: Path | None) -> None:
    """Check what can be checked of a run for `world` processes, `here` of them on this host, and prepare its text."""
    quiet_libraries()
    from artel.planning import Check, Start, check_run
    from artel.preparing import prepare, remember
    from artel.training.checkpoint.s3_mirror import remove_copies
    from artel.training.run_folder import check_same_run, is_done

    if from_deepspeed is not None and not restart and any(folder.checkpoints.glob("step-*")):
        tell(f"{folder.path} has begun, and goes on from its own checkpoint; --restart begins from {from_deepspeed}")
        from_deepspeed = None
    further = [Check(("model", "train", "parallel"), lambda: _check_beginning(run, from_deepspeed))]
    if restart:
        further.append(Check(("run",), folder.check_model_is_artels))
    check_run(run, Start(world, here, hub=True), further)  # text and model together, before hours of tokenizing
    tell_of_secrets(run)
    prepared = prepare(run, tell, verify=restart or not is_done(run))
    tell(prepared.summary())
    if restart:  # only now: a mistake in the run file or the texts must not cost the earlier run
        if run.checkpoint.copy_to is not None:  # first: where they cannot be removed, they would come back
            remove_copies(run.checkpoint.copy_to)
        folder.empty()
    check_same_run(run, prepared)
    remember(run, prepared)
    shutil.copyfile(prepared.folder / "ledger.json", folder.ledger)
    if from_deepspeed is not None:
        from artel.inference.deepspeed.from_checkpoint import begin_run

        begin_run(run, prepared, from_deepspeed, tell)


def _check_beginning(run: RunConfig, from_deepspeed: Path | None) -> None:
    if from_deepspeed is not None:
        from artel.inference.deepspeed.from_checkpoint import check_beginning

        check_beginning(run, from_deepspeed)


def _work(run: RunConfig) -> dict[str, Any]:
    tell("starting to train")
    quiet_libraries()
    from artel.launching import choose_interface_of_process, end_with_launcher, lost_others_told
    from artel.parallel import join_world
    from artel.preparing import prepare
    from artel.registry import CALLBACKS
    from artel.storage import lock
    from artel.training.loop import train as train_run
    from artel.training.run_folder import RunFolder

    choose_interface_of_process()
    held = lock(RunFolder(Path(run.run)).processes_lock, wait=False, shared=True)
    with join_world(run.train.threads) as world, lost_others_told(), held:
        if _LED in os.environ:  # who starts the run anew knows of this process only from now on
            end_with_launcher(int(os.environ[_LED]))
        callbacks = [CALLBACKS[name]() for name in run.callbacks]
        return train_run(run, prepare(run, tell), world, tell, callbacks)
