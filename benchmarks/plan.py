"""Memory that `artel plan` predicts, beside what the run took: writes benchmarks/plan.md.

    python benchmarks/plan.py [--folder DIR] [--only NAME…]

Each case is trained for two steps on this machine. Measured is the largest sum, at one moment, over the ranks of
PSS of memory of their own (smaps_rollup of Linux, read every 50 ms; shared memory in parts), and the pages of library
files of one of them: other processes of the machine, which may share those, do not change it. Beside it stands the
highest resident size of a rank (VmHWM).

Constants are in planning/plan/rank_memory.py. Cases marked `held out` were written down before the first ones were
fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

MIB = 2**20
ARTEL = [sys.executable, "-m", "artel"]


@dataclass(frozen=True)
class Case:
    model: str
    checkpointing: str
    optimizer: str
    layout: str = "one process"
    objective: str = "causal"
    held_out: bool = False
    compiled: bool = False
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        what = [] if self.objective in ("causal", "masked") else [self.objective]
        more = ["compiled"] * self.compiled
        return ", ".join([self.model, self.layout, self.checkpointing, self.optimizer, *what, *more])


_READ = yaml.safe_load((Path(__file__).parent / "plan_cases.yaml").read_text(encoding="utf-8"))
MODELS, GPU_MODELS = (_READ[device]["models"] for device in ("cpu", "gpu"))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = _READ["cpu"]["layouts"]
CASES, GPU_CASES = (tuple(Case(**each) for each in _READ[device]["cases"]) for device in ("cpu", "gpu"))


def main() -> None:
    options, page = begin(argument_parser(__doc__, "plan-cases").parse_args(), __file__)
    write_inputs()
    measured = read_measured()
    measure_cases(options.only, measured, MEASURED, measure)
    cases = [case for case in CASES if case.name in measured]
    write(page, report(cases, measured, {case.name: predict(case) for case in cases}), options)


MEASURED = Path("measured.json")


def argument_parser(about: str, folder: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(folder), help="for the runs and measurements")
    parser.add_argument("--only", nargs="*", default=[], help="cases with one of these in their name")
    return parser


def begin(options: argparse.Namespace, script: str) -> tuple[argparse.Namespace, Path]:
    """Go to the folder. Return the options and the page that the script writes."""
    options.folder.mkdir(parents=True, exist_ok=True)
    page = Path(script).resolve().with_suffix(".md")
    os.chdir(options.folder)
    return options, page


def read_measured() -> dict[str, Any]:
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def write(page: Path, table: str, options: argparse.Namespace) -> None:
    """Print the table. If it has all cases, write it below the page's head."""
    print(table)
    if not options.only:
        head = page.read_text(encoding="utf-8").partition("| case |")[0]
        page.write_text(f"{head}{table}\n", encoding="utf-8")


def measure_cases(only: list[str], measured: dict[str, Any], file: Path, measure: Callable[[Case], Any]) -> None:
    """Measure the cases that are missing, of those with one of `only` in their name, and keep each in `file`."""
    for case in CASES:
        if any(part in case.name for part in only or [""]) and case.name not in measured:
            measured[case.name] = measure(case)
            file.write_text(json.dumps(measured, indent=1))
            print(case.name, measured[case.name], flush=True)


def run_file(case: Case) -> Path:
    """Write the run file of a case."""
    processes, parallel = LAYOUTS[case.layout]
    sharing = processes if "tensor" not in parallel and "pipeline" not in parallel else 1
    objective = "masked" if case.model == "roberta" else case.objective
    rows = 2 if objective == "preference" else 4
    tree: dict[str, Any] = {
        "run": f"runs/{case.name.replace(', ', '-').replace(' ', '-')}",
        "data": {"sources": [{"path": "{stdlib}/*.py"}], "validation": 0, "block": 256},
        "objective": objective, "tokenizer": {"train": {"vocab": 8000}}, "parallel": parallel,
        "train": {"steps": 2, "batch": rows * 2 * sharing, "micro_batch": rows, "threads": 1,
                  "compile": "on" if case.compiled else "off"},
        "validate": {"every": "never"},
    }  # fmt: skip
    return write_run(tree, case, MODELS)


def write_run(tree: dict[str, Any], case: Case, models: dict[str, Any]) -> Path:
    """Complete a run file with the case's model, adapter, optimizer and source of conversations, and write it."""
    tree["model"] = {"config": models[case.model]}
    if tree["objective"] in ("chat", "preference"):
        tree["data"]["sources"] = [{"path": f"{tree['objective']}.jsonl", "format": tree["objective"]}]
    is_adapted = case.optimizer.startswith("lora")
    if is_adapted or tree["objective"] in ("chat", "preference"):
        tree["model"] = {"from": "runs/base/model"}
        del tree["tokenizer"]
    if is_adapted:
        quantize = case.optimizer.partition("lora on ")[2] or "none"
        tree["model"] |= {"lora": {"rank": 16}, "quantize": quantize}
    optimizer = "adamw" if is_adapted else case.optimizer
    tree["train"] = {"activation_checkpointing": case.checkpointing, "optimizer": optimizer, **tree["train"]}
    file = Path(f"{tree['run'].split('/')[1]}.yaml")
    file.write_text(yaml.safe_dump(tree))
    return file


