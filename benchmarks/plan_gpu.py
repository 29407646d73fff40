"""Memory that `artel plan` predicts of one GPU, beside what PyTorch's allocator held: writes benchmarks/plan_gpu.md.

    python benchmarks/plan_gpu.py [--folder DIR] [--only NAME…] [--together 4] [--measure | --predict]

Each case is trained for three steps on a GPU, several at the same time, each in a process of its own. Measured are the
most that PyTorch has allocated, and reserved, in that process: CUDA's context is beyond it. `--measure` needs the GPU
and leaves measured.json in the folder; `--predict` reads it, plans for an H200, and needs none. All texts
are made up, and the same on every machine. Nothing in artel was fitted to the allocated bytes of these cases.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from plan import summary

HARDWARE = "h200:1"
GPT2 = {"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
LLAMA = {"model_type": "llama", "num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 2816}
LLAMA |= {"num_attention_heads": 16, "num_key_value_heads": 4}
MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 8, "hidden_size": 768, "intermediate_size": 2048}
MOE |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 768}
MOE |= {"num_experts": 16, "num_experts_per_tok": 2}
ROBERTA = {"model_type": "roberta", "num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096}
ROBERTA |= {"num_attention_heads": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
T5 |= {"dropout_rate": 0}
MODELS = {"gpt2 124M": GPT2, "llama 300M": LLAMA, "qwen3-moe": MOE, "roberta-large": ROBERTA, "t5-base": T5}


@dataclass(frozen=True)
class Case:
    model: str
    checkpointing: str
    optimizer: str
    objective: str = "causal"
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        more = [f"{name} {value}" for name, value in (self.train | self.data).items() if name != "document_mask"]
        what = [] if self.objective in ("causal", "masked") else [self.objective]
        return ", ".join([self.model, self.checkpointing, self.optimizer, *what, *more])


PACKED = {"packing": "best_fit", "document_mask": True}
COMPILED = {"compile": "on"}
CASES = (
    Case("gpt2 124M", "none", "adamw"),
    Case("gpt2 124M", "full", "muon"),
    Case("gpt2 124M", "none", "adamw", train={"precision": "fp32"}),
    Case("llama 300M", "none", "adamw"),
    Case("llama 300M", "full", "adamw", train={"weights": "bf16"}),
    Case("llama 300M", "none", "adamw8bit"),
    Case("llama 300M", "none", "adamw", data=PACKED),
    Case("llama 300M", "none", "lora"),
    Case("llama 300M", "full", "lora on nf4"),
    Case("llama 300M", "none", "lora", "chat"),
    Case("llama 300M", "full", "adamw", "preference"),
    Case("qwen3-moe", "none", "adamw"),
    Case("roberta-large", "none", "adamw", "masked"),
    Case("t5-base", "none", "adamw", "seq2seq"),
    Case("gpt2 124M", "none", "adamw", train=COMPILED),
    Case("llama 300M", "none", "adamw", train=COMPILED),
    Case("llama 300M", "full", "adamw", train=COMPILED),
    Case("llama 300M", "none", "lora", train=COMPILED),
    Case("llama 300M", "none", "lora", "chat", train=COMPILED),
    Case("qwen3-moe", "none", "adamw", train=COMPILED),
    Case("roberta-large", "none", "adamw", "masked", train=COMPILED),
    Case("llama 300M", "full", "adamw", "chat", data=PACKED),
    Case("roberta-large", "none", "adamw", "embedding"),
    Case("gpt2 124M", "none", "adamw", "distill"),
    Case("t5-base", "none", "adamw", "seq2seq", train=COMPILED),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("plan-gpu"), help="where the runs and measurements lie")
    parser.add_argument("--only", nargs="*", default=[], help="cases with one of these in their name")
    parser.add_argument("--together", type=int, default=4, help="cases at the same time on the GPU")
    parser.add_argument("--measure", action="store_true", help="train alone")
    parser.add_argument("--predict", action="store_true", help="plan alone, for what was measured")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    page = Path(__file__).resolve().with_suffix(".md")
    os.chdir(options.folder)
    write_inputs()
    file = Path("measured.json")
    measured: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    make_base()
    if not options.predict:
        chosen = [case for case in CASES if any(part in case.name for part in options.only or [""])]
        with ThreadPoolExecutor(options.together) as pool:
            for case, figures in zip(chosen, pool.map(measure, chosen), strict=True):
                measured[case.name] = figures
                file.write_text(json.dumps(measured, indent=1))
                print(case.name, figures, flush=True)
    if options.measure:
        return
    cases = [case for case in CASES if "allocated" in measured.get(case.name, {})]
    if not cases:
        sys.exit(f"{file.resolve()} has no measured case: run it with --measure on a GPU first")
    for name in (case.name for case in CASES if case.name in measured and case not in cases):
        print(f"{name}: {measured[name]}")
    table = report(cases, measured, {case.name: predict(case) for case in cases})
    print(table)
    if not options.only:
        head = page.read_text(encoding="utf-8").partition("| case |")[0]
        page.write_text(f"{head}{table}\n", encoding="utf-8")


def run_file(case: Case) -> Path:
    """Write the run file of a case."""
    run = case.name.replace(", ", "-").replace(" ", "-")
    data: dict[str, Any] = {"sources": [{"path": "words.txt"}], "validation": 0, "block": 1024, **case.data}
    tree: dict[str, Any] = {"run": f"runs/{run}", "data": data, "objective": case.objective}
    tree["tokenizer"] = {"train": {"vocab": 16_000}}
    tree["model"] = {"config": MODELS[case.model]}
    if case.model == "roberta-large":
        data["block"] = 512
    if case.objective in ("chat", "preference"):
        data["sources"] = [{"path": f"{case.objective}.jsonl", "format": case.objective}]
    if case.objective == "embedding":
        data["sources"], data["block"] = [{"path": "matches.jsonl", "format": "matches"}], 256
        tree["tokenizer"] = {"train": {"vocab": 1500}}
    if case.objective == "distill":
        tree["distill"] = {"teacher": "runs/base/model"}
        tree["tokenizer"] = {"train": None}
    if case.objective == "seq2seq":
        data["sources"], data["block"] = [{"path": "pairs.jsonl", "format": "pairs"}], 512
        tree["seq2seq"] = {"target": 128}
        tree["tokenizer"] = {"train": {"vocab": 1500}}  # there is less text
    if case.optimizer.startswith("lora") or case.objective in ("chat", "preference"):
        tree["model"] = {"from": "runs/base/model"}
        del tree["tokenizer"]
    if case.optimizer.startswith("lora"):
        tree["model"]["lora"] = {"rank": 16}
        tree["model"]["quantize"] = case.optimizer.partition("lora on ")[2] or "none"
    rows = 4 if case.objective == "preference" else 8
    tree["train"] = {
        "steps": 3,
        "batch": rows * 2,
        "micro_batch": rows,
        "activation_checkpointing": case.checkpointing,
        "optimizer": "adamw" if case.optimizer.startswith("lora") else case.optimizer,
        "compile": "off",
        "precision": "bf16",
        **case.train,
    }
    tree["validate"] = tree["checkpoint"] = {"every": "never"}
    file = Path(f"{run}.yaml")
    file.write_text(yaml.safe_dump(tree))
    return file


def write_inputs() -> None:
    """Texts, conversations, preferences, pairs and matches of made-up words."""
    if Path("matches.jsonl").exists():
        return
    draw = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    names = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(20_000)]

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(names, k=draw.randint(least, most)))

    Path("words.txt").write_text("\n\n".join(words(50, 400) for _ in range(2000)))
    with (
        Path("chat.jsonl").open("w") as chat,
        Path("preference.jsonl").open("w") as preference,
        Path("pairs.jsonl").open("w") as pairs,
        Path("matches.jsonl").open("w") as matches,
    ):
        for _ in range(200):
            question, answers = words(5, 80), [words(50, 300) for _ in range(2)]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answers[0]}]
            chat.write(json.dumps({"messages": messages}) + "\n")
            pair = {"prompt": question, "chosen": answers[0], "rejected": answers[1]}
            preference.write(json.dumps(pair) + "\n")
            pair = {"input": words(50, 150), "output": words(10, 40)}
            pairs.write(json.dumps(pair) + "\n")
            matches.write(json.dumps({"query": pair["output"], "pos": [pair["input"]]}) + "\n")


def make_base() -> None:
    """The model that adapters are put on, of random weights, with the tokenizer of the texts."""
    if Path("runs/base/model").is_dir():
        return
    tree = yaml.safe_load(run_file(Case("llama 300M", "none", "adamw")).read_text())
    tree |= {"run": "runs/base"}
    tree["train"] |= {"steps": 1, "batch": 1, "micro_batch": 1}
    Path("base.yaml").write_text(yaml.safe_dump(tree))
    subprocess.run([sys.executable, "-m", "artel", "train", "base.yaml"], check=True)


TRAIN = """
import json, sys, torch
from artel.config import load_run
from artel.parallel import join_world
from artel.preparing import prepare
from artel.training.loop import train
prepared = prepare(load_run(sys.argv[1]))
with join_world(2) as world:
    train(prepared.config, prepared, world, lambda line: print(line, file=sys.stderr))
