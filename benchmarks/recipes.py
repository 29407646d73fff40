"""Train the recipes that two cores can train in ten minutes, and write what they reach: benchmarks/recipes.md.

Each recipe is planned first, by rates that `artel hardware` measures on this machine (a minute, once). What the
plan gives more than `--minutes`, or what needs a text, a model or GPUs that are not here, is not run, and the page says
why.

make recipes
python benchmarks/recipes.py --data ../shared/data --only nq-dummy
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from artel.config import recipe_names

PAGE = Path(__file__).parent / "recipes.md"
# Overrides of a recipe that trains here; {data} is the folder of --data.
HERE = {
    "comma-restoration": ["data.sources.0.path={data}/sentences/ru_sentences.txt"],
    "demo": [],
    "demo-ru": [],
    "novel-small": ["data.sources.0.path={data}/literature/anna_karenina.txt"],
    "nq-dummy": [],
    "tolstoy-fast": [
        "data.sources.0.path={data}/literature/anna_karenina.txt", "data.sources.0.document=auto", "data.block=256",
        "tokenizer.train.vocab=4096", "model.config.n_layer=4", "model.config.n_embd=192", "model.config.n_head=6",
        "train.steps=200",
    ],
}  # fmt: skip
NOT_HERE = {
    "classify-ru": "begins from a model of the hub",
    "chat-lora": "begins from a model of the hub, of 0.6 billion parameters",
    "chat-qlora": "begins from a model of the hub, of 8 billion parameters",
    "distill-small": "learns from the model of another recipe, novel-small",
    "dpo": "begins from a model of the hub, of 0.6 billion parameters",
    "nanogpt-30m": "takes a tokenizer of the hub; 5,000 steps of 320 rows are for a GPU",
    "ner-ru": "begins from a model of the hub",
    "nq-bert": "Natural Questions and a model of the hub, on eight GPUs",
    "pile": "The Pile, on eight GPUs",
    "pile-125m": "The Pile, on eight GPUs",
    "pile-235b": "The Pile, on 256 GPUs",
    "embed-ru": "begins from a model of the hub",
    "rerank": "begins from a model of the hub",
    "reward": "begins from a model of the hub, of 0.6 billion parameters",
    "rugpt35-13b-lora": "begins from a model of the hub, of 13 billion parameters",
    "rugpt-distill": "its teacher is a model of the hub, of 0.8 billion parameters",
    "ruroberta-mlm": "begins from a model of the hub",
    "spelling-ru": "begins from a model of the hub",
    "squad-ru": "begins from a model of the hub",
    "tolstoy-finetune": "begins from a model of the hub",
    "tolstoy-scratch": "30 epochs of eight works, on a GPU",
}


def artel(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "artel", *words], capture_output=True, text=True)


def planned_minutes(name: str, overrides: list[str]) -> tuple[float | None, str]:
    """Minutes that a recipe is planned to take here; why there are none."""
    done = artel("plan", name, *overrides, "--json")
    if done.returncode:
        return None, done.stderr.strip().splitlines()[-1]
    hours = json.loads(done.stdout)["hours"]
    return (hours["mid"] * 60, "") if hours else (None, "no planned time")


def row_of(name: str, data: Path, minutes: float, folder: Path) -> str:
    """The recipe's line of the table: what it reached, or why it was not run."""
    if name in NOT_HERE:
        return f"| {name} | | not run: {NOT_HERE[name]} | | |"
    overrides = [word.format(data=data) for word in HERE[name]]
    missing = [word for word in overrides if "/" in word and not Path(word.partition("=")[2]).exists()]
    if missing:
        return f"| {name} | | not run: {missing[0]} is not here | | |"
    planned, why = planned_minutes(name, overrides)
    if planned is not None and planned > minutes:
        return f"| {name} | {planned:.1f} | not run: over {minutes:.0f} min | | |"
    print(f"{name}: planned {planned or why}", file=sys.stderr)
    started = time.monotonic()
    done = artel("train", name, *overrides, f"run={folder / name}", "--json")
    if done.returncode:
        return f"| {name} | {why or f'{planned:.1f}'} | failed: {done.stderr.strip().splitlines()[-1]} | | |"
    result = json.loads((folder / name / "result.json").read_bytes())
    figures = ", ".join(f"{key} {value:.4g}" for key, value in result["validation"].items())
    took = (time.monotonic() - started) / 60
    return f"| {name} | {why or f'{planned:.1f}'} | {took:.1f} | {result['steps']:,} | {figures} |"


def page(rows: list[str]) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    head = f"""# What the recipes reach

`make recipes` (`benchmarks/recipes.py`) on {datetime.date.today():%d.%m.%Y}, at {commit}, with {os.cpu_count()} cores,
whatever else they did meanwhile. Minutes are of the whole `artel train`, the text included; the planned ones are by
`artel plan`.

| recipe | planned minutes | minutes | steps | validation at the end |
|---|---|---|---|---|
"""
    return head + "\n".join(rows) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description="Train the recipes that this machine can, and write their figures.")
    options.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of real texts")
    options.add_argument("--minutes", type=float, default=10, help="what a recipe may take, by its plan")
    options.add_argument("--only", action="append", help="a recipe; others are not run (may be repeated)")
    chosen = options.parse_args()
    unknown = set(recipe_names()) - HERE.keys() - NOT_HERE.keys()
    if unknown:
        sys.exit(f"say in HERE or NOT_HERE what is with {', '.join(sorted(unknown))}")
    if not chosen.only:
        artel("hardware")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in recipe_names():
            if chosen.only and name not in (*chosen.only, *NOT_HERE):
                rows.append(f"| {name} | | not run: not asked for | | |")
            else:
                rows.append(row_of(name, chosen.data.resolve(), chosen.minutes, Path(folder)))
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
