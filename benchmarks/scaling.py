"""Tokens a second of two processes beside one, a thread each: python benchmarks/scaling.py [--rounds 3] [--steps 12]

The same run of a GPT-2 (6 x 384, 8,192 ids, 16 rows of 256, float32) by one process, by two with ddp and by two with
fsdp, in turns. A round's figure is the median over its steps but the first two. One more run of each profiles where the
time of a few steps goes, and how much of it is communication that nothing hides.
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
    "model": {"config": {"model_type": "gpt2", "n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 8192}},
    "train": {"batch": 16, "micro_batch": 8, "threads": 1, "precision": "fp32", "compile": "off", "warmup": 0},
    "checkpoint": {"every": "never", "best": None},
    "validate": {"every": "never"},
    "log": {"every": 1},
    "track": ["jsonl"],
}


def trained(folder: Path, name: str, steps: int, **more: Any) -> Path:
    processes, parallel = CONTESTANTS[name]
    path = folder / f"{name}.yaml"
    run = folder / name
    tree = RUN | {"run": str(run), "parallel": parallel, **more}
    tree["data"] = RUN["data"] | {"store": str(folder / "stores")}
    tree["train"] = RUN["train"] | {"steps": steps}
    path.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "artel", "train", str(path), "--nproc", str(processes), "--restart"]
    subprocess.run(command, check=True, capture_output=True, timeout=1800)
    return run


def rate(run: Path) -> float:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return statistics.median(line["tokens_per_second"] for line in list(lines)[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rates: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
        for number in range(wanted.rounds):
            for contestant in CONTESTANTS:
                rates[contestant].append(rate(trained(folder, contestant, wanted.steps)))
                print(f"round {number + 1}: {contestant} {rates[contestant][-1]:,.0f} tokens/s", flush=True)
        print("\n| | tokens/s | to one process | communication, of a step's time |\n|---|---|---|---|")
        for contestant, (processes, _) in CONTESTANTS.items():
            profile = trained(folder, contestant, wanted.steps, profile=True) / "profile"
            kinds = json.loads((profile / "table.json").read_text())["kinds"]
            spoken = sum(kind["percent"] for kind in kinds if kind["kind"].startswith("communication"))
            ratio = statistics.median(mine / one for mine, one in zip(rates[contestant], rates["one"], strict=True))
            tokens = statistics.median(rates[contestant])
            print(f"| {contestant}, {processes} process(es) | {tokens:,.0f} | {ratio:.2f} x | {spoken:.1f} % |")


if __name__ == "__main__":
    main()
