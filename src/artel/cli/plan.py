"""`artel plan`: what a run will need of memory and disk, before it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from artel.cli.common import AsJson, OverrideWords, RunName, print_json
from artel.cli.streams import echo, show


def plan(
    name: RunName,
    overrides: OverrideWords = None,
    hardware: Annotated[
        str, typer.Option(help="What it runs on, as h100-80gb:8 (accelerators of a node); else this machine.")
    ] = "",
    nodes: Annotated[int, typer.Option(min=1, help="Machines with that hardware.")] = 1,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on each node; else one for each GPU, or as `parallel` says.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="Memory of each machine, as 1TB.")] = None,
    interconnect: Annotated[
        str | None, typer.Option(help="Rate of one accelerator to other machines, as 400Gb/s.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of one accelerator (of the machine, on a CPU) for an hour.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Advise too: the fastest ways that fit, or the smallest hardware that would.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say before a run what it needs, and whether it fits: memory of each rank by kind, host memory, disk, hours.

    The model is built without memory, and two steps of it are traced with the code that trains, as one rank of as many
    processes as you ask for. The exit status is 1 where the run does not fit.

    Examples: artel plan run.yaml
              artel plan run.yaml --hardware h100-80gb:8 --nodes 4 parallel.data=fsdp
              artel plan run.yaml --hardware a100-80gb:8 --fit
    """
    echo(f"reading {name}")
    from artel.config import Overrides, read_run_file
    from artel.launching.plan_run import PlanOptions, plan_run

    changes = Overrides.parse(overrides)
    asked = PlanOptions(hardware, nodes, nproc, host_memory, interconnect, price)
    made = plan_run(read_run_file(name), changes, asked, with_text=fit)
    from artel.planning.fit import CommandLine, advice_json, advise, describe_advice
    from artel.planning.plan import describe, in_brief

    planned, text, choice = made.plan, made.text, made.choice
    if not as_json:
        show(describe(planned, None if choice is None else choice.expected.beside_plan()))
    advice = None if text is None else advise(made.config, planned, text, nproc)
    options = {"--host-memory": host_memory, "--interconnect": interconnect, "--price": price}
    line = CommandLine(name, changes, {option: str(value) for option, value in options.items() if value is not None})
    if as_json:
        print_json(
            planned.to_json()
            | {"summary": in_brief(planned)}
            | ({} if choice is None else {"choice": choice.to_json()})
            | ({} if advice is None else {"advice": advice_json(advice, line)})
        )
    elif advice is not None:
        show(f"\n{describe_advice(advice, line, planned.hardware)}")
    if planned.share > 1:
        raise typer.Exit(1)
