"""What the rules for texts cost that are off by default, each beside plain reading, in processor time of one core.

    python benchmarks/text_rules.py [FOLDER of texts]

Without a folder it takes the novels that come with artel. It prints rows for results.md.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from artel.config import DataConfig
from artel.text import BenchmarkIndex, Ledger, clean_shard, input_shards, write_index
from artel.text.classifier import train_classifier

ROUNDS = 3


def main() -> None:
    """Measure each rule on whole books, and on their lines as documents."""
    path = sys.argv[1] if len(sys.argv) > 1 else "{books}"
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "decontaminate": {"decontaminate": [_benchmark(Path(folder))]},
            "pii": {"clean": {"pii": {"mask": "all"}}},
            "classifier": {"clean": {"classifier": {"from": _classifier(Path(folder)), "minimum": 0.0}}},
        }
        for document in ("file", "line"):
            base = {"sources": [{"path": path, "document": document}], "validation": 0.0}
            index = BenchmarkIndex(_index(base | rows["decontaminate"], Path(folder, document)), 12)
            size = sum(shard.size for shard in input_shards(DataConfig.model_validate(base))) / 1e6
            times: dict[str, list[float]] = {name: [] for name in ("plain", *rows)}
            for _ in range(ROUNDS):
                for name in times:
                    benchmarks = index if name == "decontaminate" else None
                    times[name].append(_seconds({**base, **rows.get(name, {})}, benchmarks))
            plain = min(times["plain"])
            print(f"a document is a {document}: {size:.1f} MB, plain reading {size / plain:.1f} MB/s")
            for name in rows:
                with_rule = min(times[name])
                alone = size / (with_rule - plain)
                print(
                    f"  {name}: {size / with_rule:.1f} MB/s ({plain / with_rule:.2f} of plain), alone {alone:.0f} MB/s"
                )


def _seconds(data: dict[str, Any], benchmarks: BenchmarkIndex | None) -> float:
    config = DataConfig.model_validate(data)
    start = time.process_time()
    for shard in input_shards(config):
        for _ in clean_shard(shard, config, Ledger(), None, benchmarks):
            pass
    return time.process_time() - start


def _benchmark(folder: Path) -> str:
    """A benchmark of 10,000 made-up rows, none of which stands in a text: 190,000 n-grams."""
    rows = (" ".join(f"слово{number}x{place}" for place in range(30)) for number in range(10_000))
    (folder / "benchmark.txt").write_text("\n".join(rows), encoding="utf-8")
    return str(folder / "benchmark.txt")


def _classifier(folder: Path) -> str:
    """A classifier of made-up texts: what it says does not matter to what it costs."""
    texts = [f"слово{number % 50} стоит за словом{number % 7} и перед {number}" for number in range(400)]
    train_classifier(texts[:200], texts[200:], folder / "classifier", lambda text: None)
    return str(folder / "classifier")


def _index(data: dict[str, Any], folder: Path) -> Path:
    write_index(DataConfig.model_validate(data), folder)
    return folder


if __name__ == "__main__":
    main()