print(json.dumps({"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}))
"""


def measure(case: Case) -> dict[str, Any]:
    """Bytes, allocated and reserved; or the last lines of what went wrong."""
    command = [sys.executable, "-c", TRAIN, str(run_file(case))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ARTEL_CACHE": "cache"})
    if done.returncode:
        return {"failed": done.stderr[-1500:]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def predict(case: Case) -> dict[str, float]:
    """What `artel plan` says of a rank, in GiB."""
    file = str(run_file(case))
    subprocess.run([sys.executable, "-m", "artel", "prepare", file], check=True, capture_output=True)
    command = [sys.executable, "-m", "artel", "plan", file, "--json", "--hardware", HARDWARE]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)["per_rank_gib"]
    return figures


def report(cases: list[Case], measured: dict[str, Any], predicted: dict[str, dict[str, float]]) -> str:
    """The table of all cases, and what became of the errors."""
    lines = ["| case | allocated, planned, GiB | measured | error | reserved, measured |", "|---|---|---|---|---|"]
    errors: dict[bool, list[float]] = {False: [], True: []}
    for case in cases:
        allocated, reserved = (measured[case.name][kind] / 2**30 for kind in ("allocated", "reserved"))
        planned = predicted[case.name]["allocated"] - predicted[case.name]["framework"]
        error = planned / allocated - 1
        errors["compile" in case.train].append(abs(error))
        lines.append(f"| {case.name} | {planned:.2f} | {allocated:.2f} | {error:+.1%} | {reserved:.2f} |")
    lines.append("")
    every = errors[False] + errors[True]
    close = sum(error <= 0.05 for error in every)
    lines.append(f"{summary('all', every)}, {close} within 5 %\n")
    lines += [summary("not compiled", errors[False]), summary("compiled", errors[True])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
