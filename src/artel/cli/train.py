"""`artel prepare` and `artel train`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from artel.cli.common import AsJson, OverrideWords, RunName, print_json


def prepare(name: RunName, overrides: OverrideWords = None, as_json: AsJson = False) -> None:
    """Clean, unique, split and tokenize a run's text, unless that was done before and nothing is missing.

    Example: artel prepare run.yaml data.block=512
    """
    from artel.config import Overrides, read_run_file
    from artel.launching.prepare_run import prepare_run

    prepared = prepare_run(read_run_file(name), Overrides.parse(overrides))
    if as_json:
        ledger = prepared.ledger()
        result = {name: ledger[name] for name in ("documents", "tokens", "bytes")}
        print_json({**result, "store": str(prepared.folder), "made": prepared.is_new})


def train(
    name: RunName,
    overrides: OverrideWords = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on this host; else as many as the numbers in `parallel` need.")
    ] = None,
    nnodes: Annotated[
        str | None, typer.Option(help="Hosts, as 4, or as 1:4 when they may join and leave; else NNODES.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(help="Which host this is, from 0; else NODE_RANK.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address of the first host; else MASTER_ADDR.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port there; else MASTER_PORT.")] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="ADDRESS:PORT of one host, where all meet, without --node-rank.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often this host's processes are restarted after a failure.")
    ] = 0,
    deepspeed: Annotated[
        str | None, typer.Option("--deepspeed", "--deepspeed_config", help="The same as parallel.deepspeed=FILE.")
    ] = None,
    from_deepspeed: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Begin with DeepSpeed's checkpoint in DIR: weights, optimizer, step."),
    ] = None,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start over: the run's folder is emptied first.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Train although the plan says that it cannot fit.")] = False,
    report_to: Annotated[str | None, typer.Option(help="Add trackers, as tensorboard or wandb.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a run, or resume it. Stop with Ctrl-C; the same command resumes.

    Example: artel train run.yaml --nproc 2 train.learning_rate=3e-4
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: it warns of hosts without names
    from artel.config import Overrides, read_run_file
    from artel.launching.start_run import StartOptions, start_run

    words = list(overrides or [])
    if deepspeed is not None:
        words.append(f"parallel.deepspeed={json.dumps(deepspeed)}")
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
    result = start_run(read_run_file(name), Overrides.parse(words), options)
    if as_json:
        print_json(result)
