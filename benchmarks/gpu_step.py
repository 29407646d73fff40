"""Work of a training step on one GPU, counted without a GPU: FLOPs, bytes and kernels by group.

    python benchmarks/gpu_step.py [NAME ...]

Each case is traced as `artel plan` traces a run: compiled layers, bf16, an H200, one micro-batch a step.
`PYTHONPATH=OTHER/src` counts the steps of another version.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import yaml

from artel.config import load_run
from artel.planning.hardware import find_hardware
from artel.planning.operations import COLLECTIVE, VIEW, Operation
from artel.planning.plan.run_plan import make_plan

GPT2 = {"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
LLAMA = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
         "num_key_value_heads": 32, "intermediate_size": 5504, "tie_word_embeddings": False}  # fmt: skip
CASES = {
    "gpt2 124M, 32 x 1,024": (GPT2, 50_257, 32, 1024),
    "llama 1.5B, 16 x 2,048, 32,000 ids": (LLAMA, 32_000, 16, 2048),
    "llama 1.5B, 4 x 4,096, 128,256 ids": (LLAMA, 128_256, 4, 4096),
}
"""Config, ids, rows and length of each case."""


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    print("| case | group | TFLOP | GB forward | GB backward | kernels |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for row in rows_of(name, Path(folder)):
                print("| " + " | ".join(row) + " |", flush=True)


def rows_of(name: str, folder: Path) -> list[list[str]]:
    config, vocabulary, rows, length = CASES[name]
    run = {
        "run": str(folder / "run"),
        "model": {"config": config | {"vocab_size": vocabulary}},
        "data": {"sources": [{"format": "dummy", "documents": 3000}], "validation": 0, "block": length},
        "tokenizer": {"train": {"vocab": 500}},
        "train": {"steps": 10, "batch": rows, "micro_batch": rows, "precision": "bf16", "compile": "on",
                  "optimizer": "adamw", "activation_checkpointing": "none"},
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    plan = make_plan(load_run(str(file)), find_hardware("h200"))
    rank = plan.ranks[0]
    table = [group_row(name, kind, rank.passes, kind) for kind in ("matmul", "attention", "fused", "memory")]
    return [*table, group_row(name, "optimizer and clipping", rank.optimizer_operations, None)]


def group_row(case: str, title: str, operations: dict[Operation, int], kind: str | None) -> list[str]:
    totals: Counter[str] = Counter()
    for operation, count in operations.items():
        if operation.kind in (VIEW, COLLECTIVE) or (kind is not None and operation.kind != kind):
            continue
        totals["flops"] += count * operation.flops
        totals["backward" if operation.is_backward else "forward"] += count * operation.bytes
        totals["kernels"] += count
    gigabytes = [f"{totals[name] / 1e9:.1f}" for name in ("forward", "backward")]
    return [case, title, f"{totals['flops'] / 1e12:.2f}", *gigabytes, f"{totals['kernels']:,}"]


if __name__ == "__main__":
    main()
