"""`artel launch`: a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artel.cli.common import AsJson, OverrideWords, RunName, echo, print_json
from artel.cli.streams import show
from artel.launching.quiet_libraries import quiet_libraries

if TYPE_CHECKING:
    from artel.config import RunConfig

app = typer.Typer(no_args_is_help=True, help="Start a run on a cluster, where it continues by itself.")


@app.callback()
def launch() -> None:
    """Start a run on a cluster, where it continues by itself."""


@app.command(short_help="Hand a run to Slurm: it saves and queues itself again.")
def slurm(
    name: RunName,
    overrides: OverrideWords = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on each node; else one for each GPU, or 1.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each node.")] = 0,
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores of each node.")] = None,
    time: Annotated[str | None, typer.Option(help="Time of one turn, as 12:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often a node's processes are started again when one fails.")
    ] = 0,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Any other of sbatch, as account=nlp.")
    ] = None,
    setup: Annotated[
        list[str] | None, typer.Option(metavar="LINE", help="A line of the script before the run: 'module load cuda'.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Hand a run to Slurm: a batch script that saves and queues itself again until the run is complete.

    Example: artel launch slurm run.yaml --nodes 2 --gpus 8 --cpus 64 --time 12:00:00 --dry-run
    """
    from artel.config import Overrides
    from artel.errors import InputError, Problem
    from artel.launching.read_run import read_run
    from artel.launching.slurm import Job, slurm_script, submit

    values = Overrides.parse(overrides)
    config = read_run(name, values, here=False)
    on_host = nproc or gpus or 1
    _check(config, nodes * on_host, on_host)
    folder = Path(config.run)
    wrong = [text for text in option or [] if "=" not in text]
    if wrong:
        raise InputError(
            [Problem("--option", f"{text!r} has no =", "write NAME=VALUE, as account=nlp") for text in wrong]
        )
    options = dict(text.split("=", 1) for text in option or [])
    job = Job(nodes, nproc, gpus, cpus, time, partition, max_restarts, options, tuple(setup or ()))
    script = slurm_script(name, values.words, folder, job)
    if dry_run:
        number = None
        if not as_json:
            show(script, end="")
    else:
        number = submit(script, folder)
        echo(f"job {number}; its log is {folder / f'slurm-{number}.log'}")
    if as_json:
        print_json({"job": number, "script": script})


def _check(config: RunConfig, world: int, on_host: int) -> None:
    """Check the run before it is queued. The devices of the job's machines are unknown here."""
    quiet_libraries()
    from artel.planning import Start, check_run

    check_run(config, Start(world, on_host, here=False))
