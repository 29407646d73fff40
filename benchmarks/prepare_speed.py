"""Speed and memory of preparing text, on text made of the two bundled novels.

    python benchmarks/prepare_speed.py --size 100M --only end_to_end,near,html
    python benchmarks/prepare_speed.py --only end_to_end --peer benchmarks/peers/run_clm.py

| name | unit | what is measured |
|---|---|---|
| end_to_end | MB/s | text over elapsed seconds of `artel prepare`, exact duplicates dropped |
| end_to_end_tokenizers | MB/s | the same without fastokens |
| peer | MB/s | the same of `python PEER INPUT.jsonl TOKENIZER CACHE PROCESSES`, in turns with artel |
| near | MB/s a core | the same with near-duplicates dropped, over processor time, less the time of 200 documents |
| html | MB/s a core | HTML through `html_to_text` |
| jsonl_zst | MB/s a core | unpacked lines of a .jsonl.zst file, read to records |
| read_back | tokens/s a core | random blocks of 1,024 tokens from a store in the page cache, as training reads them |
| memory | GiB | peak PSS of `artel prepare` and its processes on 10 and on 40 times the text |

MB: 10^6 bytes of text in UTF-8 without field names. Each value is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import yaml
import zstandard

import artel
from artel.config import DataConfig, SourceConfig, TokenizerTraining
from artel.config.schema.quantities import read_bytes
from artel.text import html_to_text
from artel.text.formats.jsonl import read_jsonl
from artel.text.reading.source_file import SourceFile
from artel.tokens import (
    Order,
    Sample,
    StoreWriter,
    TokenBlocks,
    TokenStore,
    load_tokenizer,
    micro_batches,
    step_positions,
    train_tokenizer,
)

NAMES = ("end_to_end", "near", "html", "jsonl_zst", "read_back", "memory")
VOCABULARY = 32_768
MB = 10**6
_SAMPLE = 0.1
"""Seconds between two readings; a shorter peak is not seen."""


@dataclass(frozen=True)
class Cost:
    elapsed: float
    """Seconds by the clock, from start to end."""
    processor: float
    """Seconds of processor time, user and system, of the command and everything it started."""
    memory: int
    """Peak in bytes of PSS, summed over the processes: shared pages count once. 0 if not requested."""


def run(command: list[str], environment: dict[str, str] | None = None, *, memory: bool = False) -> Cost:
    """Run a command to its end. Exit with its last lines if it fails."""
    start, before = time.perf_counter(), os.times()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL, stderr=errors
        )
        peak = 0
        while memory and process.poll() is None:
            peak = max(peak, _pss(process.pid))
            time.sleep(_SAMPLE)
        process.wait()
        elapsed, after = time.perf_counter() - start, os.times()
        errors.seek(0)
        last = errors.read().splitlines()[-5:]
    if process.returncode:
        sys.exit(f"{' '.join(command[:6])} failed:\n" + "\n".join(last))
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(elapsed, processor, peak)


def _pss(pid: int) -> int:
    total = 0
    try:
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:  # one has just ended
        pass
    return total


def documents(size: int, seed: int = 0) -> Iterator[str]:
    """Texts of `size` bytes: random sentences of the novels, and words that occur once; 2 % copies, 3 % near-copies."""
    draw = random.Random(seed)
    sentences: list[str] = []
    for book in sorted((Path(artel.__file__).parent / "books").glob("*.xz")):
        for line in lzma.decompress(book.read_bytes()).splitlines():
            sentences += re.split(r"(?<=[.!?]) ", json.loads(line)["text"])
    earlier: list[str] = []
    while size > 0:
        chance = draw.random()
        if earlier and chance < 0.05:
            text = draw.choice(earlier)
            if chance > 0.02:
                text += f" {draw.random()}"
        else:
            words = " ".join(draw.choices(sentences, k=1 + int(draw.lognormvariate(2.5, 1)))).split(" ")
            for at in draw.sample(range(len(words)), len(words) // 150):
                words[at] += draw.choice(words)
            text = " ".join(words)
            earlier = [*earlier[-999:], text] if draw.random() < 0.1 else earlier
        yield text
        size -= len(text.encode())


def write_text(file: Path, size: int) -> int:
    """Write JSON lines with texts of `size` bytes. Return the exact number of bytes of the texts."""
    total = 0
    with file.open("w", encoding="utf-8") as stream:
        for text in documents(size):
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            total += len(text.encode())
    return total


def texts_of(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]


def artel_prepare(folder: Path, file: Path, workers: int, *, near=False, fast=True, memory=False) -> Cost:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        data = {"sources": [{"path": str(file)}], "validation": 0.05, "store": str(work / "stores")}
        tree = {
            "run": str(work / "run"),
            "data": data | {"dedup": {"exact": True, "near": {} if near else None}},
            "tokenizer": {"from": str(folder / "tokenizer")},
        }
        (work / "run.yaml").write_text(yaml.safe_dump(tree))
        environment = {"ARTEL_CACHE": str(work / "cache")}
        if not fast:
            (work / "sitecustomize.py").write_text("import sys\nsys.modules['fastokens'] = None\n")
            environment["PYTHONPATH"] = os.pathsep.join([str(work), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "artel", "prepare", str(work / "run.yaml"), f"prepare.workers={workers}"]
        return run(command, environment, memory=memory)


def peer_prepare(folder: Path, file: Path, workers: int, script: str) -> Cost:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        arguments = [str(file), str(folder / "tokenizer"), f"{name}/cache", str(workers)]
        environment = {"HF_HOME": f"{name}/home", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        return run([sys.executable, script, *arguments], environment)


def measure_commands(folder: Path, file: Path, size: int, asked: argparse.Namespace) -> dict[str, float]:
    """Run all commands once in each round, in turns."""
    turns: dict[str, Callable[[Path], Cost]] = {}
    if "end_to_end" in asked.only:
        turns["end_to_end"] = lambda file: artel_prepare(folder, file, asked.workers)
        turns["end_to_end_tokenizers"] = lambda file: artel_prepare(folder, file, asked.workers, fast=False)
        if asked.peer:
            turns["peer"] = lambda file: peer_prepare(folder, file, asked.workers, asked.peer)
    if "near" in asked.only:
        turns["near"] = lambda file: artel_prepare(folder, file, asked.workers, near=True)
    costs: dict[str, list[Cost]] = {name: [] for name in turns}
    for _ in range(asked.rounds):
        for name, turn in turns.items():
            costs[name].append(turn(file))
    rates = {name: size / MB / statistics.median(cost.elapsed for cost in costs[name]) for name in turns}
    if "near" in turns:
        few = folder / "few.jsonl"
        with file.open(encoding="utf-8") as stream:
            few.write_text("".join(islice(stream, 200)), encoding="utf-8")
        start = turns["near"](few).processor
        rates["near"] = size / MB / max(1e-9, statistics.median(cost.processor for cost in costs["near"]) - start)
    return rates


def measure_memory(folder: Path, size: int, workers: int) -> dict[str, float]:
    peaks = {}
    for times in (10, 40):
        write_text(folder / "large.jsonl", times * size)
        peaks[f"memory_{times}"] = artel_prepare(folder, folder / "large.jsonl", workers, memory=True).memory / 2**30
    return peaks


def processor_seconds(work: Callable[[], object], rounds: int) -> float:
    """Return the median of processor time, after a first run that does not count."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def measure_html(file: Path, rounds: int) -> float:
    menu = "".join(f'<li class="item"><a href="/section/{at}/">Section {at}</a></li>' for at in range(20))
    script = "".join(f"window.data[{at}] = {{id: {at}, name: 'item-{at}'}};\n" for at in range(90))
    head = f"<!DOCTYPE html>\n<html><head><meta charset=utf-8><script>{script}</script></head><body><ul>{menu}</ul>"
    pages = []
    for text in texts_of(file):
        body = "".join(f"<p class=block>{part}</p>\n" for part in text.replace(", ", ", <a href=x>y</a> ").split(". "))
        pages.append(f"{head}<main><article>{body}</article></main><footer>{menu}</footer></body></html>".encode())
        if len(pages) >= 8000:
            break
    size = sum(map(len, pages))
    return size / MB / processor_seconds(lambda: [html_to_text(page) for page in pages], rounds)


