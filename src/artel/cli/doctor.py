"""`artel doctor`: this machine, what artel would choose on it, and why. `artel hardware`: measure it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from artel.cli.common import AsJson, OverrideWords, echo, print_json
from artel.cli.streams import show
from artel.launching.quiet_libraries import quiet_libraries


def doctor(
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run file, a recipe's name, or the folder of an earlier run.")
    ] = "",
    overrides: OverrideWords = None,
    parallel: Annotated[
        bool,
        typer.Option("--parallel", help="Try the run's `parallel` on a small copy of its model, beside one process."),
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="--parallel: processes; else as many as the numbers in `parallel` need.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine: what it has, what artel would choose on it and why, and what stands in its way.

    Paste what it prints into an issue. It writes nothing and uses no network. Of variables that may be secret it says
    only that they are set.

    With --parallel it trains two steps of a small copy of the run's own model, under the run's parallel strategy and in
    one process, and compares losses and gradient norms: a proof in a minute, before you rent a cluster. The exit status
    is 1 where they differ.

    Examples: artel doctor run.yaml
              artel doctor run.yaml --parallel parallel.data=fsdp parallel.tensor=2 --nproc 4
    """
    from artel.config import Overrides, load_run

    if parallel:
        _try_parallel(name, overrides or [], nproc, as_json)
        return
    config = load_run(name, Overrides.parse(overrides)) if name else None
    variables = dict(os.environ)  # as they are before ours are added
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.curdir  # PyTorch makes that folder when imported: this one is there
    quiet_libraries()
    from artel.diagnostics.doctor import examine

    examination = examine(config, variables)
    if as_json:
        print_json(examination.to_json())
    else:
        show(str(examination))


def hardware(as_json: AsJson = False) -> None:
    """Measure this machine once, in about a minute, for `artel plan`: products, attention, memory, all-reduce.

    The result stays in the cache folder (ARTEL_CACHE) until the device or PyTorch changes.

    Example: artel hardware
    """
    quiet_libraries()
    from artel.diagnostics.hardware import measure_hardware

    measured = measure_hardware()
    echo(*measured.lines())
    echo(f"saved in {measured.path}, after {measured.seconds:,.0f} s")
    if as_json:
        print_json(measured.to_json())


def _try_parallel(name: str, overrides: list[str], nproc: int | None, as_json: bool) -> None:
    from artel.config import Overrides, load_run
    from artel.errors import InputError

    if not name:
        raise InputError.at("--parallel", "needs a run file", "artel doctor run.yaml --parallel")
    config = load_run(name, Overrides.parse(overrides))
    quiet_libraries()
    from artel.diagnostics.parallel_check import try_parallel

    agreement = try_parallel(config, nproc or max(2, config.parallel.processes))
    if as_json:
        print_json(agreement.to_json())
    else:
        show(str(agreement))
    if not agreement.agrees:
        raise typer.Exit(1)
