"""A small model learns sums from rewards. A kill does not change what it learns. Two cores, no network, five minutes.

    make demo-rl
    python scripts/demo_rl.py --seed 1 --folder runs/demo-rl-1

1. A new model reads sums: one in five is right, the others are off by one or by ten. It then writes a third rightly.
2. It learns from rewards to write only right sums: a reward is 1 for the right number, otherwise 0.
3. Twice at the same time, a core each: one run is killed with SIGKILL halfway and started again, the other is not
   disturbed. Their weights must have the same hash; otherwise the exit status is 1.

The accuracy is that of sums which neither training has seen. Lines that begin with $ are commands to try.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

NUMBERS = range(10, 45)
"""Summands. All right and wrong sums have two digits, so an answer has two tokens and its end.

They are written from the last digit, as one adds by hand: 24+13=73. A small model learns that sooner (Lee et al. 2023,
arXiv:2307.03381)."""
MISTAKES = (1, -1, 10, -10)
UNSEEN = 200
"""Sums that are in no training text: the standard error of an accuracy of 90 % is 2 points."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-rl"), help="emptied first")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sums and of all runs")
    parser.add_argument("--base-steps", type=int, default=400, help="steps of the first training")
    parser.add_argument("--steps", type=int, default=240, help="steps of learning from rewards")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    write_sums(folder, options.seed)
    base = write_run(folder, "base", base_run(folder, options.base_steps), options.seed)
    names = ("killed", "undisturbed")
    killed, undisturbed = (write_run(folder, name, policy_run(folder, options.steps), options.seed) for name in names)

    title("A small model reads sums, of which one in five is right")
    artel("train", base)
    before = accuracy(folder / "base", killed)
    print(f"It writes {before:.0%} of {UNSEEN} unseen sums rightly.", flush=True)

    title("It learns from rewards, in two runs at the same time; one is killed with SIGKILL halfway")
    log = folder / "undisturbed.log"
    with log.open("w") as stream:
        other = start("train", undisturbed, stdout=stream, stderr=stream)
    try:
        kill_at_round(options.steps // 2, start("train", killed), folder / "killed")
        title("The killed run is started again with the same command")
        artel("train", killed)
        print(f"waiting for the undisturbed run (its messages: {log})", flush=True)
        check(other.wait(), log)
    finally:
        if other.poll() is None:
            other.terminate()

    after = accuracy(folder / "killed", killed)
    print_curve(folder / "undisturbed")
    hashes = [weights_hash(folder / name) for name in names]
    print(f"Right in unseen sums: {before:.1%} before, {after:.1%} after learning from rewards.")
    for name, digest in zip(names, hashes, strict=True):
        print(f"{digest}  {folder / name}/model/model.safetensors")
    if hashes[0] != hashes[1]:
        sys.exit("The hashes differ: the killed run did not end like the undisturbed one.")
    print("The hashes are equal: the kill changed nothing.")


def write_sums(folder: Path, seed: int) -> None:
    """Write the texts of the first training, and the prompts of the second: training and unseen ones."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    random.Random(seed).shuffle(pairs)
    unseen, seen = pairs[:UNSEEN], pairs[UNSEEN:]
    write_rows(
        folder / "sums.jsonl",
        ({"text": f"{a}+{b}={digits(a + b + error)}"} for a, b in seen for error in (0, *MISTAKES)),
    )
    for name, part in (("prompts", seen), ("unseen", unseen)):
        write_rows(folder / f"{name}.jsonl", ({"prompt": f"{a}+{b}=", "answer": digits(a + b)} for a, b in part))


def digits(number: int) -> str:
    """Return a number, last digit first."""
    return str(number)[::-1]


def write_rows(file: Path, rows: Iterable[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def base_run(folder: Path, steps: int) -> dict[str, Any]:
    """Return the run that reads sums. A vocabulary of 258 is 256 bytes, the end and padding: a token is a character.

    A block of 45 tokens holds five sums."""
    size = {"n_layer": 2, "n_embd": 64, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return {
        "data": {
            "sources": [{"path": str(folder / "sums.jsonl"), "format": "jsonl"}],
            "validation": 0,
            "block": 45,
            "packing": "best_fit",
        },
        "tokenizer": {"train": {"vocab": 258}},
        "model": {"config": {"model_type": "gpt2", **size}},
        "train": {"steps": steps, "batch": 28, "learning_rate": 3e-3, "warmup": 50, "schedule": "wsd"},
    }


def policy_run(folder: Path, steps: int) -> dict[str, Any]:
    """Return the run that learns from rewards."""
    return {
        "objective": "policy",
        "data": {
            "sources": [{"path": str(folder / "prompts.jsonl"), "format": "prompts"}],
            "validation": str(folder / "unseen.jsonl"),
            "block": 32,
        },
        "model": {"from": str(folder / "base/model")},
        "policy": {"answers": 8, "new_tokens": 3, "rewards": [{"equals": {"column": "answer"}}]},
        "train": {"steps": steps, "batch": 32, "learning_rate": 2e-3, "warmup": 15, "schedule": "wsd"},
        "checkpoint": {"every": 15},
        "log": {"every": 1},
    }


def write_run(folder: Path, name: str, run: dict[str, Any], seed: int) -> Path:
    run = {"run": str(folder / name), "seed": seed, **run}
    run["data"] |= {"store": str(folder / "stores")}
    run["train"] |= {"precision": "fp32", "compile": "off", "threads": 1}  # so small a model would only wait for more
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    return file


def start(*words: object, **streams: Any) -> subprocess.Popen[str]:
    print("$ artel", *words, flush=True)
    return subprocess.Popen([sys.executable, "-m", "artel", *map(str, words)], text=True, **streams)


def artel(*words: object, **streams: Any) -> str:
    """Run a command and return its standard output, if that is a pipe. A failure ends the demo."""
    process = start(*words, **streams)
    output, _ = process.communicate()
    check(process.returncode)
    return output


def check(status: int, log: Path | None = None) -> None:
    if status:
        sys.exit(f"artel failed with exit status {status}" + (f"; see {log}" if log else ""))


def accuracy(model: Path, run: Path) -> float:
    """Return the fraction of unseen sums that a model writes rightly."""
    results = json.loads(artel("evaluate", model, "--data", run, "--json", stdout=subprocess.PIPE))
    return float(results["models"][0]["metrics"]["reward"])


def kill_at_round(number: int, process: subprocess.Popen[str], run: Path) -> None:
    """Kill a run as soon as the answers of a round are on disk."""
    while not (run / "rollouts" / f"{number:06d}.jsonl.zst").exists():
        if process.poll() is not None:
            sys.exit(f"artel ended with exit status {process.returncode} before it could be killed")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def print_curve(run: Path) -> None:
    """Print the mean reward of the answers in about ten stretches of the run."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = {line["step"]: line["reward"] for line in map(json.loads, lines) if "reward" in line}
    title("Reward of the answers that it learned from")
    stretch = max(1, len(rewards) // 10)
    steps = sorted(rewards)
    for first in range(0, len(steps), stretch):
        part = steps[first : first + stretch]
        mean = sum(rewards[step] for step in part) / len(part)
        print(f"steps {part[0]:>3} to {part[-1]:>3}  {mean:4.0%}  {'#' * round(40 * mean)}")


def weights_hash(run: Path) -> str:
    return hashlib.sha256((run / "model/model.safetensors").read_bytes()).hexdigest()


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
