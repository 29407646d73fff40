"""Windows of texts with names: how much of a micro-batch is padding, as a whole and in groups of similar length.

    python benchmarks/length_groups.py MODEL ENTITIES.jsonl [--time]

MODEL is an encoder's folder. Counts an epoch of micro-batches in a random order, of texts and of paragraphs.
`--time` also runs forward and backward of three micro-batches of 16 paragraphs, in blocks of 256, alternately as a
whole and in groups, and prints the processor time of each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from artel.config import run_from
from artel.objectives import Batch, Objective, objective_of
from artel.objectives.length_groups import group_rows
from artel.preparing import prepare
from artel.tokens import Samples, micro_batches

BLOCKS, SIZES, TIMED, BATCHES = (128, 256, 512), (8, 16, 32), 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--time", action="store_true")
    arguments = parser.parse_args()
    print("| texts | block | micro-batch | windows | filler as a whole | filler in groups | positions |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        paragraphs = Path(folder, "paragraphs.jsonl")
        paragraphs.write_text("\n".join(_paragraphs(Path(arguments.data))), encoding="utf-8")
        for name, data in (("whole", Path(arguments.data)), ("paragraphs", paragraphs)):
            for block in BLOCKS:
                objective, samples = _prepared(folder, str(Path(arguments.model).resolve()), data.resolve(), block)
                for size in SIZES:
                    _count(objective, samples, f"{name} | {block}", size)
                if arguments.time and data is paragraphs and block == BLOCKS[1]:
                    _time(objective, samples)


def _paragraphs(file: Path) -> Iterator[str]:
    """Each paragraph of a text as a row of its own, with the names that are in it."""
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        at = 0
        for text in row["text"].split("\n"):
            inside = [each for each in row["entities"] if at <= each["start"] and each["end"] <= at + len(text)]
            if text.strip():
                moved = [each | {"start": each["start"] - at, "end": each["end"] - at} for each in inside]
                yield json.dumps({"text": text, "entities": moved}, ensure_ascii=False)
            at += len(text) + 1


def _prepared(folder: str, model: str, data: Path, block: int) -> tuple[Objective, Samples]:
    settings = {"sources": [{"path": str(data), "format": "entities"}], "block": block, "store": f"{folder}/stores"}
    values = {"run": f"{folder}/run", "objective": "tokens", "data": settings, "model": {"from": model}}
    prepared = prepare(run_from(values, {}, {}))
    objective = objective_of(prepared.config, prepared.tokenizer())
    return objective, objective.dataset(prepared.open().train)


def _count(objective: Objective, samples: Samples, what: str, size: int) -> None:
    tokens, whole, grouped = 0, 0, 0
    for ids in _micro_batches(objective, samples, size):
        groups = group_rows(ids, objective.group_count(len(ids)), 0).groups
        tokens += sum(map(len, ids))
        whole += group_rows(ids, 1, 0).groups[0].positions
        grouped += sum(group.positions for group in groups)
    shares = f"{1 - tokens / whole:.1%} | {1 - tokens / grouped:.1%} | {grouped / whole:.2f} of before"
    print(f"| {what} | {size} | {len(samples)} | {shares} |", flush=True)


def _micro_batches(objective: Objective, samples: Samples, size: int) -> list[list[np.ndarray]]:
    """The ids of the rows of each micro-batch of an epoch, but of the last, which may not be full."""
    order = np.random.default_rng(0).permutation(len(samples))
    starts = range(0, len(order) - size + 1, size)
    return [[samples.read(int(index)).ids for index in order[start : start + size]] for start in starts]


def _time(objective: Objective, samples: Samples) -> None:
    import torch

    from artel.models.loading.build import build_model

    model = build_model(objective.model_request(objective.config.model), objective.tokenizer).model.train()
    order = np.random.default_rng(0).permutation(len(samples))
    seconds = {"as a whole": 0.0, "in groups": 0.0}
    for start in range(0, BATCHES * TIMED, TIMED):
        some = order[start : start + TIMED]
        (rows,) = micro_batches(samples, some, 0 * some, rank=0, world=1, batch=TIMED, size=TIMED)
        for name in seconds:
            batch = objective.batch(rows) if name == "in groups" else _whole(objective, rows)
            began = time.process_time()
            with torch.autocast("cpu", torch.bfloat16):
                loss = objective.loss(model, batch)[0]
            loss.backward()
            seconds[name] += time.process_time() - began if start else 0.0  # the first pays for what is begun
            model.zero_grad(set_to_none=True)
    print("|", " | ".join(f"{name}: {value:.1f} s" for name, value in seconds.items()), "|", flush=True)


def _whole(objective: Objective, rows: object) -> Batch:
    """The same micro-batch in one group, as a pipeline has it."""
    run = objective.config
    objective.config = run.model_copy(update={"parallel": run.parallel.model_copy(update={"pipeline": 2})})
    try:
        return objective.batch(rows)
    finally:
        objective.config = run


if __name__ == "__main__":
    main()
