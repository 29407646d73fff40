"""How much of a micro-batch of preference pairs is padding, where pairs share rows: counted, nothing is trained.

    python benchmarks/preference_filler.py MODEL preferences.json

MODEL is a chat model's folder. Prints the share of filler by the size of the micro-batch: with a row for each answer,
with a row for each pair, and as artel's rows are.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from artel.config import run_from
from artel.objectives import objective_of
from artel.objectives.answer_rows import Answer, answer_tensors
from artel.preparing import prepare
from artel.tokens import Sample


def main() -> None:
    model, data = (str(Path(name).resolve()) for name in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        source = {"path": data, "format": "preference"}
        settings = {"sources": [source], "validation": 0.05, "block": 1024, "store": f"{folder}/stores"}
        values = {"run": f"{folder}/run", "objective": "preference", "data": settings, "model": {"from": model}}
        prepared = prepare(run_from(values, {}, {}))
        samples = objective_of(prepared.config, prepared.tokenizer()).dataset(prepared.open().train)
        pairs = [_answers(samples.read(index)) for index in np.random.default_rng(0).permutation(len(samples))]
    print(
        f"{len(pairs)} pairs\n\n| micro-batch | a row an answer | a row a pair | pairs share rows |\n|---|---|---|---|"
    )
    for size in (1, 2, 4, 8, 16):
        together = [pairs[start : start + size] for start in range(0, len(pairs) - size + 1, size)]
        shares = [_filler(together, shared=False), _filler([[pair] for pair in pairs], shared=True, rows=together)]
        print(f"| {size} | {shares[0]:.1%} | {shares[1]:.1%} | {_filler(together, shared=True):.1%} |")


def _answers(sample: Sample) -> list[Answer]:
    ends = np.cumsum(sample.numbers)
    assert sample.flags is not None
    spans = [slice(end - length, end) for end, length in zip(ends, sample.numbers, strict=True)]
    return [Answer(sample.ids[span], sample.flags[span]) for span in spans]


def _filler(batches: list[list[list[Answer]]], *, shared: bool, rows: list[list[list[Answer]]] | None = None) -> float:
    """The share of filler; of `rows` of one pair each, which are as long as the longest of their micro-batch."""
    if rows is not None:
        sizes = [[_tokens([pair], shared=True) for pair in batch] for batch in rows]
        return 1 - sum(map(sum, sizes)) / sum(len(batch) * -(-max(batch) // 16) * 16 for batch in sizes)
    tokens = sum(_tokens(batch, shared=shared) for batch in batches)
    return 1 - tokens / sum(answer_tensors(batch, shared=shared)["input_ids"].numel() for batch in batches)


def _tokens(batch: list[list[Answer]], *, shared: bool) -> int:
    if shared:
        return int((answer_tensors(batch, shared=True)["documents"] > 0).sum())
    return sum(len(answer.ids) - 1 for pair in batch for answer in pair)


if __name__ == "__main__":
    main()
