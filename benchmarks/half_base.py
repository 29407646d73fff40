"""LoRA over a base that is held in bf16, beside one in float32: losses, processor time of a step, memory and its plan.

    python benchmarks/half_base.py FOLDER MODEL

MODEL is a folder, which is saved in bf16 first: /models/SmolLM2-135M-Instruct. A step is 4 blocks of 256 tokens of
this Python's own modules, one thread. Two runs of each kind, of 2 and of 6 steps, give the time of 4 steps without
the start. Everything is written into FOLDER.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

KINDS = [(precision, base) for precision in ("bf16", "fp32") for base in ("fp32", "bf16")]
STEPS = (2, 6)


def run_file(folder: Path, model: Path, precision: str, base: str, steps: int) -> Path:
    name = f"{precision}-over-{base}-{steps}"
    run = {
        "run": str(folder / name),
        "data": {"sources": [{"path": "{stdlib}/*.py"}], "validation": 0, "block": 256, "store": str(folder / "store")},
        "model": {"from": str(model), "lora": {"rank": 16, "base": base}},
        "train": {"steps": steps, "batch": 4, "micro_batch": 2, "precision": precision, "learning_rate": 2e-4,
                  "threads": 1, "compile": "off", "activation_checkpointing": "none"},
        "validate": {"every": "never"}, "checkpoint": {"every": "never", "best": None},
        "log": {"every": 1}, "track": ["jsonl"],
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def artel(*arguments: object) -> tuple[str, float]:
    """The standard output of the command, and its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "artel", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "model"
    if not half.exists():
        AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).save_pretrained(half)
        AutoTokenizer.from_pretrained(options.model).save_pretrained(half)
    artel("prepare", run_file(folder, half, "bf16", "fp32", 2))
    print("| computed in | base in | processor time of a step | peak memory | planned | losses beside the other base |")
    print("|---|---|---|---|---|---|")
    reference: dict[str, list[float]] = {}
    for precision, base in KINDS:
        seconds = []
        for steps in STEPS:
            path = run_file(folder, half, precision, base, steps)
            seconds.append(artel("train", path)[1])
        plan = json.loads(artel("plan", path, "--json")[0])
        run = path.with_suffix("")
        peak = json.loads((run / "result.json").read_text())["peak_memory_gib"]
        mine = losses(run)
        others = reference.setdefault(precision, mine)
        difference = max(abs(one - other) / other for one, other in zip(mine, others, strict=True))
        a_step = (seconds[1] - seconds[0]) / (STEPS[1] - STEPS[0])
        planned = plan["host_gib"]
        row = f"| {precision} | {base} | {a_step:.2f} s | {peak:.2f} GiB | {planned:.2f} GiB | {difference:.1e} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
