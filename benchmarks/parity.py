"""The same numbers however a model is split: writes benchmarks/parity.md.

    python benchmarks/parity.py [--steps 20] [--tables layouts] [--models gpt2,llama] [--layouts fsdp-2] [--out FILE]

Each cell trains a tiny model for 20 steps under a layout with `artel train`'s own loop, twice (SGD and AdamW, two
micro-batches a process, clipping on, rows of unequal length, float32), and once in a process alone. Shown is the
largest relative difference of loss or gradient norm over all steps. A cell that a model cannot have shows why it was
refused.
All cells of as many processes share one start (tests/support/ranks.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.objectives import OBJECTIVES, objective_run  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

ParallelStrategy = tuple[int, dict[str, Any]]
_READ = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MODELS: dict[str, dict[str, Any]] = _READ["models"]
LAYOUTS: dict[str, ParallelStrategy] = {name: tuple(layout) for name, layout in _READ["layouts"].items()}
ADAPTED: dict[str, dict[str, Any]] = _READ["adapted"]
SHARE_THE_BATCH, OF_ADAPTED, OF_PREFERENCES = map(_READ.get, ("share_the_batch", "of_adapted", "of_preferences"))
PREFERENCES = ("dpo", "kto")
SAMPLES = 64
"""Rows of a global batch: two micro-batches of 16 for each of two processes, of 8 for each of four."""


def run_file(
    folder: Path, name: str, world: int, sections: dict[str, Any], parallel: dict[str, Any], **train: Any
) -> Path:
    parallel = dict(parallel)
    if isinstance(parallel.get("deepspeed"), dict):
        settings = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", **parallel["deepspeed"]}
        file = folder / f"{name}.json"
        file.write_text(json.dumps(settings))
        parallel["deepspeed"] = str(file)
    fixed = math.prod(parallel.get(key, 1) for key in ("tensor", "pipeline", "context"))
    rows = SAMPLES // (world // fixed) // 2
    if "pipeline" in parallel:
        rows = SAMPLES // (world // fixed) // 8  # a pipeline of four stages needs as many micro-batches
    run = {
        "run": str(folder / name),
        "tokenizer": {"train": {"vocab": 403}, "replace": "from" in sections.get("model", {})},
        **sections,
        "data": DATA | sections.get("data", {}) | {"validation": 0, "store": str(folder / "stores")},
        "train": {"batch": SAMPLES, "micro_batch": rows, "warmup": 2, "clip": 0.5, "compile": "off",
                  "precision": "fp32", "threads": 1, **train},
        "validate": {"every": "never"},
        "checkpoint": {"every": "never", "best": None},
        "log": {"every": 1},
        "track": ["jsonl"],
        "parallel": parallel,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


DATA = {"sources": [{"format": "dummy", "documents": 300}], "block": 32, "packing": "best_fit"}
OPTIMIZERS = {"sgd": {"optimizer": "sgd", "learning_rate": 0.3}, "adamw": {"optimizer": "adamw", "learning_rate": 2e-3}}
# At 0.3 SGD is chaotic with adapters: one process parts from itself. The rows of one process in both tables show it.
OF_ADAPTERS = OPTIMIZERS | {"sgd": {"optimizer": "sgd", "learning_rate": 0.1}}
# A global batch that no number of processes divides: some take a row less, and fill it up.
UNEVEN = {name: train | {"batch": 61} for name, train in OPTIMIZERS.items()}
TABLES = ("layouts", "uneven", "adapters", "objectives", "preferences", "packed")


Cells = dict[tuple[str, str], tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]]
"""(layout, model) -> processes, sections of the run file; of this layout: its section `parallel`, keys of `train`."""


def cells(models: list[str], layouts: list[str]) -> Cells:
    by_layout: Cells = {}
    for layout in layouts:
        world, parallel = LAYOUTS[layout]
        # A ring has no masks: its rows are joined texts without padding.
        data = {"data": {"packing": "concatenate"}} if parallel.get("exchange") == "ring" else {}
        layers = 8 if "pipeline" in parallel else 4  # four processes with two stages each
        by_layout |= {(layout, model): (world, deep(MODELS[model], layers) | data, parallel, {}) for model in models}
    return by_layout


def deep(sections: dict[str, Any], layers: int) -> dict[str, Any]:
    """A model of so many layers."""
    config = sections["model"]["config"]
    name = "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"
    return sections | {"model": {"config": config | {name: layers}}}


def adapted(folder: Path, models: list[str], chosen: list[str]) -> Cells:
    """LoRA over plain, bf16 and quantized bases that are trained for a step first; and one process beside itself."""
    bases = {model: run_file(folder, f"base-{model}", 1, deep(MODELS[model], 4), {}, steps=1) for model in models}
    trained = os.pathsep.join(map(str, bases.values()))
    run_ranks(1, ROOT / "tests/support/workers/layout_cases.py", "run_files", 600, CASES=trained)
    halved = {"micro_batch": SAMPLES // 4}  # as two processes have it
    layouts = {"1": (1, {}, halved)} | {layout: (*LAYOUTS[layout], {}) for layout in chosen}
    return {
        (f"{name}-{layout}", model): (
            world, MODELS[model] | {"model": {"from": str(base.with_suffix("") / "model"), **more}}, parallel, train)
        for model, base in bases.items() for name, more in ADAPTED.items()
        for layout, (world, parallel, train) in layouts.items()
    }  # fmt: skip


def objectives(folder: Path) -> Cells:
    """Every objective, on records made for it (tests/support/objectives.py)."""
    return {("fsdp-2", name): (2, sections_of(folder, name), {"data": "fsdp"}, {}) for name in OBJECTIVES}


def sections_of(folder: Path, name: str) -> dict[str, Any]:
    """The sections of the run file of an objective; `run_file` has its own in place of some."""
    tree = yaml.safe_load(objective_run(folder / f"{name}.yaml", name).read_text())
    sections = {key: section for key, section in tree.items() if key != "run"}
    return sections | {"data": {"packing": "concatenate", **sections["data"]}}


def under_layouts(layouts: list[str], name: str, sections: dict[str, Any], layers: int = 4) -> Cells:
    """One model under each layout; with two stages for each of four processes where it is a pipeline."""
    by_layout: Cells = {}
    for layout in layouts:
        world, parallel = LAYOUTS[layout]
        by_layout[layout, name] = (world, deep(sections, 8 if "pipeline" in parallel else layers), parallel, {})
    return by_layout


def preferences(folder: Path, layouts: list[str]) -> Cells:
    """Losses of whole answers, whose positions have gradients of different factors."""
    parts = [under_layouts(layouts, name, sections_of(folder, name), layers=2) for name in PREFERENCES]
    return {cell: value for part in parts for cell, value in part.items()}


def packed(folder: Path, layouts: list[str]) -> Cells:
    """Conversations that share blocks, under each layout."""
    tree = yaml.safe_load(objective_run(folder / "packed.yaml", "chat").read_text())
    sections = {key: tree[key] for key in ("data", "tokenizer", "model", "objective")}
    sections["data"] = {**sections["data"], "packing": "best_fit"}
    return under_layouts(layouts, "packed chat", sections)


def measure(
    folder: Path, cells: Cells, steps: int, seconds: float, optimizers: dict[str, dict[str, Any]] = OPTIMIZERS
) -> Iterator[dict[tuple[str, str], float | str]]:
    """Largest relative difference to one process, or why it was refused; yields the cells of one start at a time."""
    starts: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for cell, (world, *_) in cells.items():
        starts.setdefault((world, cell[1]), []).append(cell)
    alone: dict[tuple[str, str], Path] = {}
    """By sections and optimizer, the run of one process."""
    for (world, model), group in sorted(starts.items(), key=lambda start: start[0][0]):
        runs: dict[tuple[tuple[str, str], str], Path] = {}
        references = {}
        for cell in group:
            _, sections, parallel, own = cells[cell]
            key = json.dumps(sections, sort_keys=True)
            for optimizer, train in optimizers.items():
                name = f"{cell[0]}-{cell[1]}-{optimizer}"
                runs[cell, optimizer] = run_file(folder, name, world, sections, parallel, steps=steps, **train, **own)
                if (key, optimizer) not in alone:
                    name = f"alone-{len(alone)}"
                    alone[key, optimizer] = run_file(folder, name, 1, sections, {}, steps=steps, **train)
                    references[name] = alone[key, optimizer]
        if references:
            assert refusals_of(1, folder, list(references.values()), seconds) == [None] * len(references)
        began = time.monotonic()
        refused = dict(zip(runs, refusals_of(world, folder, list(runs.values()), seconds), strict=True))
        print(f"{world} processes, {model}: {len(runs)} runs in {time.monotonic() - began:.0f} s", file=sys.stderr)
        measured: dict[tuple[str, str], float | str] = {}
        for cell in group:
            reasons = [reason for optimizer in optimizers if (reason := refused[cell, optimizer]) is not None]
            key = json.dumps(cells[cell][1], sort_keys=True)
            measured[cell] = reasons[0] if reasons else max(
                difference(alone[key, optimizer], runs[cell, optimizer], steps) for optimizer in optimizers
            )  # fmt: skip
        yield measured


def refusals_of(world: int, folder: Path, files: list[Path], seconds: float) -> list[str | None]:
    """Why each run was refused; None for those that ran."""
    refusals: list[str | None] = run_ranks(
        world, ROOT / "tests/support/workers/layout_cases.py", "run_files", seconds,
        CASES=os.pathsep.join(map(str, files)), CASES_LOG=str(folder / "log"),
    )[0]  # fmt: skip
    return refusals


def difference(one: Path, other: Path, steps: int) -> float:
    """The largest relative difference of loss or gradient norm over all steps of two run files' runs."""
    folders = (one.with_suffix(""), other.with_suffix(""))
    read = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in folders]
    measured, expected = ([(line["loss"], line["gradient_norm"]) for line in lines if "loss" in line] for lines in read)
    assert len(measured) == len(expected) == steps, (one, other, len(measured), len(expected))
    return max(abs(a - b) / abs(b) for pair in zip(measured, expected, strict=True) for a, b in zip(*pair, strict=True))


