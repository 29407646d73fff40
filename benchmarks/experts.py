"""Experts in autocast's precision and their adapters, beside transformers' and peft's own way of computing them.

    python benchmarks/experts.py

Processor seconds of a training step of a small Qwen3-MoE (105 million parameters, 1,024 tokens) under bf16 autocast on
one thread, by turns, the least of three; the peak memory is that of the process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from itertools import chain

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from artel.config import LoraConfig
from artel.models.experts import NAME, compute_experts_in_autocast
from artel.models.lora.adapters import add_adapters

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 1000,
}
TOKENS = (4, 256)
STEPS = 3


def measure(lora: bool, implementations: list[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES))
    compute_experts_in_autocast(model)
    if lora:
        config = LoraConfig(rank=16, target=["auto", "experts"])
        add_adapters(model, config, base="base", generates=True, new_modules=[], seed=0)
    least = dict.fromkeys(implementations, float("inf"))
    for implementation in chain.from_iterable([implementations] * STEPS):
        model.set_experts_implementation(implementation)
        ids = torch.randint(0, SIZES["vocab_size"], TOKENS)
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
        least[implementation] = min(least[implementation], time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    what = "LoRA" if lora else "all weights"
    for implementation, seconds in least.items():
        print(f"{what:12} {implementation:10} {seconds:6.2f} s  {peak:5.2f} GiB", flush=True)


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1] == "lora", sys.argv[2:])
        return
    for what, implementations in (
        ("all", [NAME, "grouped_mm"]),
        ("lora", [NAME, "grouped_mm"]),
        ("lora", [NAME]),  # alone, for the memory of each
        ("lora", ["grouped_mm"]),
    ):
        subprocess.run([sys.executable, __file__, what, *implementations], check=True)


if __name__ == "__main__":
    main()
