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

import yaml

from artel.config import recipe_names

PAGE = Path(__file__).parent / "recipes.md"
_READ = yaml.safe_load((Path(__file__).parent / "recipes_here.yaml").read_text(encoding="utf-8"))
HERE: dict[str, list[str]] = _READ["here"]
NOT_HERE: dict[str, str] = _READ["not_here"]


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
