"""What a second thread that has computed costs the first: seconds of a training step, in one process.

    python benchmarks/openmp_threads.py [--steps 40]

A small Llama takes steps: alone; while a thread waits that has computed on all cores, as one that writes checkpoints
or serves a model may; when that has given its helpers back; and beside one that computes on one core
(src/artel/models/device.py). Each row is the median, and its ratio to the first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from artel.host import usable_cores
from artel.models.device import compute_on_one_core, release_helpers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="for each row")
    asked = parser.parse_args()
    torch.set_num_threads(usable_cores())
    step = training_step()
    rows = {"alone": median(step, asked.steps)}
    with ThreadPoolExecutor(1) as thread:
        thread.submit(compute).result()
        rows["a thread waits that has computed on all cores"] = median(step, asked.steps)
        thread.submit(release_helpers).result()
        rows["it has given its helpers back"] = median(step, asked.steps)
    with ThreadPoolExecutor(1, initializer=compute_on_one_core) as thread:
        thread.submit(compute).result()
        rows["a thread waits that computes on one core"] = median(step, asked.steps)
    print(f"| {usable_cores()} cores, torch {torch.__version__} | ms a step | ratio |\n|---|---|---|")
    for name, seconds in rows.items():
        print(f"| {name} | {1000 * seconds:.1f} | {seconds / rows['alone']:.2f} |")


def training_step() -> Callable[[], None]:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=4096, hidden_size=192, intermediate_size=768, num_hidden_layers=3,
                         num_attention_heads=3)  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.randint(4096, (4, 256))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def median(step: Callable[[], None], steps: int) -> float:
    """Seconds of a step, by the clock."""
    times = []
    for _ in range(3 + steps):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def compute() -> None:
    torch.ones(1 << 20).mul_(2)


if __name__ == "__main__":
    main()
