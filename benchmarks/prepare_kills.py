"""Kill `artel prepare` at random moments and resume: the store must come out the same, byte for byte.

    python benchmarks/prepare_kills.py [--moments 20] [--workers 1 2 4] [--seed 0]

For each number of workers one undisturbed run is timed; then, for each moment drawn evenly over that time, a fresh run
is killed by SIGKILL (in turn all its processes, and its driver alone, whose workers must end by themselves) and another
start ends it. Prints what was left at each kill and a line for each number of workers; exits 1 when a store differs.
Text is made up from the seed: JSON lines with repeats, a packed file, lines, and every stage of preparing is on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import zstandard

sys.path.insert(0, str(Path(__file__).parent))
from run_on_disk import store_digest

from artel.config import RunConfig
from artel.config.load import parse_run
from artel.preparing import assembly, prepare  # noqa: F401  # imported once: the runs are forks of this process

FROM_START, OF_DRIVER = "all processes", "the driver"


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--moments", type=int, default=20)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    chance = random.Random(given.seed)
    folder = Path(tempfile.mkdtemp(prefix="artel-kills-"))
    try:
        write_texts(folder, chance)
        expected, failed = "", 0
        for workers in given.workers:
            start = time.monotonic()
            wait(fork(run_of(folder, "whole", workers)))
            seconds = time.monotonic() - start
            whole = store_digest(folder / "whole")
            expected = expected or whole
            same = int(whole == expected)
            for number in range(given.moments):
                moment = chance.uniform(0, seconds)
                left = kill_and_go_on(folder, workers, moment, FROM_START if number % 2 else OF_DRIVER)
                equal = store_digest(folder / "killed") == expected
                same += equal
                shutil.rmtree(folder / "killed")
                print(json.dumps({"workers": workers, "second": round(moment, 2), **left, "same": equal}), flush=True)
            shutil.rmtree(folder / "whole")
            print(f"{workers} workers: {same} of {given.moments + 1} stores are the same ({seconds:.1f} s undisturbed)")
            failed += given.moments + 1 - same
        sys.exit(int(failed > 0))
    finally:
        shutil.rmtree(folder)


def kill_and_go_on(folder: Path, workers: int, moment: float, what: str) -> dict[str, object]:
    """What was there when the run was killed."""
    run = run_of(folder, "killed", workers)
    process = fork(run)
    time.sleep(moment)
    (os.killpg if what == FROM_START else os.kill)(process, signal.SIGKILL)
    os.waitpid(process, 0)
    stores = folder / "killed"
    parts = len(list(stores.glob("*.parts/text/0*")))
    shards = len(list(stores.glob("*.parts/shards/*-0*")))
    wait(fork(run))
    return {"killed": what, "parts": parts, "shards": shards}


def fork(run: RunConfig) -> int:
    """The process, in a session of its own, that prepares the run."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    try:
        prepare(run)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)


def wait(process: int) -> None:
    _, status = os.waitpid(process, 0)
    if status:
        sys.exit(f"a run that was not killed failed: status {status}")


def run_of(folder: Path, name: str, workers: int) -> RunConfig:
    sources = [
        {"path": str(folder / "a.jsonl"), "weight": 1.5},
        {"path": str(folder / "b.jsonl.zst"), "budget_bytes": "30k"},
        {"path": str(folder / "c.txt"), "document": "line"},
    ]
    data = {"store": str(folder / name), "sources": sources, "dedup": {"near": {}, "lines": "line"}}
    tree = {"run": str(folder / "run"), "data": data, "tokenizer": {"train": {"vocab": 600}},
            "prepare": {"workers": workers, "part": 60_000}}  # fmt: skip
    return parse_run(tree, {}, {(): "run.yaml"})


def write_texts(folder: Path, chance: random.Random) -> None:
    words = [
        "".join(chance.choice("абвгдежзиклмнопрстуфхцчшыэюя") for _ in range(chance.randint(2, 9))) for _ in range(900)
    ]
    texts: list[str] = []
    for _ in range(1500):
        if texts and chance.random() < 0.2:
            copy = chance.choice(texts).split(" ")
            copy[chance.randrange(len(copy))] = "другое"
            texts.append(" ".join(copy))
        else:
            texts.append("\n".join(" ".join(chance.choices(words, k=chance.randint(5, 40))) for _ in range(4)))
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines[:1000]))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress("".join(lines[800:]).encode()))
    (folder / "c.txt").write_text("\n".join(" ".join(chance.choices(words, k=12)) for _ in range(2000)))


if __name__ == "__main__":
    main()
