"""How soon tolstoy-fast is as good as the tutorial's settings ever get: the same text, tokenizer and model size.

    python benchmarks/time_to_quality.py --text novel.txt
    python benchmarks/time_to_quality.py --text novel.txt --full      # 124M, as the recipes have it; for a GPU

Runs `tolstoy-scratch` (the tutorial: AdamW at 5e-5, linear, batch 8, 30 epochs, dropout 0.1) to its end and
`tolstoy-fast`, prints the best validation loss of the first, when each reached it, and their ratio, and draws both
curves over time as a picture (needs matplotlib). Time is the wall time within training steps, validations left out, of
each run alone on the machine. Writes below runs/quality.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

SMALL = ["data.block=128", "tokenizer.train.vocab=2048", "model.config.n_layer=4", "model.config.n_embd=128",
         "model.config.n_head=4"]  # fmt: skip
FAST = ["train.steps=300", "validate.every=10"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a text, a paragraph a line")
    parser.add_argument("--full", action="store_true", help="the recipes' own model")
    parser.add_argument("overrides", nargs="*", help="keys of the run file for both")
    asked = parser.parse_args()
    common = [f"data.sources.0.path={asked.text}", "data.sources.0.document=line", "data.sources.0.profile=none",
              "validate.prompts=[]", "checkpoint.every=never",
              *([] if asked.full else SMALL), *asked.overrides]  # fmt: skip
    slow = curve("tolstoy-scratch", [*common, "validate.every=100"])
    fast = curve("tolstoy-fast", [*common, *([] if asked.full else FAST)])
    best = min(loss for _, loss in slow)
    needed = next(seconds for seconds, loss in slow if loss == best)
    reached = next((seconds for seconds, loss in fast if loss <= best), None)
    print(f"tolstoy-scratch: best validation loss {best:.4f} after {needed:,.0f} s")
    if reached is None:
        print(f"tolstoy-fast: not reached; best {min(loss for _, loss in fast):.4f} after {fast[-1][0]:,.0f} s")
    else:
        print(f"tolstoy-fast: the same after {reached:,.0f} s, 1/{needed / reached:.1f} of the time")
    draw(slow, fast, Path("runs/quality/curves.png"))
    sys.exit(reached is None)


def curve(recipe: str, overrides: list[str]) -> list[tuple[float, float]]:
    """(seconds in training steps, validation loss) of each validation."""
    run = Path("runs/quality") / recipe
    command = [sys.executable, "-m", "artel", "train", recipe, f"run={run}", *overrides, "--restart"]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found, seconds, tokens = [], 0.0, 0  # a line is logged every 10 steps, before the validation of the same step
    for line in lines:
        if "tokens_per_second" in line:
            seconds += (line["tokens"] - tokens) / line["tokens_per_second"]
            tokens = line["tokens"]
        if "validation" in line:
            found.append((seconds, line["validation"]["loss"]))
    return found


def draw(slow: list[tuple[float, float]], fast: list[tuple[float, float]], file: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
        return
    for name, points in (("tolstoy-scratch", slow), ("tolstoy-fast", fast)):
        pyplot.plot(*zip(*points, strict=True), label=name)
    pyplot.xscale("log")
    pyplot.xlabel("seconds of training")
    pyplot.ylabel("validation loss, nats a token")
    pyplot.legend()
    pyplot.savefig(file, dpi=150)
    print(f"curves: {file}")


if __name__ == "__main__":
    main()
