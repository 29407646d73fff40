"""`artel train`: train a run, or resume it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from artel.cli.common import AsJson, OverrideWords, RunName, print_json


def train(
    name: RunName,
    overrides: OverrideWords = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on this host (default: what `parallel` requires).")
    ] = None,
    nnodes: Annotated[
        str | None, typer.Option(help="Number of hosts, e.g. 4, or 1:4 for an elastic run (default: $NNODES).")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(help="Number of this host, from 0 (default: $NODE_RANK).")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address of the first host (default: $MASTER_ADDR).")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port on that host (default: $MASTER_PORT).")] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="Rendezvous endpoint ADDRESS:PORT, used without --node-rank.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Maximum restarts of this host's processes after failures.")
    ] = 0,
    deepspeed: Annotated[
        str | None, typer.Option("--deepspeed", "--deepspeed_config", help="Short for parallel.deepspeed=FILE.")
    ] = None,
    from_deepspeed: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Start from the DeepSpeed checkpoint in DIR: weights, optimizer and step."),
    ] = None,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start over: empty the run folder first.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Train even if the run does not fit by the plan.")] = False,
    report_to: Annotated[str | None, typer.Option(help="Trackers to add, e.g. tensorboard,wandb.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a run, or resume it. Stop with Ctrl-C; the same command resumes.

    Example: artel train run.yaml --nproc 2 train.learning_rate=3e-4
    """
    # PyTorch reads this on import. By default it warns about hosts without names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from artel.config import Overrides, read_run_file
    from artel.launching.start_run import StartOptions, start_run

    all_overrides = list(overrides or [])
    if deepspeed is not None:
        all_overrides.append(f"parallel.deepspeed={json.dumps(deepspeed)}")
    options = StartOptions(
        nproc=nproc,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        rdzv_endpoint=rdzv_endpoint,
        max_restarts=max_restarts,
        local_rank=local_rank,
        from_deepspeed=from_deepspeed,
        restart=restart,
        force=force,
        trackers=tuple(report_to.split(",")) if report_to else (),
    )
    result = start_run(read_run_file(name), Overrides.parse(all_overrides), options)
    if as_json:
        print_json(result)
