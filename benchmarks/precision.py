"""Does each precision end where float32 does? The same small model on the same text, once in each, as a Markdown table.

    python benchmarks/precision.py --text ../shared/data/literature/anna_karenina.txt
    python benchmarks/precision.py --text novel.txt --model llama        # with fp8, on a GPU that has it
    python benchmarks/precision.py --text novel.txt --steps 2000 data.block=512 train.batch=32

A row is one `artel train` for each of `--seeds`; what stands behind the options are overrides for all. The second row
is fp32 with its sums in another order: its difference is what rounding alone does to such a run (at a learning rate of
3e-3 that was 0.2 %, at 1e-3 less than 0.01 %). Such a run sits on a plateau for a while, and where rounding moves the
step at which it leaves, a run that ends soon after ends elsewhere: of 300 steps one seed was 0.62 % apart, of 1,500
none more than 0.11 %. Exits with 1 where the validation loss of any run differs from fp32's by more than 0.5 %.

A processor without bf16 and fp16 products emulates them, 15 to 60 times slower than fp32 (one core with AVX2: 1 to 2.4
GFLOP/s instead of 34 to 58): hence the size. fp8 is left out where the device has none, and for GPT-2, whose layers it
passes over.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from statistics import fmean

import torch

from artel.errors import InputError
from artel.models.device import pick_precision

ALLOWED = 0.005
MODELS = {
    "gpt2": "model.config={model_type: gpt2, n_layer: 2, n_embd: 64, n_head: 2, resid_pdrop: 0, embd_pdrop: 0, "
    "attn_pdrop: 0}",
    "llama": "model.config={model_type: llama, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 2, "
    "intermediate_size: 192, tie_word_embeddings: true}",
}
RUNS = {
    "fp32": ["train.precision=fp32"],
    "fp32, summed in another order": ["train.precision=fp32", "train.micro_batch=2"],
    "bf16": ["train.precision=bf16"],
    "bf16, compiled": ["train.precision=bf16", "train.compile=on"],
    "fp16": ["train.precision=fp16"],
    "bf16, weights bf16": ["train.precision=bf16", "train.weights=bf16"],
}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--text", required=True)
    options.add_argument("--model", choices=list(MODELS), default="gpt2")
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    options.add_argument("overrides", nargs="*")
    given = options.parse_args()
    runs = dict(RUNS)
    if given.model != "gpt2" and has_float8():
        runs["fp8"] = ["train.precision=fp8"]
    print("| precision | validation loss | against fp32 | of each seed | seconds |\n|---|---|---|---|---|", flush=True)
    expected: list[float] = []
    worst = 0.0
    for name, overrides in runs.items():
        results = [train(name, given, seed, overrides) for seed in given.seeds]
        losses = [result["validation"]["loss"] for result in results]
        expected = expected or losses
        difference = fmean(losses) / fmean(expected) - 1
        apart = [loss / fp32 - 1 for loss, fp32 in zip(losses, expected, strict=True)]
        worst = max(worst, *map(abs, apart))
        shown = ", ".join(f"{each:+.2%}" for each in apart)
        seconds = sum(result["wall_seconds"] for result in results)
        print(f"| {name} | {fmean(losses):.4f} | {difference:+.2%} | {shown} | {seconds:.0f} |", flush=True)
    sys.exit(worst > ALLOWED)


def train(name: str, given: argparse.Namespace, seed: int, overrides: list[str]) -> dict:
    """One run; its result. What it tells goes to standard error."""
    folder = f"runs/precision-{given.model}-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    command = [sys.executable, "-m", "artel", "train", "novel-small", f"data.sources.0.path={given.text}"]
    command += ["data.block=64", "data.validation=0.02", "tokenizer={train: {vocab: 512}}", MODELS[given.model]]
    command += ["train.epochs=null", f"train.steps={given.steps}", "train.batch=8", "train.optimizer=adamw"]
    command += ["train.learning_rate=1e-3", "train.warmup=0.05", "train.compile=off"]
    command += ["validate.prompts=[]", "validate.blocks=100", "validate.every=never", "validate.patience=null"]
    command += ["checkpoint.every=never", *overrides, *given.overrides]
    command += [f"seed={seed}", f"run={folder}", "--restart", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True)
    return json.loads(done.stdout)


def has_float8() -> bool:
    try:
        pick_precision("fp8", torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except InputError:
        return False
    return True


if __name__ == "__main__":
    main()
