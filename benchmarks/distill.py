"""A student of a quarter of its teacher's size, distilled, beside the same student trained alone: The Pile's sample.

    python benchmarks/distill.py --data ../shared/data/pile [--seeds 1 2 3] [--steps 300] [--folder runs/distill]

One teacher is trained first on the sample's training texts. Then the student is trained twice for each
seed, with the same steps, batches, order and initial weights: on the tokens alone (objective causal), and by
distillation. Shown is the cross-entropy of the validation texts after the last step and at its best, in nats per token:
the same figure of the same tokens for all. No student reads any other text than the teacher did. Beside it stand the
size of the teacher's kept outputs and the time they took. --write writes benchmarks/distill.md.

With --by-text the student has a tokenizer of its own, and what is written is a section of that page:

    python benchmarks/distill.py --data ../shared/data/pile --by-text --seeds 1 --steps 150 --teacher-steps 250
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

PAGE = Path(__file__).parent / "distill.md"
BY_TEXT = "## A student with another tokenizer than its teacher"
COMMON = {"model_type": "gpt2", "n_head": 4, "n_positions": 128, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
TEACHER = {**COMMON, "n_layer": 4, "n_embd": 192}
STUDENT = {**COMMON, "n_layer": 2, "n_embd": 112}
TRAIN = {"batch": 16, "optimizer": "muon", "learning_rate": 2e-3, "schedule": "wsd", "decay": 0.6, "warmup": 0.02,
         "threads": 1, "compile": "off"}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Validation cross-entropy, nats per token; seconds of training from the first line of metrics; agreement with the
    teacher."""

    last: float
    best: float
    seconds: float
    agreement: float


