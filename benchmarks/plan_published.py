"""Memory that `artel plan` predicts, beside what others measured and published: writes benchmarks/plan_published.md.

    python benchmarks/plan_published.py [--folder DIR] [--only NAME…]

Each case of plan_published.yaml is a run file in the shape of the published run. Nothing is fitted to these figures.
The published ones are those of other programs, with kernels and buffers of their own: what differs is said above the
table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from plan import argument_parser, begin, planned, write

_READ = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def main() -> None:
    options, page = begin(argument_parser(__doc__, "plan-published").parse_args(), __file__)
    cases = [case for case in _READ["cases"] if any(part in case["name"] for part in options.only or [""])]
    lines = ["| case | planned | published | difference | planned for |", "|---|---|---|---|---|", *map(row_of, cases)]
    write(page, "\n".join(lines), options)


def row_of(case: dict[str, Any]) -> str:
    """Plan a case. Return its row: predicted, published, difference, and what the memory holds."""
    run = {
        "run": "run",
        "data": {"sources": [{"format": "dummy", "documents": 1000}], "block": case["block"]},
        "tokenizer": {"train": {"vocab": case["vocabulary"]}},
        "model": {"config": _READ["models"][case["model"]]},
        "train": {"batch": case["batch"], "steps": 10_000, "precision": "bf16", **case["train"]},
        "parallel": case["parallel"],
    }
    file = Path("run.yaml")
    file.write_text(yaml.safe_dump(run))
    nodes = str(case.get("nodes", 1))
    plan = planned(file, "--hardware", case["hardware"], "--nodes", nodes, "--host-memory", "2TB")
    kinds = plan["per_rank_gib"]
    predicted = kinds["allocated"]
    largest = sorted((kind for kind in kinds if kind not in ("allocated", "reserved")), key=lambda kind: -kinds[kind])
    held = ", ".join(f"{kind.replace('_', ' ')} {kinds[kind]:.1f}" for kind in largest if kinds[kind] >= 0.05)
    gib = case["gib"]
    return f"| {case['name']} | {predicted:.1f} | {gib:.1f} | {predicted / gib - 1:+.0%} | {held} |"


if __name__ == "__main__":
    main()
