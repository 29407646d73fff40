"""Packed conversations: artel beside trl's SFTTrainer with packing, and beside artel without.

    python benchmarks/chat_packed.py MODEL_FOLDER CONVERSATIONS... [--rounds 3] [--steps 4] [--micro-batch 2]

LoRA (rank 16, all linear layers) over a pretrained model, on real conversations, in bf16 where the processor has it.
All contestants read the same tokens and learn the same ones: trl gets the samples of artel's store with its assistant
masks. Packed, a step is `--blocks` blocks of `--block` tokens for both; artel without packing takes as many
conversations a step as such a step holds on average. Each run is a process of its own, with one thread, and they take
turns. Shown are target tokens for each second of the processor, which other programs on the machine change little, and
of the clock; the first step is not counted. Memory is the largest resident size of the process (ru_maxrss).

trl is no dependency: `pip install trl datasets` into an environment that has artel's too, and give its interpreter by
`--trl-python` where that is another one. `trl, tuned` is trl without gradient checkpointing, which is on by default.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTESTANTS = ("artel", "trl", "trl, tuned", "artel, unpacked")
LORA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Steps:
    """Processor time and clock at the end of each step, and the targets of each."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.targets: list[float] = []

    def note(self, targets: float) -> None:
        self.times.append((time.process_time(), time.perf_counter()))
        self.targets.append(targets)

    def result(self, **more: Any) -> dict[str, Any]:
        (cpu, wall), (last_cpu, last_wall) = self.times[0], self.times[-1]
        targets = sum(self.targets[1:])
        return {
            "cpu_rate": targets / (last_cpu - cpu),
            "wall_rate": targets / (last_wall - wall),
            "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            **more,
        }


def run_file(options: argparse.Namespace, folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    data = {
        "sources": [{"path": options.conversations, "format": "chat"}],
        "block": options.block,
        "packing": "best_fit",
        "validation": 0,
        "store": str(folder / "stores"),
        **sections.pop("data", {}),
    }
    train = {"batch": options.blocks, "steps": options.steps + 1, "learning_rate": 2e-4, "schedule": "constant",
             "warmup": 0, "threads": 1, "compile": "off", "micro_batch": options.micro_batch,
             **sections.pop("train", {})}  # fmt: skip
    return {
        "run": str(folder / name),
        "data": data,
        "train": train,
        "model": {"from": options.model, "lora": {"rank": 16, "alpha": 32}},
        "objective": "chat",
        "validate": {"every": "never"},
        "checkpoint": {"every": "never", "best": None},
        "track": ["jsonl"],
        **sections,
    }


def train_artel(options: argparse.Namespace, folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    import artel

    steps, places = Steps(), [0, 0]

    def note(run: Any) -> None:
        steps.note(run.targets)
        places[0] += run.tokens
        places[1] += run.positions

    artel.train(run_file(options, folder, name, **sections), callbacks=[note], restart=True, force=True)
    losses = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in losses if "loss" in line]
    return steps.result(filler=1 - places[0] / places[1], loss=losses[-1])


def train_trl(options: argparse.Namespace, folder: Path, **tuning: Any) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    steps, step, places = Steps(), [0, 0, 0], [0, 0]

    class Note(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.note(step[0])
            step[0] = 0

    class Counting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
            step[0] += int((inputs["labels"] != -100).sum())
            places[0] += inputs["input_ids"].numel()
            return super().compute_loss(model, inputs, *arguments, **more)

    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    settings = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=options.steps + 1, packing=True, max_length=options.block,
        per_device_train_batch_size=1, gradient_accumulation_steps=options.blocks, learning_rate=2e-4,
        lr_scheduler_type="constant", use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        logging_steps=1000, **tuning,
    )  # fmt: skip
    trainer = Counting(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=list(LORA), task_type="CAUSAL_LM"),
        callbacks=[Note()],
    )
    trainer.train()
    rows_of_a_step = (options.steps + 1) * options.blocks * options.block
    return steps.result(filler=max(0.0, 1 - places[0] / rows_of_a_step), bf16=settings.bf16)


def contest(options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(options.folder)
    if options.contestant == "artel":
        return train_artel(options, folder, "packed")
    if options.contestant == "artel, unpacked":
        changes = {
            "data": {"packing": "concatenate"},
            "train": {"batch": options.conversations_a_step, "micro_batch": "auto"},
        }
        return train_artel(options, folder, "unpacked", **changes)
    return train_trl(options, folder, **({"gradient_checkpointing": False} if "tuned" in options.contestant else {}))


def prepare(options: argparse.Namespace, folder: Path) -> int:
    """Write the samples of artel's store for trl; how many conversations a packed step holds on average."""
    import artel
    from artel.tokens import PackedSamples

    part = artel.prepare(run_file(options, folder, "packed")).open().train
    blocks = PackedSamples(part, options.block, lookahead=1)
    with (folder / "samples.jsonl").open("w") as file:
        for number in range(part.samples):
            sample = part.sample(number)
            file.write(json.dumps({"input_ids": sample.ids.tolist(), "assistant_masks": sample.flags.tolist()}) + "\n")
    print(
        f"{part.samples:,} conversations of {part.tokens / part.samples:,.0f} tokens on average fill {len(blocks):,} "
        f"blocks of {options.block:,}, {blocks.padding:.2%} filler"
    )
    return max(1, round(part.samples / len(blocks) * options.blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("conversations", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="that are measured, after the first")
    parser.add_argument("--blocks", type=int, default=2, help="of a step")
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=2, help="blocks that artel computes at a time")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--conversations-a-step", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        Path(options.folder, "result.json").write_text(json.dumps(contest(options)))
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contestants}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        conversations = prepare(options, folder)
        for _ in range(options.rounds):
            for contestant, measured in results.items():
                python = options.trl_python if contestant.startswith("trl") else sys.executable
                command = [python, __file__, *sys.argv[1:], "--contestant", contestant, "--folder", name]
                command += ["--conversations-a-step", str(conversations)]
                variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
                subprocess.run(command, check=True, env=variables, stdout=subprocess.DEVNULL)
                measured.append(json.loads((folder / "result.json").read_text()))
                print(contestant, json.dumps(measured[-1]), file=sys.stderr, flush=True)
    print("\n| | target tokens/s of the processor | of the clock | filler | peak memory, GiB |\n|---|---|---|---|---|")
    for contestant, measured in results.items():
        cpu, wall, filler, memory = (
            [each[key] for each in measured] for key in ("cpu_rate", "wall_rate", "filler", "memory_gib")
        )
        shown = ", ".join(f"{rate:.0f}" for rate in cpu)
        print(
            f"| {contestant} | **{statistics.median(cpu):.0f}** ({shown}) | {statistics.median(wall):.0f} "
            f"| {statistics.mean(filler):.1%} | {max(memory):.2f} |"
        )


if __name__ == "__main__":
    main()
