"""Learning from rewards beside TRL's GRPOTrainer on a CPU: samples per second and peak memory.

    python benchmarks/policy_speed.py MODEL [--rounds 2] [--steps 5]

MODEL is a folder with a small chat model; the figures in policy.md are of SmolLM2-135M-Instruct. Both train it on the
same sums with the same reward, loss, batch, lengths and sampling, in float32 with all cores, in turns: artel, then TRL.
A sample is an answer that was written, scored and learned. The first step of each is not counted. Peak memory is the
proportional set size of all processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

PROMPTS, ANSWERS, NEW_TOKENS = 4, 8, 64
REWARD = """
import re

def last_number(completions, answer, **_):
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    numbers = [re.findall(r"[0-9]+", text)[-1:] for text in texts]
    return [float(number == [right]) + len(text) / 1000 for number, right, text in zip(numbers, answer, texts)]
"""
"""The length is part of the reward, so that every group has signal."""
TRL = """
import json, sys, time
from datasets import Dataset
from rewards import last_number
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

settings = json.loads(sys.argv[1])
model, steps, checkpointing = settings.pop("model"), settings.pop("steps"), settings.pop("checkpointing")
rows = [json.loads(line) for line in open("prompts.jsonl")]

class Times(TrainerCallback):
    def on_step_end(self, *_, **__):
        with open("times", "a") as file:
            file.write(f"{time.monotonic()}\\n")

config = GRPOConfig(
    "trl", per_device_train_batch_size=settings["prompts"] * settings["answers"], num_generations=settings["answers"],
    max_completion_length=settings["new_tokens"], max_steps=steps, learning_rate=1e-6, lr_scheduler_type="constant",
    loss_type="dr_grpo", scale_rewards=False, beta=0.0, temperature=1.0, top_k=0, use_cpu=True, bf16=False,
    gradient_checkpointing=checkpointing, save_strategy="no", report_to="none", logging_steps=1,
)
trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(model, dtype="float32"), last_number, config, Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Times()],
)
trainer.train()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    contestants = {
        "artel": measure_artel,
        "TRL": lambda *arguments: measure_trl(*arguments, checkpointing=False),
        "TRL, its default of checkpointing": lambda *arguments: measure_trl(*arguments, checkpointing=True),
    }
    for turn in range(options.rounds):
        for name, measure in contestants.items():
            with tempfile.TemporaryDirectory() as folder:
                write_data(Path(folder))
                result = measure(Path(folder), options.model.resolve(), options.steps)
            print(json.dumps({"turn": turn, "name": name} | result), flush=True)


def write_data(folder: Path) -> None:
    pairs = [(a, b) for a in range(11, 60, 7) for b in range(13, 60, 3)]
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}? Explain it."}], "answer": str(a + b)}
        for a, b in pairs
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)


def measure_artel(folder: Path, model: Path, steps: int) -> dict[str, Any]:
    run = {
        "run": "run",
        "data": {"sources": [{"path": "prompts.jsonl", "format": "prompts"}], "validation": 0, "block": 256},
        "model": {"from": str(model)},
        "objective": "policy",
        "policy": {"answers": ANSWERS, "new_tokens": NEW_TOKENS, "rewards": ["rewards.py:last_number"]},
        "train": {
            "steps": steps, "batch": PROMPTS, "learning_rate": 1e-6, "schedule": "constant", "warmup": 0,
            "precision": "fp32",
        },
        "checkpoint": {"every": "never", "best": None},
        "log": {"every": 1},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    peak = run_and_watch([sys.executable, "-m", "artel", "train", "run.yaml"], folder)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    parts = {
        key: round(sum(line.get(f"seconds_{key}", 0.0) for line in lines[1:]), 1) for key in ("writing", "scoring")
    }
    return rate(seconds, len(lines) - 1) | {"peak_mib": peak, "length": lines[-1]["length_mean"]} | parts


def measure_trl(folder: Path, model: Path, steps: int, *, checkpointing: bool) -> dict[str, Any]:
    (folder / "trl_run.py").write_text(TRL)
    settings = {
        "model": str(model), "steps": steps, "checkpointing": checkpointing, "prompts": PROMPTS, "answers": ANSWERS,
        "new_tokens": NEW_TOKENS,
    }  # fmt: skip
    peak = run_and_watch([sys.executable, "trl_run.py", json.dumps(settings)], folder)
    times = [float(line) for line in (folder / "times").read_text().split()]
    return rate(times[-1] - times[0], len(times) - 1) | {"peak_mib": peak}


def rate(seconds: float, steps: int) -> dict[str, Any]:
    return {"samples_per_second": round(steps * PROMPTS * ANSWERS / seconds, 3), "seconds": round(seconds, 1)}


def run_and_watch(command: list[str], folder: Path) -> int:
    """Run a command in `folder` and return the peak memory of its process tree, in MiB."""
    log = folder / "log"
    with log.open("w") as stream:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        process = subprocess.Popen(command, cwd=folder, stdout=stream, stderr=stream, env=environment)
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(memory, descendants(process.pid))))
            time.sleep(0.2)
    if process.returncode:
        sys.exit(log.read_text()[-3000:])
    return peak // 1024


def descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def memory(pid: int) -> int:
    """Return the proportional set size of a process in KiB, 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
