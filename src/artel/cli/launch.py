"""`artel launch`: start a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artel.cli.common import AsJson, OverrideWords, RunName, print_json, print_status
from artel.cli.streams import print_result
from artel.launching.quiet_libraries import quiet_libraries

if TYPE_CHECKING:
    from artel.config import RunConfig

app = typer.Typer(no_args_is_help=True, help="Start a run on a cluster that resumes automatically.")


@app.callback()
def launch() -> None:
    """Start a run on a cluster that resumes automatically."""


@app.command(short_help="Submit a run to Slurm; it requeues itself until it is complete.")
def slurm(
    name: RunName,
    overrides: OverrideWords = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes per node (default: one per GPU, or 1).")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs per node.")] = 0,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores per node.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit of one job, e.g. 12:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Maximum restarts of a node's processes after failures.")
    ] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another option of sbatch, e.g. account=nlp. Repeatable."),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", help="Script line before the run, e.g. 'module load cuda'. Repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script without submitting it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a run to Slurm as a batch script that saves and requeues itself until the run is complete.

    Example: artel launch slurm run.yaml --nodes 2 --gpus 8 --cpus 64 --time 12:00:00 --dry-run
    """
    from artel.config import Overrides
    from artel.errors import InputError, Problem
    from artel.launching.read_run import read_run
    from artel.launching.slurm import Job, slurm_script, submit

    values = Overrides.parse(overrides)
    config = read_run(name, values, here=False)
    processes_per_node = nproc or gpus or 1
    _check_config(config, nodes * processes_per_node, processes_per_node)
    folder = Path(config.run)
    fix = "write NAME=VALUE, e.g. account=nlp"
    problems = [Problem("--option", f"{text!r} has no =", fix) for text in option or [] if "=" not in text]
    if problems:
        raise InputError(problems)
    options = dict(text.split("=", 1) for text in option or [])
    job = Job(nodes, nproc, gpus, cpus, time, partition, max_restarts, options, tuple(setup or ()))
    script = slurm_script(name, values.words, folder, job)
    if dry_run:
        job_id = None
        if not as_json:
            print_result(script, end="")
    else:
        job_id = submit(script, folder)
        print_status(f"submitted job {job_id}; log: {folder / f'slurm-{job_id}.log'}")
    if as_json:
        print_json({"job": job_id, "script": script})


def _check_config(config: RunConfig, process_count: int, processes_per_node: int) -> None:
    """Check the run before it is queued. The devices of the job's machines are unknown here."""
    quiet_libraries()
    from artel.planning import StartConditions, check_run

    check_run(config, StartConditions(process_count, processes_per_node, trains_here=False))
