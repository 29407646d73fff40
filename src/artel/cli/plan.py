"""`artel plan`: memory, disk and time of a run before it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from artel.cli.common import AsJson, OverrideWords, RunName, print_json
from artel.cli.streams import print_result, print_status


def plan(
    name: RunName,
    overrides: OverrideWords = None,
    hardware: Annotated[str, typer.Option(help="Hardware of one node, e.g. h100-80gb:8 (default: this machine).")] = "",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes per node (default: one per GPU, or what `parallel` requires).")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="Host memory per node, e.g. 1TB.")] = None,
    interconnect: Annotated[str | None, typer.Option(help="Network bandwidth per accelerator, e.g. 400Gb/s.")] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price per accelerator-hour (per machine-hour on a CPU).")
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Also suggest the fastest configurations or the smallest hardware that fits."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict memory per rank, host memory, disk and duration of a run, and check that it fits.

    The model is built on the meta device, and two steps of the training code are traced as one rank of any number of
    processes. The exit status is 1 if the run does not fit.

    Examples: artel plan run.yaml
              artel plan run.yaml --hardware h100-80gb:8 --nodes 4 parallel.data=fsdp
              artel plan run.yaml --hardware a100-80gb:8 --fit
    """
    print_status(f"reading {name}")
    from artel.config import Overrides, read_run_file
    from artel.launching.plan_run import PlanOptions, plan_run

    changes = Overrides.parse(overrides)
    plan_options = PlanOptions(
        hardware=hardware, nodes=nodes, nproc=nproc, host_memory=host_memory, interconnect=interconnect, price=price
    )
    result = plan_run(read_run_file(name), changes, plan_options, with_text=fit)
    from artel.planning.fit import CommandLine, advice_json, advise, describe_advice
    from artel.planning.plan import describe, describe_briefly

    run_plan, text, choice = result.plan, result.text, result.choice
    if not as_json:
        print_result(describe(run_plan, None if choice is None else choice.expected.speed_note()))
    advice = None if text is None else advise(result.config, run_plan, text, nproc)
    options = {"--host-memory": host_memory, "--interconnect": interconnect, "--price": price}
    set_options = {option: str(value) for option, value in options.items() if value is not None}
    command_line = CommandLine(name, changes, set_options)
    if as_json:
        print_json(
            run_plan.to_json()
            | {"summary": describe_briefly(run_plan)}
            | ({} if choice is None else {"choice": choice.to_json()})
            | ({} if advice is None else {"advice": advice_json(advice, command_line)})
        )
    elif advice is not None:
        print_result(f"\n{describe_advice(advice, command_line, run_plan.hardware)}")
    if run_plan.memory_fraction > 1:
        raise typer.Exit(1)
