"""`artel doctor`: check this machine and explain artel's choices on it. `artel hardware`: measure its speed."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from artel.cli.common import AsJson, OverrideWords, print_json, print_status
from artel.cli.streams import print_result
from artel.launching.quiet_libraries import quiet_libraries


def doctor(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run file, a recipe name or a run folder.")] = "",
    overrides: OverrideWords = None,
    parallel: Annotated[
        bool,
        typer.Option("--parallel", help="Compare the run's `parallel` with one process on a small copy of its model."),
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Number of processes for --parallel (default: what `parallel` requires).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: report its hardware and software, artel's choices on it with reasons, and problems.

    The output can be pasted into an issue: environment variables that may be secret are only listed as set. The command
    writes no files and uses no network.

    With --parallel, train two steps of a small copy of the run's model under its parallel strategy and in one process,
    and compare losses and gradient norms. This takes about a minute and can be done before renting a cluster. The exit
    status is 1 if they differ.

    Examples: artel doctor run.yaml
              artel doctor run.yaml --parallel parallel.data=fsdp parallel.tensor=2 --nproc 4
    """
    from artel.config import Overrides, load_run

    if parallel:
        _try_parallel(name, overrides or [], nproc, as_json)
        return
    config = load_run(name, Overrides.parse(overrides)) if name else None
    variables = dict(os.environ)  # a copy from before artel adds its own
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.curdir  # PyTorch creates this folder on import
    quiet_libraries()
    from artel.diagnostics.doctor import examine

    examination = examine(config, variables)
    if as_json:
        print_json(examination.to_json())
    else:
        print_result(str(examination))


def hardware(as_json: AsJson = False) -> None:
    """Measure this machine for `artel plan`: matrix products, attention, memory, all-reduce. Takes about a minute.

    The result is valid until the device or PyTorch changes. It is saved in the cache folder (ARTEL_CACHE).

    Example: artel hardware
    """
    quiet_libraries()
    from artel.diagnostics.hardware import measure_hardware

    measured = measure_hardware()
    print_status(*measured.lines())
    print_status(f"saved in {measured.path}, after {measured.seconds:,.0f} s")
    if as_json:
        print_json(measured.to_json())


def _try_parallel(name: str, overrides: list[str], nproc: int | None, as_json: bool) -> None:
    from artel.config import Overrides, load_run
    from artel.errors import InputError

    if not name:
        raise InputError.at("--parallel", "needs a run file", "use e.g. artel doctor run.yaml --parallel")
    config = load_run(name, Overrides.parse(overrides))
    quiet_libraries()
    from artel.diagnostics.parallel_check import check_parallel

    agreement = check_parallel(config, nproc or max(2, config.parallel.processes))
    if as_json:
        print_json(agreement.to_json())
    else:
        print_result(str(agreement))
    if not agreement.agrees:
        raise typer.Exit(1)