def table(measured: dict[tuple[str, str], float | str]) -> str:
    models = list(dict.fromkeys(model for _, model in measured))
    notes: list[str] = []
    lines = [f"| | {' | '.join(models)} |", f"|---|{'---|' * len(models)}"]
    for layout in dict.fromkeys(layout for layout, _ in measured):
        shown = []
        for model in models:
            value = measured.get((layout, model))
            if value == "not run":
                shown.append(value)
            elif isinstance(value, str):
                reason = re.sub(r"\s+", " ", value).strip()
                if reason not in notes:
                    notes.append(reason)
                shown.append(f"refused [{notes.index(reason) + 1}]")
            else:
                shown.append("" if value is None else f"{value:.1e}")
        lines.append(f"| {layout} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of each start")
    parser.add_argument("--out", type=Path, help="written there after each start")
    options = parser.parse_args()
    models = options.models.split(",")
    tables: dict[str, dict[tuple[str, str], float | str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tables_to_run: dict[str, tuple[Cells, dict[str, dict[str, Any]]]] = {}
        if "layouts" in options.tables:
            tables_to_run["Layouts"] = (cells(models, options.layouts.split(",")), OPTIMIZERS)
        if "uneven" in options.tables:
            layouts = [layout for layout in options.layouts.split(",") if layout in SHARE_THE_BATCH]
            tables_to_run["A global batch of 61 rows"] = (cells(models, layouts), UNEVEN)
        if "adapters" in options.tables:
            those = adapted(folder, models, [layout for layout in options.layouts.split(",") if layout in OF_ADAPTED])
            tables_to_run |= {"Adapters": (those, OF_ADAPTERS), "Adapters with SGD at 0.3": (those, OPTIMIZERS)}
        if "objectives" in options.tables:
            tables_to_run["Objectives"] = (objectives(folder), OPTIMIZERS)
        if "preferences" in options.tables:
            layouts = [layout for layout in options.layouts.split(",") if layout in OF_PREFERENCES]
            tables_to_run["Preferences"] = (preferences(folder, layouts), OPTIMIZERS)
        if "packed" in options.tables:
            tables_to_run["Packed conversations"] = (packed(folder, options.layouts.split(",")), OPTIMIZERS)
        for title, (those, optimizers) in tables_to_run.items():
            tables[title] = dict.fromkeys(those, "not run")
            place = folder / title  # the runs alone are numbered, in each table anew
            place.mkdir()
            for measured in measure(place, those, options.steps, options.seconds, optimizers):
                tables[title] |= measured
                text = "\n\n".join(f"## {title}\n\n{table(cells)}" for title, cells in tables.items())
                if options.out:
                    options.out.write_text(f"{HEAD.format(steps=options.steps)}\n{text}\n")
    print(text)


HEAD = """# The same numbers however a model is split

`python benchmarks/parity.py --steps {steps} --out benchmarks/parity.md`: the largest relative difference of loss or
gradient norm to one process over {steps} steps, of SGD (at 0.3; adapters at 0.1 and at 0.3) and AdamW, in float32:
two micro-batches a process (eight in a pipeline), clipping on, rows of unequal length (packed documents that are kept
apart; a ring's rows are joined texts). Tiny models of 4 layers (8 in pipelines), 32 wide, 403 ids. Bound: 1e-5. A
number at the end of a layout's name is that of processes; refused cells say why below. One process beside itself
(lora-1 and its kin) has micro-batches of half the rows: what it parts by is not the layout's doing.
"""


if __name__ == "__main__":
    main()
