"""`artel bench`: what this machine makes of it, each figure with its definition."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from artel.cli.common import AsJson, print_json, quiet_libraries, tell

app = typer.Typer(help="Measure artel on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure artel on this machine: every figure with its unit and its definition."""


@app.command("prepare")
def prepare(
    input_: Annotated[
        str, typer.Option("--input", help="Texts to measure on (JSON lines, text …); made up when silent.")
    ] = "",
    size: Annotated[str, typer.Option(help="Bytes of text; memory is measured on 10 and 40 times as much.")] = "100M",
    tokenizer: Annotated[
        str, typer.Option(help="Folder or hub id; a byte-level BPE of 32,768 ids is trained when silent.")
    ] = "",
    workers: Annotated[str, typer.Option(help="Processes, of artel and of the peer; auto: the cores here.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured; the median counts.")] = 3,
    peer: Annotated[bool, typer.Option(help="Run Hugging Face datasets, as run_clm.py uses it, in turn.")] = True,
    only: Annotated[str, typer.Option(help="Some of: end_to_end, near, html, jsonl_zst, read_back, memory.")] = "",
    as_json: AsJson = False,
) -> None:
    """Text to store and store to batches, measured here, beside Hugging Face datasets doing the same.

    Example: artel bench prepare --size 100M --only end_to_end,html
    """
    quiet_libraries()
    from artel.diagnostics.bench import MEASURES, Settings, measure_prepare, table
    from artel.errors import InputError, Problem

    problems = []
    names = tuple(name.strip() for name in only.split(",") if name.strip()) or MEASURES
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        problems.append(Problem("--only", f"measures no {', '.join(unknown)}", f"write some of: {', '.join(MEASURES)}"))
    size_bytes, count = _read(size, "--size", problems), _read(workers, "--workers", problems)
    if problems:
        raise InputError(problems)
    settings = Settings(size_bytes, count, rounds, peer, names, input_, tokenizer)
    measured = measure_prepare(settings, tell)
    tell(*table(measured.figures).split("\n"))
    if measured.peer is None:
        tell(f"no peer: {measured.why_no_peer}")
    if as_json:
        print_json(measured.to_json())


@app.command("train")
def train(
    model: Annotated[
        str, typer.Option(help="Folder with config.json, JSON or YAML file, or {model_type: …}; else a small one.")
    ] = "",
    objective: Annotated[str, typer.Option(help="causal or masked.")] = "causal",
    batch: Annotated[int, typer.Option(min=1, max=10**6, help="Rows in a global batch.")] = 8,
    length: Annotated[int, typer.Option(min=2, max=10**8, help="Tokens in a row.")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="Of artel and of --peer: auto, fp32, bf16, fp16 or fp8.")] = "auto",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw8bit, adafactor or sgd.")] = "adamw",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a turn.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="How many turns each has; the median counts.")] = 3,
    peer: Annotated[
        list[str] | None, typer.Option(help="A further contestant, module:function; may be given several times.")
    ] = None,
    only: Annotated[str, typer.Option(help="Some of: artel, trainer_default, trainer_tuned, and the peers.")] = "",
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds after which a turn ends, its step finished; warm-up likewise.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """The same model on the same tokens, trained in turns by artel and by transformers' Trainer.

    Trainer at its defaults and tuned (bf16; on a GPU compiled, too). What another trainer needs to take part stands at
    the head of artel/diagnostics/bench/training/contestant.py.

    Example: artel bench train --model '{model_type: llama, hidden_size: 512}' --length 512 --only artel,trainer_tuned
    """
    quiet_libraries()
    from artel.diagnostics.bench.training import Settings, measure_train

    names = tuple(name.strip() for name in only.split(",") if name.strip())
    measured = measure_train(
        Settings(
            model, objective, batch, length, device, precision, optimizer, steps, rounds, tuple(peer or ()), names,
            time_limit,
        ),
        tell,
    )  # fmt: skip
    tell(*measured.table().split("\n"))
    if as_json:
        print_json(measured.to_json())


def _read(value: str, option: str, problems: list) -> int:
    """A size or a number of processes from 1 on; what is wrong with it goes to `problems`."""
    from artel.config.schema.quantities import read_bytes, read_count
    from artel.errors import Problem

    if option == "--workers" and value == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        found = read_bytes(value) if option == "--size" else read_count(value)
    except ValueError as error:
        what, _, fix = str(error).partition("; ")
        problems.append(Problem(option, what, fix))
        return 0
    least = 500_000 if option == "--size" else 1
    if found < least:
        problems.append(Problem(option, f"{value} is less than {least:,}", f"write {least:,} or more"))
    return found
