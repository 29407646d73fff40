"""What LoRA on real conversations changes: a model's evaluation loss and its answers, before and after.

    python benchmarks/chat_answers.py MODEL_FOLDER CONVERSATIONS... [--steps 30] [--blocks 2] [--block 1024]

The run is that of chat_packed.py (rank 16, all linear layers, packed conversations), but a tenth of the conversations
is held out. Their loss is that of `artel evaluate`, of the model's folder and of the run, on the same part; the answers
are those of `validate.prompts`, written before the first step and after the last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

PROMPTS = [
    "Who are you?",
    "Give me three tips for sleeping better.",
    "How do I sort a list of names in Python?",
    "What is the capital of Australia, and why is it not Sydney?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("conversations", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=2, help="of a step")
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run.yaml"
        run.write_text(yaml.safe_dump(run_file(options, folder)))
        artel("train", run, show=True)
        evaluated = artel("evaluate", options.model, folder / "run", "--data", run, "--json")
        samples = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    before, after = (model["figures"] for model in json.loads(evaluated)["models"])
    print("| | before | after |\n|---|---|---|")
    for figure in before:
        print(f"| {figure} | {before[figure]:.3f} | {after[figure]:.3f} |")
    for prompt in PROMPTS:
        answers = [sample["text"] for sample in samples if sample["prompt"] == prompt]
        print(f"| {prompt} | {in_a_cell(answers[0])} | {in_a_cell(answers[-1])} |")


def run_file(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "run": str(folder / "run"),
        "data": {
            "sources": [{"path": str(path.resolve()), "format": "chat"} for path in options.conversations],
            "block": options.block, "packing": "best_fit", "validation": 0.1, "store": str(folder / "store"),
        },
        "model": {"from": str(options.model), "lora": {"rank": 16, "alpha": 32}},
        "objective": "chat",
        "train": {"steps": options.steps, "batch": options.blocks, "micro_batch": options.blocks,
                  "learning_rate": 2e-4, "threads": options.threads, "compile": "off"},
        "validate": {"every": "never", "prompts": PROMPTS, "new_tokens": options.new_tokens},
        "checkpoint": {"every": "never", "best": None},
        "track": ["jsonl"],
    }  # fmt: skip


def artel(*arguments: str | Path, show: bool = False) -> str:
    """What the command prints on standard output; `show` lets people see what it says beside it."""
    command = [sys.executable, "-m", "artel", *map(str, arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=None if show else subprocess.PIPE)
    if done.returncode:
        raise SystemExit(done.stderr.decode() if done.stderr else done.returncode)
    return done.stdout.decode()


def in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
