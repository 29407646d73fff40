"""What a run has done: its loss as a curve in the terminal, and its bits per byte beside a compressor's."""

from __future__ import annotations

import lzma
import math
from pathlib import Path

import orjson

from artel.config import near_name
from artel.errors import InputError, Problem
from artel.tokens import StorePart, Tokenizer


def read_metrics(path: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl. Raises InputError where there are none."""
    if not path.is_file():
        near = None if path.parent.is_dir() else near_name(str(path.parent))
        fix = f"did you mean {near}?" if near else "give the folder of a run that has been trained"
        raise InputError([Problem(str(path), "there is no such file", fix)])
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def curve(metrics: list[dict], width: int = 64, height: int = 12) -> list[str]:
    """Training loss (·) and validation loss (o) over steps, drawn in characters."""
    training = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    validation = [(line["step"], line["validation"]["loss"]) for line in metrics if "validation" in line]
    points = training + validation
    if not points:
        return ["(nothing logged yet)"]
    last = max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    grid = [[" "] * width for _ in range(height)]
    for mark, series in (("·", training), ("o", validation)):
        for step, loss in series:
            column = min(width - 1, int(step / max(1, last) * (width - 1)))
            row = 0 if high == low else round((high - loss) / (high - low) * (height - 1))
            grid[row][column] = mark
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(row, ''):>7} │{''.join(cells)}" for row, cells in enumerate(grid)]
    axis = f"{'':>7} └{'─' * width}"
    return [*lines, axis, f"{'':>9}0{'step ' + str(last):>{width - 1}}", f"{'':>9}· training   o validation"]


def compression(train: StorePart, validation: StorePart, tokenizer: Tokenizer) -> dict[str, float]:
    """Bits per byte of `xz -9` on the validation text: alone, and after it has seen the training text.

    The second is what a model is fairly compared with: size(training + validation) - size(training).
    """
    texts = [_text(part, tokenizer) for part in (train, validation)]
    alone = _xz(texts[1])
    after = _xz(texts[0] + texts[1]) - _xz(texts[0])
    bits = 8 / max(1, len(texts[1]))
    return {"xz": alone * bits, "xz_after_training_text": after * bits}


def _text(part: StorePart, tokenizer: Tokenizer) -> bytes:
    return "\n".join(tokenizer.decode(ids[:-1]) for _, ids in part.each_sample()).encode()


def _xz(data: bytes) -> int:
    # The preset's window (64 MiB) must hold the training text, or "after" would forget its beginning.
    window = 1 << max(20, math.ceil(math.log2(len(data) + 1)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(window, 1 << 30)}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters))
