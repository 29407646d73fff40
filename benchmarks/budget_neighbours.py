"""What `model: {auto: true}` chose beside hand-made choices around it: bits per byte after the same time.

    python benchmarks/budget_neighbours.py --text novel.txt --runs runs/neighbours --out benchmarks/budget.md 2min 5min

For each budget one run chooses, then five change one thing of its choice: half and twice the size (the nearest of those
that are chosen from), half and twice the learning rates, twice the batch. `--alone` leaves the five out. All are
`artel train` on this machine, one after another; nothing else should run. Appends a table for each budget.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from artel.planning.budget.sizes import DEPTHS, Size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("budgets", nargs="+", help="2min")
    parser.add_argument("--text", type=Path, required=True, help="a file, or a pattern of files")
    parser.add_argument("--document", default="line", help="data.sources.document")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--runs", type=Path, required=True, help="where the runs are written")
    parser.add_argument("--alone", action="store_true", help="what was chosen, and nothing around it")
    parser.add_argument("--out", type=Path, required=True, help="a page, to which the tables are appended")
    asked = parser.parse_args()
    asked.runs.mkdir(parents=True, exist_ok=True)
    for budget in asked.budgets:
        lines = table(asked, budget)
        with asked.out.open("a") as page:
            page.write("\n".join(["", f"## {asked.text.name}, {budget}", "", *lines, ""]))


def table(asked: argparse.Namespace, budget: str) -> list[str]:
    run = {
        "data": {"sources": [{"path": str(asked.text.absolute()), "document": asked.document}], "validation": 0.05},
        "tokenizer": {"train": {"vocab": asked.vocab}},
        "model": {"auto": True},
        "train": {"budget": budget},
    }
    chosen, row = train(asked.runs / f"{budget}-auto", run)
    heading = "| | parameters | batch | learning rates | weight decay | passes | tokens/s | seconds | bits per byte |"
    lines = [heading, "|---|---|---|---|---|---|---|---|---|", f"| chosen | {row}"]
    for name, changes in () if asked.alone else around(chosen):
        _, row = train(asked.runs / f"{budget}-{name.replace(' ', '-')}", merged(run, chosen, changes))
        lines.append(f"| {name} | {row}")
    return lines


def around(chosen: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, keys that change)."""
    rates = ("learning_rate", "muon_learning_rate")
    here = Size(chosen["model"]["config"]["num_attention_heads"])
    sizes = {"half the size": nearest(here, 0.5), "twice the size": nearest(here, 2)}

    def scaled(factor: float) -> dict[str, Any]:
        return {"train": {rate: factor * chosen["train"][rate] for rate in rates}}

    return [
        *((name, {"model": {"config": size.config()}}) for name, size in sizes.items() if size is not None),
        ("half the learning rates", scaled(0.5)),
        ("twice the learning rates", scaled(2)),
        ("twice the batch", {"train": {"batch": 2 * chosen["train"]["batch"]}}),
    ]


def nearest(size: Size, factor: float) -> Size | None:
    """The smaller (larger) size that is nearest to so much of this one; None where there is none."""
    target = factor * size.layer_parameters
    others = [Size(depth) for depth in DEPTHS if (depth > size.depth) == (factor > 1) and depth != size.depth]
    return min(others, key=lambda other: abs(other.layer_parameters / target - 1), default=None)


def merged(run: dict[str, Any], chosen: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The run file with the choice written out, and what changes in its place."""
    keys = ("batch", "optimizer", "learning_rate", "muon_learning_rate", "weight_decay", "warmup", "decay")
    train = {key: chosen["train"][key] for key in keys} | run["train"] | changes.get("train", {})
    model = changes.get("model", {"config": chosen["model"]["config"]})
    return {**run, "data": {**run["data"], "block": chosen["data"]["block"]}, "model": model, "train": train}


def train(folder: Path, run: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(RUN/config.yaml, the cells of a row)."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({"run": str(folder), **run}, allow_unicode=True))
    with folder.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-m", "artel", "train", str(file), "--restart"]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    result = json.loads((folder / "result.json").read_text())
    last = [line for line in map(json.loads, (folder / "metrics.jsonl").open()) if "tokens_per_second" in line][-1]
    size, options = config["model"]["config"], config["train"]
    cells = (
        f"{size['num_hidden_layers']} × {size['hidden_size']}",
        options["batch"],
        f"{options['learning_rate']:g}, {options['muon_learning_rate']:g}",
        f"{options['weight_decay']:g}",
        f"{last['epoch']:.1f}",
        f"{last['tokens'] / last['seconds']:,.0f}",
        f"{result['wall_seconds']:.0f}",
        f"{result['validation']['bits_per_byte']:.4f}",
    )
    print(folder.name, *cells, file=sys.stderr, flush=True)
    return config, " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
