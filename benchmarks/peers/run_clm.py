"""A peer of benchmarks/prepare_speed.py: text to blocks as run_clm.py of transformers makes them, with datasets.

    python benchmarks/prepare_speed.py --only end_to_end --peer benchmarks/peers/run_clm.py

It does what examples/pytorch/language-modeling/run_clm.py does before its first training step, in the same order and
with the same defaults: load JSON lines; take the first 5% for validation; tokenize in batches of 1000; join each batch
and cut it into blocks of 1024, dropping the rest; copy the labels. Its store is the Arrow files in CACHE. It builds no
model and does not import torch, which run_clm.py does first. It imports nothing of artel: only datasets is measured.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

BLOCK = 1024


def main(file: str, tokenizer_name: str, cache: str, processes: int) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    def load(split: str) -> Any:
        return load_dataset("json", data_files={"train": file}, split=split, cache_dir=cache)

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    parts = {"validation": load("train[:5%]"), "train": load("train[5%:]")}
    workers = processes if processes > 1 else None  # run_clm.py's own default is None: no process beside its own

    def encoded(examples: dict[str, list]) -> Any:
        return tokenizer(examples["text"])

    def grouped(examples: dict[str, list]) -> dict[str, list]:
        joined = {name: list(chain(*lists)) for name, lists in examples.items()}
        length = len(joined["input_ids"]) // BLOCK * BLOCK
        result = {name: [ids[at : at + BLOCK] for at in range(0, length, BLOCK)] for name, ids in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    blocks = 0
    for part in parts.values():
        tokens = part.map(encoded, batched=True, num_proc=workers, remove_columns=part.column_names)
        blocks += len(tokens.map(grouped, batched=True, num_proc=workers))
    print(f"{blocks * BLOCK:,} tokens")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
