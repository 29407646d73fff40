"""Packed JSON lines to records, files as they lie: python benchmarks/packed_lines.py FILE.jsonl.zst ... [--seconds 5]

For each file: its unpacked MB, how many times smaller it is packed, the share of its documents that are in ASCII, and
MB of unpacked lines a second of processor time, the median over as many readings as fit into the seconds.
`artel bench prepare --only jsonl_zst` measures the same on lines that it packs itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.text.records import Rejected
from artel.text.sources.jsonl import read_jsonl
from artel.text.sources.lines import unpacked


def texts(file: Path) -> list[str]:
    source = SourceConfig(path=[str(file)], format="jsonl")
    found = []
    for record in read_jsonl(file, str(file), "bench", source, DataConfig(sources=[source])):
        if isinstance(record, Rejected):
            raise SystemExit(f"{record.origin}: {record.reason}")
        found.append(record.text)
    return found


def rate(file: Path, seconds: float, size: int) -> tuple[float, int]:
    """MB a second of processor time, and of how many readings it is the median."""
    taken, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        before = time.process_time()
        texts(file)
        taken.append(time.process_time() - before)
    return size / 1e6 / statistics.median(taken), len(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=5)
    wanted = parser.parse_args()
    print("| | MB | times smaller packed | in ASCII | MB/s a core | readings |\n|---|---|---|---|---|---|")
    for file in wanted.files:
        with unpacked(file, str(file)) as stream:
            size = sum(map(len, iter(lambda: stream.read(1 << 20), b"")))
        found = texts(file)
        ascii_share = sum(map(str.isascii, found)) / len(found)
        speed, readings = rate(file, wanted.seconds, size)
        smaller = size / file.stat().st_size
        print(
            f"| {file.name} | {size / 1e6:.1f} | {smaller:.1f} | {ascii_share:.0%} | {speed:.0f} | {readings} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
