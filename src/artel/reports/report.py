"""The loss of a run as a curve in the terminal, and the bits per byte of a compressor to compare with."""

from __future__ import annotations

import lzma
import math
from collections.abc import Callable
from pathlib import Path

from artel.config import near_name
from artel.errors import InputError
from artel.reports.curves import Curve, CurveReader, Curves
from artel.tokens import StoreSplit, Tokenizer


def read_curves(path: Path, tell: Callable[[str], None] = lambda _: None) -> Curves:
    """The curves of a run's metrics.jsonl. A last line that a kill has cut off is left out, and `tell` reports it.

    Raises InputError where there is no file, where it cannot be read, and for lines that no run writes.
    """
    if not path.exists():
        if (path.parent / "config.yaml").is_file():
            what = "has not been trained yet: no step is logged"
            raise InputError.at(str(path.parent), what, f"train it: artel train {path.parent}")
        near = None if path.parent.is_dir() else near_name(str(path.parent))
        fix = f"did you mean {near}?" if near else "give the folder of a run that has been trained"
        raise InputError.at(str(path), "there is no such file", fix)
    curves = CurveReader(path).read()
    if curves.torn:
        tell(f"{path}:{curves.lines + 1}: the last line was torn by a kill, and is left out")
    return curves


def curve(curves: Curves, width: int = 64, height: int = 12) -> list[str]:
    """Training loss (·) and validation loss (o) over steps, drawn in characters."""
    training, validation = (_points(kind.get("loss")) for kind in (curves.training, curves.validation))
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


def _points(of: Curve | None) -> list[tuple[int, float]]:
    return [] if of is None else [(int(step), value) for step, value in zip(of.step, of.value.tolist(), strict=True)]


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
