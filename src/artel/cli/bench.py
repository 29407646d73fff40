"""`artel bench`: measure artel on this machine, each figure with its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from artel.cli.common import AsJson, print_json, tell
from artel.launching.quiet_libraries import quiet_libraries

app = typer.Typer(help="Measure artel on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure artel on this machine: every figure with its unit and its definition."""


@app.command("prepare", short_help="Measure text to token store, and store to batches.")
def prepare(
    input_: Annotated[
        str, typer.Option("--input", help="Texts to measure with (JSON lines, text …); made up if not given.")
    ] = "",
    size: Annotated[str, typer.Option(help="Bytes of text; memory is measured on 10 and 40 times as many.")] = "100M",
    tokenizer: Annotated[
        str, typer.Option(help="Folder or hub id; a byte-level BPE of 32,768 ids is trained if not given.")
    ] = "",
    workers: Annotated[str, typer.Option(help="Processes, of artel and of the peer; auto: one per core.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each; the median counts.")] = 3,
    peer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="SCRIPT",
            help="Run in turns with end_to_end: python SCRIPT INPUT.jsonl TOKENIZER CACHE PROCESSES.",
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="Some of: end_to_end, near, html, jsonl_zst, read_back, memory.")] = "",
    as_json: AsJson = False,
) -> None:
    """Measure text to token store, and store to batches; with --peer, beside another tool's script.

    benchmarks/peers/run_clm.py in artel's repository is such a script, for Hugging Face datasets.

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
    settings = Settings(size_bytes, count, rounds, names, input_, tokenizer, peer)
    measured = measure_prepare(settings, tell)
    tell(*table(measured.figures).split("\n"))
    if as_json:
        print_json(measured.to_json())


@app.command("train", short_help="Measure training: tokens/s, MFU, memory, first step.")
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
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each; the median counts.")] = 3,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Another contestant, module:function or FILE.py:function; may be given several times."),
    ] = None,
    only: Annotated[str, typer.Option(help="Some of: artel, and the peers.")] = "",
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds after which a turn ends, after its step; also of the warm-up.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Measure training: tokens/s, MFU, memory, first step; with --peer, beside other trainers on the same tokens.

    artel/diagnostics/bench/training/contestant.py says what a peer must do. benchmarks/peers/trainer.py in artel's
    repository has transformers' Trainer, `default` and `tuned`.

    Example: artel bench train --model '{model_type: llama, hidden_size: 512}' --length 512 --peer mytrainer:train
    """
    quiet_libraries()
    from artel.diagnostics.bench.training import Settings, measure_train

    names = tuple(name.strip() for name in only.split(",") if name.strip())
    measured = measure_train(
        Settings(
            model=model,
            objective=objective,
            batch=batch,
            length=length,
            device=device,
            precision=precision,
            optimizer=optimizer,
            steps=steps,
            rounds=rounds,
            peers=tuple(peer or ()),
            only=names,
            time_limit=time_limit,
        ),
        tell,
    )
    tell(*measured.table().split("\n"))
    if as_json:
        print_json(measured.to_json())


@app.command("hardware", short_help="Measure this machine once, for `artel plan`.")
def hardware(as_json: AsJson = False) -> None:
    """Measure this machine once, in about a minute, for `artel plan`: products, attention, memory, all-reduce.

    The result is kept in the cache folder (ARTEL_CACHE) until the device or PyTorch is another one.

    Example: artel bench hardware
    """
    quiet_libraries()
    from artel.diagnostics.bench import table
    from artel.diagnostics.bench.hardware import measure_hardware

    measured = measure_hardware(tell)
    tell(*table(measured.figures()).split("\n"))
    tell(f"kept in {measured.path}, after {measured.seconds:,.0f} s")
    if as_json:
        print_json(measured.to_json())


def _read(value: str, option: str, problems: list) -> int:
    """A size in bytes or a number of processes; what is wrong with it is added to `problems`."""
    from artel.config.schema.quantities import read_bytes, read_count
    from artel.errors import Problem

    if option == "--workers" and value == "auto":
        from artel.host import usable_cores

        return usable_cores()
    try:
        number = read_bytes(value) if option == "--size" else read_count(value)
    except ValueError as error:
        what, _, fix = str(error).partition("; ")
        problems.append(Problem(option, what, fix))
        return 0
    minimum = 500_000 if option == "--size" else 1
    if number < minimum:
        problems.append(Problem(option, f"{value} is less than {minimum:,}", f"write {minimum:,} or more"))
    return number
