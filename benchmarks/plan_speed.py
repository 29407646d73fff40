"""tokens/s that `artel plan` predicts, beside what `artel train` reached: writes benchmarks/plan_speed.md.

    python benchmarks/plan_speed.py [--folder DIR] [--only NAME…] [--steps 12] [--rounds 2] [--keep-rates]

The cases are those of benchmarks/plan.py. Each is planned, then trained for some steps by `artel train`, with the
threads that it takes by itself; nothing else should run. Measured are the tokens of all steps after the third over
their seconds, by the clock, as the run's metrics.jsonl has them; conversations and preferences take four times as many
steps, and those after the twelfth count.

A shared machine is faster at one moment than at another. So `artel hardware` measures it before the first case,
and again before each one that comes over ten minutes later; and there are two rounds through all cases, half an hour
or more apart. Planned is the mean of both, measured are their tokens over their seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from plan import ARTEL, CASES, LAYOUTS, Case, argument_parser, begin, measure_cases, planned, run_file, write_inputs

from artel.cli.streams import print_record
from artel.diagnostics.hardware import measure_hardware
from artel.host import processor_name
from artel.messages import route_messages

SKIPPED = 3
"""Steps at the beginning, in which memory is taken, kernels are compiled and the optimizer's state is made."""
RATES_HOLD = 600
"""Seconds after which the machine is measured again."""
STEP_FACTOR = 4
"""How many times as many steps are taken, and skipped, of conversations and preferences: rows of a few hundred tokens
come in many sizes, each of which has kernels of its own to compile."""


def main() -> None:
    parser = argument_parser(__doc__, "plan-speeds")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2, help="how often each case is measured")
    parser.add_argument("--keep-rates", action="store_true", help="use what artel hardware measured before")
    options, page = begin(parser.parse_args(), __file__)
    written = page.read_text(encoding="utf-8").partition("| case |")[0].split("\n\n", 2)[2]  # by hand
    write_inputs()
    rates = Rates(keep=options.keep_rates)
    rounds = [round_of_all(Path(f"round-{number + 1}.json"), options, rates) for number in range(options.rounds)]
    table = report(rounds)
    print(table)
    if not options.only:
        page.write_text(f"{head(options)}\n{written}{table}\n", encoding="utf-8")


class Rates:
    """The rates that plans use: measured before the first case, and where they are older than RATES_HOLD."""

    def __init__(self, *, keep: bool) -> None:
        self._until = math.inf if keep else -math.inf

    def refresh(self) -> None:
        if time.monotonic() > self._until:
            with route_messages(print_record):
                measure_hardware()
            self._until = time.monotonic() + RATES_HOLD


Round = dict[str, Any]
"""What was measured, by a case's name."""


def round_of_all(file: Path, options: argparse.Namespace, rates: Rates) -> Round:
    """All cases, one after another; what `file` has of an earlier start is not measured again."""
    measured: Round = json.loads(file.read_text()) if file.exists() else {}
    measure_cases(options.only, measured, file, lambda case: measure(case, options.steps, rates))
    return measured


def step_factor(case: Case) -> int:
    return STEP_FACTOR if case.objective in ("chat", "preference") else 1


def speed_file(case: Case, steps: int) -> Path:
    """The run file of a case, for so many steps and with artel's own number of threads."""
    tree = yaml.safe_load(run_file(case).read_text())
    tree["run"] = tree["run"].replace("runs/", "runs/speed-")
    tree["train"]["steps"] = steps * step_factor(case)
    del tree["train"]["threads"]
    tree |= {"log": {"every": 1}, "checkpoint": {"every": "never"}}
    file = Path(f"{Path(tree['run']).name}.yaml")
    file.write_text(yaml.safe_dump(tree))
    return file


def measure(case: Case, steps: int, rates: Rates) -> dict[str, float | None]:
    """Plan a case and train it: the tokens/s that were planned, tokens and seconds of the steps that count."""
    rates.refresh()
    file, processes = speed_file(case, steps), LAYOUTS[case.layout][0]
    subprocess.run([*ARTEL, "prepare", str(file)], check=True, capture_output=True)
    tokens_per_second = planned(file, "--nproc", str(processes))["tokens_per_second"]
    command = [*ARTEL, "train", str(file), "--restart", "--nproc", str(processes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stdout[-2000:]}")
    folder = Path(yaml.safe_load(file.read_text())["run"])
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps_taken = [line for line in lines if "tokens_per_second" in line]
    first, last = steps_taken[SKIPPED * step_factor(case) - 1], steps_taken[-1]
    return {
        "planned": tokens_per_second and tokens_per_second["mid"],
        "tokens": last["tokens"] - first["tokens"],
        "seconds": last["seconds"] - first["seconds"],
    }


def head(options: argparse.Namespace) -> str:
    return (
        "# Speed: `artel plan` beside what runs reached\n\n"
        f"`python benchmarks/plan_speed.py --steps {options.steps} --rounds {options.rounds}` on "
        f"{processor_name()}, {os.cpu_count()} cores, torch {torch.__version__}, {datetime.date.today()}. Rates by "
        "`artel hardware`, ten minutes old at most.\n"
    )


def report(rounds: list[Round]) -> str:
    """The table of all cases, and the largest and the mean difference."""
    lines = ["| case | planned, tokens/s | measured, tokens/s | difference | of each round |", "|---|---|---|---|---|"]
    errors = []
    for case in CASES:
        turns = [measured[case.name] for measured in rounds if case.name in measured]
        if not turns:
            continue
        speed = sum(turn["tokens"] for turn in turns) / sum(turn["seconds"] for turn in turns)
        if any(turn["planned"] is None for turn in turns):
            lines.append(f"| {case.name} | not planned | {speed:,.0f} | | |")
            continue
        planned = sum(turn["planned"] for turn in turns) / len(turns)
        errors.append(abs(planned / speed - 1))
        each = ", ".join(f"{turn['planned'] * turn['seconds'] / turn['tokens'] - 1:+.1%}" for turn in turns)
        lines.append(f"| {case.name} | {planned:,.0f} | {speed:,.0f} | {planned / speed - 1:+.1%} | {each} |")
    within = [sum(error <= most for error in errors) for most in (0.10, 0.15)]
    summary = f"mean difference {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}" if errors else "none planned"
    lines += ["", f"{len(errors)} cases: {summary}; {within[0]} within 10 %, {within[1]} within 15 %"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
