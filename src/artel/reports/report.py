"""The loss of a run as a curve in the terminal, and the bits per byte of a compressor to compare with."""

from __future__ import annotations

import lzma
import math
from collections.abc import Callable
from pathlib import Path

import orjson

from artel.config import near_name
from artel.errors import InputError, Problem
from artel.reports.metric_lines import checked
from artel.storage import check_regular
from artel.tokens import StoreSplit, Tokenizer

_MOST_PROBLEMS = 20


def read_metrics(path: Path, tell: Callable[[str], None] = lambda _: None) -> list[dict]:
    """The lines of a run's metrics.jsonl. A last line that a kill has cut off is left out, and `tell` reports it.

    Raises InputError where there is no file, where it cannot be read, and for lines that no run writes.
    """
    check_regular(path)
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        near = None if path.parent.is_dir() else near_name(str(path.parent))
        fix = f"did you mean {near}?" if near else "give the folder of a run that has been trained"
        raise InputError.at(str(path), "there is no such file", fix) from None
    except OSError as error:
        raise InputError.at(str(path), f"cannot be read: {error.strerror}", "it must be a file") from None
    *complete, last = content.split(b"\n")
    if last:
        tell(f"{path}:{len(complete) + 1}: the last line was torn by a kill, and is left out")
    problems, lines = [], []
    for number, line in enumerate(complete, 1):
        try:
            lines.append(checked(orjson.loads(line)))
        except ValueError as error:
            problems.append(Problem(f"{path}:{number}", f"is no line of a run: {error}", "remove the line"))
    if problems:
        raise InputError(problems[:_MOST_PROBLEMS])
    return lines


def curve(metrics: list[dict], width: int = 64, height: int = 12) -> list[str]:
    """Training loss (·) and validation loss (o) over steps, drawn in characters."""
    validated = [(line["step"], line["validation"].get("loss")) for line in metrics if "validation" in line]
    training = [(line["step"], line["loss"]) for line in metrics if line.get("loss") is not None]
    validation = [(step, loss) for step, loss in validated if loss is not None]
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


def compression(train: StoreSplit, validation: StoreSplit, tokenizer: Tokenizer) -> dict[str, float]:
    """Bits per byte of `xz -9` on the validation text: alone, and after the training text.

    The second is the fair comparison with a model: size(training + validation) - size(training).
    """
    texts = [_text(part, tokenizer) for part in (train, validation)]
    alone = _xz(texts[1])
    after = _xz(texts[0] + texts[1]) - _xz(texts[0])
    bits = 8 / max(1, len(texts[1]))
    return {"xz": alone * bits, "xz_after_training_text": after * bits}


def _text(part: StoreSplit, tokenizer: Tokenizer) -> bytes:
    return "\n".join(tokenizer.decode(ids[:-1]) for _, ids in part.each_sample()).encode()


def _xz(data: bytes) -> int:
    # The preset's window (64 MiB) must hold the training text, or "after" would forget its beginning.
    window = 1 << max(20, math.ceil(math.log2(len(data) + 1)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(window, 1 << 30)}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters))
