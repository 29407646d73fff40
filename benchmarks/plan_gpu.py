"""Memory that `artel plan` predicts of one GPU, beside what PyTorch's allocator held: writes benchmarks/plan_gpu.md.

    python benchmarks/plan_gpu.py [--folder DIR] [--only NAME…] [--together 4] [--measure | --predict]

Each case is trained for three steps on a GPU, several at the same time, each in a process of its own. Measured are the
most that PyTorch has allocated, and reserved, in that process: CUDA's context is beyond it. `--measure` needs the GPU
and leaves measured.json in the folder; `--predict` reads it, plans for an H200, and needs none. All texts
are made up, and the same on every machine. Nothing in artel was fitted to the allocated bytes of these cases.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import plan
from plan import ARTEL, GPU_CASES, GPU_MODELS, MEASURED, Case, summary


def main() -> None:
    parser = plan.argument_parser(__doc__, "plan-gpu")
    parser.add_argument("--together", type=int, default=4, help="cases at the same time on the GPU")
    parser.add_argument("--measure", action="store_true", help="train only")
    parser.add_argument("--predict", action="store_true", help="plan only, for what was measured")
    options, page = plan.begin(parser.parse_args(), __file__)
    write_inputs()
    measured = plan.read_measured()
    plan.make_base(run_file(Case("llama 300M", "none", "adamw")))
    if not options.predict:
        chosen = [case for case in GPU_CASES if any(part in name_of(case) for part in options.only or [""])]
        with ThreadPoolExecutor(options.together) as pool:
            for case, found in zip(chosen, pool.map(measure, chosen), strict=True):
                measured[name_of(case)] = found
                MEASURED.write_text(json.dumps(measured, indent=1))
                print(name_of(case), found, flush=True)
    if options.measure:
        return
    cases = [case for case in GPU_CASES if "allocated" in measured.get(name_of(case), {})]
    if not cases:
        sys.exit(f"{MEASURED.resolve()} has no measured case: run it with --measure on a GPU first")
    for name in (name_of(case) for case in GPU_CASES if name_of(case) in measured and case not in cases):
        print(f"{name}: {measured[name]}")
    plan.write(page, report(cases, measured, {name_of(case): predict(case) for case in cases}), options)


def name_of(case: Case) -> str:
    more = [f"{name} {value}" for name, value in (case.train | case.data).items() if name != "document_mask"]
    what = [] if case.objective in ("causal", "masked") else [case.objective]
    return ", ".join([case.model, case.checkpointing, case.optimizer, *what, *more])


def run_file(case: Case) -> Path:
    """Write the run file of a case."""
    rows = 4 if case.objective == "preference" else 8
    tree: dict[str, Any] = {
        "run": f"runs/{name_of(case).replace(', ', '-').replace(' ', '-')}", "objective": case.objective,
        "data": {"sources": [{"path": "words.txt"}], "validation": 0, "block": 1024, **case.data},
        "tokenizer": {"train": {"vocab": 16_000}},
        "train": {"steps": 3, "batch": rows * 2, "micro_batch": rows, "compile": "off", "precision": "bf16",
                  **case.train},
        "validate": {"every": "never"}, "checkpoint": {"every": "never"},
    }  # fmt: skip
    data, few = tree["data"], {"train": {"vocab": 1500}}  # of less text
    if case.model == "roberta-large":
        data["block"] = 512
    if case.objective == "embedding":
        data |= {"sources": [{"path": "matches.jsonl", "format": "matches"}], "block": 256}
        tree["tokenizer"] = few
    if case.objective == "distill":
        tree |= {"distill": {"teacher": "runs/base/model"}, "tokenizer": {"train": None}}
    if case.objective == "seq2seq":
        data |= {"sources": [{"path": "pairs.jsonl", "format": "pairs"}], "block": 512}
        tree |= {"seq2seq": {"target": 128}, "tokenizer": few}
    return plan.write_run(tree, case, GPU_MODELS)


def write_inputs() -> None:
    """Texts, conversations, preferences, pairs and matches of made-up words."""
    if Path("matches.jsonl").exists():
        return
    draw = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    names = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(20_000)]

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(names, k=draw.randint(least, most)))

    Path("words.txt").write_text("\n\n".join(words(50, 400) for _ in range(2000)))
    with Path("pairs.jsonl").open("w") as pairs, Path("matches.jsonl").open("w") as matches:
        for _ in plan.write_conversations(200, lambda: words(5, 80), lambda: words(50, 300)):
            pair = {"input": words(50, 150), "output": words(10, 40)}
            pairs.write(json.dumps(pair) + "\n")
            matches.write(json.dumps({"query": pair["output"], "pos": [pair["input"]]}) + "\n")


TRAIN = """
import json, sys, torch
from artel.config import load_run
from artel.parallel import join_world
from artel.preparing import prepare
from artel.training.loop import train
prepared = prepare(load_run(sys.argv[1]))
with join_world(2) as world:
    train(prepared.config, prepared, world, lambda line: print(line, file=sys.stderr))
print(json.dumps({"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}))
"""


def measure(case: Case) -> dict[str, Any]:
    """Bytes, allocated and reserved; or the last lines of what went wrong."""
    command = [sys.executable, "-c", TRAIN, str(run_file(case))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ARTEL_CACHE": "cache"})
    if done.returncode:
        return {"failed": done.stderr[-1500:]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def predict(case: Case) -> dict[str, float]:
    """What `artel plan` says of a rank of an H200, in GiB."""
    file = run_file(case)
    subprocess.run([*ARTEL, "prepare", str(file)], check=True, capture_output=True)
    return plan.planned(file, "--hardware", "h200:1")["per_rank_gib"]


def report(cases: list[Case], measured: dict[str, Any], predicted: dict[str, dict[str, float]]) -> str:
    """The table of all cases, and a summary of the errors."""
    lines = ["| case | allocated, planned, GiB | measured | error | reserved, measured |", "|---|---|---|---|---|"]
    errors: dict[bool, list[float]] = {False: [], True: []}
    for name, case in ((name_of(case), case) for case in cases):
        allocated, reserved = (measured[name][kind] / 2**30 for kind in ("allocated", "reserved"))
        expected = predicted[name]["allocated"] - predicted[name]["framework"]
        error = expected / allocated - 1
        errors["compile" in case.train].append(abs(error))
        lines.append(f"| {name} | {expected:.2f} | {allocated:.2f} | {error:+.1%} | {reserved:.2f} |")
    every = errors[False] + errors[True]
    close = sum(error <= 0.05 for error in every)
    lines += ["", f"{summary('all', every)}, {close} within 5 %\n"]
    lines += [summary("not compiled", errors[False]), summary("compiled", errors[True])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
