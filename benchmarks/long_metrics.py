"""What a report of a very long run takes: seconds and memory for ten million lines of metrics.

    python benchmarks/long_metrics.py RUN [--lines 10000000]

RUN is a finished run. A copy of it without its weights gets made-up metrics of as many lines (2 GB in a temporary
folder), and is reported in the terminal and as a page. Memory is the peak of PSS summed over the command and all it
starts, sampled ten times a second.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from pathlib import Path

from command_cost import run

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--lines", type=int, default=10_000_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        long = Path(folder) / "long"
        shutil.copytree(asked.run, long, ignore=shutil.ignore_patterns("checkpoints", "model", "metrics.jsonl"))
        write_metrics(long / "metrics.jsonl", asked.lines)
        page = Path(folder) / "report.html"
        print(f"{asked.lines:,} lines, {(long / 'metrics.jsonl').stat().st_size / 1e9:.1f} GB")
        for name, more in (("terminal", []), ("--html", ["--html", str(page)])):
            took = run(["artel", "report", str(long), *more], {}, memory=True)
            memory = (took.memory) / GIB
            print(f"{name}: {took.elapsed:.1f} s, {took.processor:.1f} s of processor time, {memory:.2f} GiB")
        print(f"the page: {page.stat().st_size / 1e6:.1f} MB")


def write_metrics(file: Path, lines: int) -> None:
    with file.open("w") as stream:
        for step in range(1, lines + 1):
            loss = 2 + 8 * math.exp(-step / lines * 5) + (step % 97) / 1000
            line = (
                f'{{"step":{step},"epoch":{step / 1000:.6f},"loss":{loss},"gradient_norm":{loss / 9},'
                f'"learning_rate":0.001,"tokens":{step * 2048},"tokens_per_second":{12000 + step % 1000},'
                f'"seconds":{step * 0.17:.3f},"memory_gib":0.842}}'
            )
            stream.write(line + "\n")


if __name__ == "__main__":
    main()