def write_inputs() -> None:
    """Conversations and preferences of made-up words, and the model that adapters are put on."""
    draw = random.Random(0)
    names = ("def", "return", "self", "import", "class", "value", "list")

    def words(least: int, most: int) -> str:
        return " ".join(draw.choice(names) for _ in range(draw.randint(least, most)))

    list(write_conversations(400, lambda: words(5, 40), lambda: words(20, 90)))
    make_base(run_file(Case("llama", "none", "adamw")))


def write_conversations(count: int, question: Callable[[], str], answer: Callable[[], str]) -> Iterator[int]:
    """Write chat.jsonl and preference.jsonl, a row of each with every iteration."""
    with Path("chat.jsonl").open("w") as chat, Path("preference.jsonl").open("w") as preference:
        for number in range(count):
            asked, answers = question(), [answer() for _ in range(2)]
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answers[0]}]
            chat.write(json.dumps({"messages": messages}) + "\n")
            preference.write(json.dumps({"prompt": asked, "chosen": answers[0], "rejected": answers[1]}) + "\n")
            yield number


def make_base(file: Path) -> None:
    """Train the model of a run file for one step: the base of adapters, with a tokenizer of the texts."""
    if not Path("runs/base/model").is_dir():
        base = yaml.safe_load(file.read_text()) | {"run": "runs/base"}
        base["train"] |= {"steps": 1, "batch": 1, "micro_batch": 1}
        Path("base.yaml").write_text(yaml.safe_dump(base))
        subprocess.run([*ARTEL, "train", "base.yaml"], check=True)


def measure(case: Case) -> dict[str, float]:
    """Train a case: the peak of all ranks together, and the largest VmHWM of one, in MiB; and the seconds."""
    file, processes = run_file(case), LAYOUTS[case.layout][0]
    subprocess.run([*ARTEL, "prepare", str(file)], check=True, capture_output=True)
    command = [*ARTEL, "train", str(file), "--restart", "--nproc", str(processes)]
    started = time.monotonic()
    peak, highest = 0, 0
    with Path("train.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        while process.poll() is None:
            ranks = [process.pid] if processes == 1 else ranks_of(process.pid)
            sizes = [size for size in map(memory_of, ranks) if size is not None]
            if len(sizes) == processes:
                peak = max(peak, sum(own for own, _, _ in sizes) + max(files for _, files, _ in sizes))
                highest = max(highest, *(high for _, _, high in sizes))
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{case.name}: {Path('train.log').read_text()[-2000:]}")
    return {"peak": peak / MIB, "vmhwm": highest / MIB, "seconds": time.monotonic() - started}


def ranks_of(launcher: int) -> list[int]:
    """The processes below `launcher` that a rank was given; not those below a rank, which have its environment."""
    ranks, others = [], [psutil.Process(launcher)]
    for process in others:
        with suppress(psutil.Error):  # one has just ended
            for child in process.children():
                (ranks if "RANK" in child.environ() else others).append(child)
    return [rank.pid for rank in ranks]


def memory_of(process: int) -> tuple[int, int, int] | None:
    """Bytes: PSS of memory of its own and shared between processes; of files' pages; the peak of all."""
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    numbers = {name: int(number) * 1024 for name, number in re.findall(r"(\w+):\s+(\d+) kB", rollup + status)}
    if "Pss_Anon" not in numbers or "RssFile" not in numbers:
        return None
    return numbers["Pss_Anon"] + numbers["Pss_Shmem"], numbers["RssFile"], numbers["VmHWM"]


def planned(file: Path, *options: str) -> dict[str, Any]:
    """What `artel plan --json` says of a run file."""
    done = subprocess.run([*ARTEL, "plan", str(file), "--json", *options], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def predict(case: Case) -> float:
    """What `artel plan` says of host memory, in MiB."""
    return float(planned(run_file(case), "--nproc", str(LAYOUTS[case.layout][0]))["host_gib"]) * 1024


def report(cases: list[Case], measured: dict[str, Any], predicted: dict[str, float]) -> str:
    """The table of all cases, and a summary of the errors."""
    lines = ["| case | predicted, MiB | measured, MiB | error | VmHWM of a rank, MiB |", "|---|---|---|---|---|"]
    errors: dict[bool, list[float]] = {False: [], True: []}
    for case in cases:
        peak, highest = measured[case.name]["peak"], measured[case.name]["vmhwm"]
        error = predicted[case.name] / peak - 1
        errors[case.held_out].append(abs(error))
        name = case.name + (" (held out)" if case.held_out else "")
        lines.append(f"| {name} | {predicted[case.name]:,.0f} | {peak:,.0f} | {error:+.1%} | {highest:,.0f} |")
    lines += ["", summary("fitted to", errors[False]), summary("held out", errors[True])]
    return "\n".join(lines)


def summary(what: str, errors: list[float]) -> str:
    """A line about the relative errors of these cases, each 0 or more."""
    if not errors:
        return f"{what}: no cases"
    return f"{what}: {len(errors)} cases, mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}"


if __name__ == "__main__":
    main()
