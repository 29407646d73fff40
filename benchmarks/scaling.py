"""Tokens a second of two processes beside one, a thread each: python benchmarks/scaling.py [--rounds 4] [--steps 6]

The same run of a GPT-2 (4 x 256, 4,096 ids, 64 rows of 256, float32) by one process, by two with ddp and by two with
fsdp, in turns. A round's figure is the median over its steps but the first. `apart` is what the machine itself allows:
two runs of one process at the same moment that know nothing of each other, their rates added. One more run of each
profiles where the time of a few steps goes, and how much of it is communication that nothing hides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

CONTESTANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"data": "ddp"}),
    "fsdp": (2, {"data": "fsdp"}),
}
RUN: dict[str, Any] = {
    "data": {"sources": [{"format": "dummy", "documents": 3000}], "validation": 0, "block": 256},
    "tokenizer": {"train": {"vocab": 512}},
    "model": {"config": {"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096}},
    "train": {"batch": 64, "micro_batch": 32, "threads": 1, "precision": "fp32", "compile": "off", "warmup": 0},
    "checkpoint": {"every": "never", "best": None},
    "validate": {"every": "never"},
    "log": {"every": 1},
    "track": ["jsonl"],
}


def start(folder: Path, name: str, steps: int, copy: str = "", **more: Any) -> tuple[Path, subprocess.Popen[bytes]]:
    """The run's folder, and its process."""
    processes, parallel = CONTESTANTS[name]
    path = folder / f"{name}{copy}.yaml"
    run = path.with_suffix("")
    tree = RUN | {"run": str(run), "parallel": parallel, **more}
    tree["data"] = RUN["data"] | {"store": str(folder / "stores")}
    tree["train"] = RUN["train"] | {"steps": steps}
    path.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "artel", "train", str(path), "--nproc", str(processes), "--restart"]
    return run, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ended(started: tuple[Path, subprocess.Popen[bytes]]) -> Path:
    run, process = started
    if process.wait(timeout=1800):
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with {process.returncode}")  # type: ignore[union-attr]
    return run


def rate(run: Path) -> float:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return statistics.median(line["tokens_per_second"] for line in list(lines)[1:])


def one_round(folder: Path, steps: int) -> dict[str, float]:
    found = {name: rate(ended(start(folder, name, steps))) for name in CONTESTANTS}
    both = [start(folder, "one", steps, copy) for copy in ("-a", "-b")]
    return found | {"apart": sum(rate(ended(process)) for process in both)}


def communication(folder: Path, name: str, steps: int) -> float:
    """In percent of a step's time."""
    profile = ended(start(folder, name, steps, profile=True)) / "profile"
    kinds = json.loads((profile / "table.json").read_text())["kinds"]
    return sum(kind["percent"] for kind in kinds if kind["kind"].startswith("communication"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds = []
        for number in range(wanted.rounds):
            rounds.append(one_round(folder, wanted.steps))
            figures = ", ".join(f"{name} {tokens:,.0f}" for name, tokens in rounds[-1].items())
            print(f"round {number + 1}, tokens/s: {figures}", flush=True)
        print("\n| | tokens/s | to one process | communication, of a step's time |\n|---|---|---|---|")
        for contestant in rounds[0]:
            tokens = statistics.median(found[contestant] for found in rounds)
            ratio = statistics.median(found[contestant] / found["one"] for found in rounds)
            spoken = f"{communication(folder, contestant, 12):.1f} %" if contestant in CONTESTANTS else ""
            print(f"| {contestant} | {tokens:,.0f} | {ratio:.2f} x | {spoken} |", flush=True)


if __name__ == "__main__":
    main()