def measure_jsonl_zst(folder: Path, file: Path, rounds: int) -> float:
    packed = folder / "text.jsonl.zst"
    with file.open("rb") as source, packed.open("wb") as target:
        zstandard.ZstdCompressor(level=3).copy_stream(source, target)
    source = SourceConfig(path=[str(packed)], format="jsonl")
    config = DataConfig(sources=[source])

    def parse() -> int:
        return sum(1 for _ in read_jsonl(SourceFile(packed, str(packed), "benchmark", source, config)))

    return file.stat().st_size / MB / processor_seconds(parse, rounds)


def measure_read_back(folder: Path, tokens: int, rounds: int) -> float:
    block, batch, rows = 1024, 64, 8
    tokens = max(tokens, 20 * block)
    writer = StoreWriter(folder / "store", VOCABULARY)
    for number in range(0, tokens, 1000):
        ids = np.random.default_rng(number).integers(0, VOCABULARY, 1000)
        writer.add("train", [Sample(ids)], 4000, f"random:{number}")
    writer.close({"key": "benchmark", "objective": "causal", "tokenizer": "none", "vocabulary": VOCABULARY})
    blocks = TokenBlocks(TokenStore(folder / "store").train, block, 1)
    order = Order(len(blocks), 0)
    steps = max(1, min(tokens, 20 * MB) // (batch * block))

    def read() -> None:
        for step in range(steps):
            positions = step_positions(step, batch, steps * batch)
            epochs = positions // len(blocks)
            micro_batches(blocks, order.at(positions), epochs, rank=0, world_size=1, batch_size=batch, max_rows=rows)

    return steps * batch * block / processor_seconds(read, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=read_bytes, default=100 * MB, help="bytes of text (default 100M)")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", help="folder or hub id; by default a BPE is trained on the text")
    parser.add_argument("--peer", help="a script to run in turns with end_to_end")
    parser.add_argument("--only", type=lambda names: names.split(","), default=NAMES, help=f"some of {','.join(NAMES)}")
    asked = parser.parse_args()
    if unknown := set(asked.only) - set(NAMES):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; write some of {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), Path(name) / "text.jsonl"
        size = write_text(file, asked.size)
        figures: dict[str, float] = {}
        if {"end_to_end", "near", "memory"} & set(asked.only):
            if asked.tokenizer:
                tokenizer = load_tokenizer(asked.tokenizer, "--tokenizer")
            else:
                training = TokenizerTraining(vocab=max(1000, min(VOCABULARY, size // 500)), sample=30 * MB)
                tokenizer = train_tokenizer(texts_of(file), training, where="--size")
            tokenizer.save(folder / "tokenizer")
            figures |= measure_commands(folder, file, size, asked)
        if "memory" in asked.only:
            figures |= measure_memory(folder, asked.size, asked.workers)
        if "html" in asked.only:
            figures["html"] = measure_html(file, asked.rounds)
        if "jsonl_zst" in asked.only:
            figures["jsonl_zst"] = measure_jsonl_zst(folder, file, asked.rounds)
        if "read_back" in asked.only:
            figures["read_back"] = measure_read_back(folder, asked.size // 4, asked.rounds)
    units = {"near": "MB/s a core", "html": "MB/s a core", "jsonl_zst": "MB/s a core", "read_back": "tokens/s a core"}
    for name, value in figures.items():
        unit = units.get(name, "GiB" if name.startswith("memory") else "MB/s")
        ratio = f" · {value / figures['peer']:.3g} times the peer" if unit == "MB/s" and "peer" in figures else ""
        print(f"{name:<22} {value:,.4g} {unit}{ratio}")


if __name__ == "__main__":
    main()