def run_file(options: argparse.Namespace, name: str, steps: int, **sections: Any) -> Path:
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"{options.data}/{number}.jsonl.zst" for number in ("00", "01")]
    tree = {
        "run": str(folder / name),
        "data": {
            "sources": [{"path": texts, "format": "jsonl"}],
            "validation": f"{options.data}/val.jsonl.zst",
            "block": 128,
            "store": str(folder / "stores"),
        },
        "train": {**TRAIN, "steps": steps},
        "validate": {"every": steps // 2},
        "checkpoint": {"every": steps // 2, "keep": 1, "best": "loss"},
        "track": ["jsonl"],
        **sections,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def artel(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "artel", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def train(file: Path) -> Result:
    """Train a run, unless that is done."""
    artel("train", file)
    lines = [json.loads(line) for line in file.with_suffix("").joinpath("metrics.jsonl").read_text().splitlines()]
    metrics = [line["validation"] for line in lines if "validation" in line]
    losses = [each.get("cross_entropy", each["loss"]) for each in metrics]
    clock = [line["seconds"] for line in lines if "seconds" in line]
    return Result(losses[-1], min(losses), clock[-1] - clock[0], metrics[-1].get("agreement", 0.0))


def parameters(run: Path) -> int:
    with safe_open(run / "model" / "model.safetensors", framework="np") as file:
        return sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118  # not a mapping


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of 00, 01 and val.jsonl.zst")
    parser.add_argument("--folder", default="runs/distill")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300, help="of a student")
    parser.add_argument("--teacher-steps", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--by-text", action="store_true", help="teacher and student have tokenizers of their own")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}, or its section")
    options = parser.parse_args()
    folder = Path(options.folder)
    vocabulary = {"train": {"vocab": 4096, "pattern": "gpt4"} if options.by_text else {"vocab": 2048}}
    teacher = train(
        run_file(options, "teacher", options.teacher_steps, tokenizer=vocabulary, model={"config": TEACHER})
    )
    own = {"train": {"vocab": 2048}} if options.by_text else {"from": str(folder / "teacher" / "model")}
    rows = []
    for seed in options.seeds:
        student = {"seed": seed, "model": {"config": STUDENT}, "tokenizer": own}
        alone = train(run_file(options, f"alone-{seed}", options.steps, **student))
        settings = {name: getattr(options, name) for name in ("temperature", "alpha", "top_k")}
        settings["tokenizer"] = "by_text" if options.by_text else "same"
        student |= {"objective": "distill", "distill": {**settings, "teacher": str(folder / "teacher")}}
        student["checkpoint"] = {"every": options.steps // 2, "keep": 1, "best": "cross_entropy"}
        taught = train(run_file(options, f"distilled-{seed}", options.steps, **student))
        print(f"seed {seed}: alone {alone.last:.4f}, distilled {taught.last:.4f}", file=sys.stderr)
        rows.append((seed, alone, taught))
    page = report(options, teacher, rows)
    print(page)
    if options.write:
        whole, heading, section = PAGE.read_text().partition(BY_TEXT)
        parts = (whole, page) if options.by_text else (page, heading + section)
        PAGE.write_text("\n\n".join(part.strip() for part in parts if part) + "\n")
    sys.exit(any(taught.last >= alone.last for _, alone, taught in rows))


def report(options: argparse.Namespace, teacher: Result, rows: list[tuple[int, Result, Result]]) -> str:
    folder = Path(options.folder)
    large, small = (parameters(folder / name) for name in ("teacher", f"alone-{rows[0][0]}"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    table = [
        f"| {seed} | {alone.last:.4f} ({alone.best:.4f}) | {taught.last:.4f} ({taught.best:.4f}) | "
        f"{alone.last - taught.last:.4f} | {taught.agreement:.1%} |"
        for seed, alone, taught in rows
    ]
    gains = [alone.last - taught.last for _, alone, taught in rows]
    title = BY_TEXT if options.by_text else "# Distillation: a student of a quarter of its teacher's size"
    ids = "2,048 ids (gpt2), the teacher's 4,096 (gpt4)" if options.by_text else "2,048 ids"
    words = f"--by-text --seeds 1 --steps {options.steps} --teacher-steps {options.teacher_steps} --write"
    return "\n".join(
        [
            title,
            "",
            f"`python benchmarks/distill.py --data ../shared/data/pile {words if options.by_text else '--write'}` at "
            f"{commit}: GPT-2 models on the sample of The Pile, blocks of 128 tokens, 16 a step, {ids}.",
            "",
            f"- teacher: {large:,} parameters, {options.teacher_steps} steps; validation cross-entropy "
            f"{teacher.last:.4f} nats per token{' of its own' if options.by_text else ''} (at its best "
            f"{teacher.best:.4f})",
            *aligned(folder),
            f"- student: {small:,} parameters (1/{large / small:.1f}), {options.steps} steps; forward KL, temperature "
            f"{options.temperature:g}, alpha {options.alpha:g}, the {options.top_k} likeliest ids and the rest",
            "",
            "Validation cross-entropy after the last step (at its best):",
            "",
            "| seed | student alone | student distilled | less by | agrees with the teacher |",
            "|---|---|---|---|---|",
            *table,
            "",
            f"Mean gain {statistics.mean(gains):.4f}, smallest {min(gains):.4f}. The text is small (404,701 training "
            "tokens): teacher and students stop before they overfit, and no student has converged. What remains of the "
            "gain after many epochs, or with more text, was not measured.",
            "",
            *kept_outputs(folder, rows),
        ]
    )


def aligned(folder: Path) -> list[str]:
    """Which targets a teacher with another tokenizer teaches, as the run says it."""
    notes = [
        json.loads(file.read_text()).get("note") for file in (folder / "stores").glob("*.teachers/*/manifest.json")
    ]
    return [f"- {note}" for note in notes if note]


def kept_outputs(folder: Path, rows: list[tuple[int, Result, Result]]) -> list[str]:
    """What the teacher's outputs take on disk, and of the time."""
    lines = []
    clock = statistics.mean(taught.seconds for _, _, taught in rows)
    for file in (folder / "stores").glob("*.teachers/*/manifest.json"):
        manifest = json.loads(file.read_text())
        size = sum(fact["bytes"] for fact in manifest["shards"].values())
        targets = manifest["train"]["targets"] + manifest["validation"]["targets"]
        share = manifest["seconds"] / clock
        lines.append(
            f"The teacher's outputs: {targets:,} targets, {size / 2**20:.1f} MiB ({size / targets:.0f} bytes each), "
            f"computed once for all seeds in {manifest['seconds']:.0f} s. A student's steps and validations took "
            f"{clock:.0f} s on average, by the clock of a busy machine: that is {share:.0%} of one run, "
            f"{share / len(rows):.0%} of each of {len(rows)}."
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
