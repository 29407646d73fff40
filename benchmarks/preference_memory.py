"""The peak memory of DPO: artel at an earlier commit, artel now, and TRL's DPOTrainer.

    python benchmarks/preference_memory.py --model FOLDER --data FILE [--before CHECKOUT] [--trl PYTHON]

One step each, a process for each contestant: the same model with the same LoRA, the same longest pairs of the file, the
same number of pairs at a time, in float32 with one thread, activations computed again (which is TRL's default). Pairs
longer than --length tokens are left out by all. Prints ru_maxrss of the process, and the processor's seconds. CHECKOUT
is a work tree of an earlier commit; PYTHON runs TRL where another one has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--trl", default=sys.executable)
    parser.add_argument("--pairs", type=int, default=2, help="at a time, and in the step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--contestants", default="before,now,trl")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        train_by_trl(options)
        return
    contestants = [name for name in options.contestants.split(",") if name != "before" or options.before]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = longest_pairs(options)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print("| | peak, GiB | processor, s | loss |\n|---|---|---|---|")
        for contestant in contestants:
            peak, seconds, loss = measure(contestant, folder, options)
            print(f"| {contestant} | {peak:.2f} | {seconds:.0f} | {loss:.4f} |", flush=True)


def longest_pairs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The pairs with most tokens of which each answer with its prompt has no more than `length`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = []
    for row in json.loads(options.data.read_text()):
        roles = {"human": "user", "gpt": "assistant", "system": "system"}
        prompt = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        answers = {name: [{"role": "assistant", "content": row[name]["value"]}] for name in ("chosen", "rejected")}
        lengths = [len(tokenizer.apply_chat_template(prompt + answer)["input_ids"]) for answer in answers.values()]
        if max(lengths) <= options.length:
            rows.append((sum(lengths), {"prompt": prompt, **answers}))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])[: options.pairs]]


def measure(contestant: str, folder: Path, options: argparse.Namespace) -> tuple[float, float, float]:
    """(largest resident size in GiB, seconds of the processor, loss of the step) of a process that trains one step."""
    out = folder / f"{contestant}.txt"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if contestant == "trl":
        command = [options.trl, __file__, "--model", options.model, "--data", options.data, "--pairs", options.pairs]
        command += ["--length", options.length, "--rows", folder / "rows.jsonl"]
    else:
        environment["PYTHONPATH"] = str((options.before if contestant == "before" else ROOT) / "src")
        command = [sys.executable, "-m", "artel", "train", run_file(folder, contestant, options)]
    with out.open("w") as log:
        process = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(out.read_text())
    return usage.ru_maxrss / 2**20, usage.ru_utime + usage.ru_stime, loss_of(contestant, folder)


def run_file(folder: Path, name: str, options: argparse.Namespace) -> Path:
    run = {
        "run": str(folder / name),
        "data": {
            "sources": [{"path": str(folder / "rows.jsonl"), "format": "preference"}],
            "validation": 0, "block": options.length, "store": str(folder / f"store-{name}"),
        },
        "model": {"from": str(options.model), "lora": {"rank": 8, "alpha": 16, "target": ["q_proj", "v_proj"]}},
        "objective": "preference",
        "train": {"steps": 1, "batch": options.pairs, "micro_batch": options.pairs, "precision": "fp32",
                  "activation_checkpointing": "full", "compile": "off", "threads": 1, "learning_rate": 1e-5},
        "log": {"every": 1},
        "track": ["jsonl"],
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def loss_of(contestant: str, folder: Path) -> float:
    if contestant == "trl":
        return float((folder / "trl.txt").read_text().split("train_loss=")[1].split()[0])
    lines = map(json.loads, (folder / contestant / "metrics.jsonl").read_text().splitlines())
    return next(float(line["loss"]) for line in lines if "loss" in line)


def train_by_trl(options: argparse.Namespace) -> None:
    """One step of DPOTrainer with its defaults, but for what the run file of artel says too."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder, max_steps=1, per_device_train_batch_size=options.pairs, max_length=options.length,
            learning_rate=1e-5, report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = DPOTrainer(
            AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )
        print(f"gradient checkpointing: {arguments.gradient_checkpointing}")
        print(f"train_loss={trainer.train().training_loss}")


if __name__ == "__main__":
    main()
