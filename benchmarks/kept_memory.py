"""What keeping host memory gains and costs a training step on a CPU (src/artel/training/memory.py).

    python benchmarks/kept_memory.py [--steps 6] [--rounds 2] [--unequal]

A plain GPT-2 of transformers (4 layers x 256, dropout 0.1, 4,096 ids), 32 rows of 256 tokens, one thread, AdamW, no
code of artel in the step; a process of its own for each of three, in turns: memory given back, kept in pages of 4 KB,
and kept in pages of 2 MB, as a run does where the kernel has them. Prints for a step, first ones left out:
median seconds, seconds in the kernel, pages that it handed out; and the peak above what the process had before its
first step. With --unequal each step has 8 to 24 rows of 16 to 256 tokens, and that peak is printed at a third, two
thirds and the end: it must not grow.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from statistics import median
from typing import Any

GIVEN_BACK, KEPT_SMALL, KEPT = NAMES = "given back", "kept, 4 KB", "kept, 2 MB"
_UNMEASURED = 2  # steps; the optimizer's averages and the heap grow in them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--unequal", action="store_true")
    parser.add_argument("--alone", choices=NAMES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        print(json.dumps(measure(asked.alone, asked.steps, unequal=asked.unequal)))
        return
    print("| memory | s a step | s in the kernel | pages a step | peak of the steps, GiB |\n|---|---|---|---|---|")
    for _ in range(asked.rounds):
        for name in NAMES:
            command = [sys.executable, __file__, "--alone", name, "--steps", str(asked.steps)]
            command += ["--unequal"] if asked.unequal else []
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            peaks = ", ".join(f"{each:.2f}" for each in found["peaks"])
            print(f"| {name} | {found['seconds']:.2f} | {found['kernel']:.2f} | {found['pages']:,.0f} | {peaks} |")


def measure(name: str, steps: int, *, unequal: bool) -> dict[str, Any]:
    """Medians of a step, and the peak of the steps in GiB: at the end, or three times with `unequal`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from artel.training import memory as host_memory

    if name == KEPT_SMALL:
        host_memory.has_no_memory_limit = lambda: False
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=4096, n_positions=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    draw = random.Random(0)
    found: list[tuple[float, float, float]] = []
    peaks: list[float] = []
    at_first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with nullcontext() if name == GIVEN_BACK else host_memory.retained_host_memory(torch.device("cpu")):
        for step in range(_UNMEASURED + steps):
            rows, length = (draw.randint(8, 24), draw.randint(16, 256)) if unequal else (32, 256)
            ids = torch.randint(4096, (rows, length))
            started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after = resource.getrusage(resource.RUSAGE_SELF)
            pages, kernel = after.ru_minflt - before.ru_minflt, after.ru_stime - before.ru_stime
            found.append((time.perf_counter() - started, kernel, pages))
            if not unequal or (step >= _UNMEASURED and (step + 1 - _UNMEASURED) % max(1, steps // 3) == 0):
                peaks.append((after.ru_maxrss - at_first) / 2**20)
    seconds, kernel, pages = (median(each) for each in zip(*found[_UNMEASURED:], strict=True))
    return {"seconds": seconds, "kernel": kernel, "pages": pages, "peaks": peaks if unequal else peaks[-1:]}


if __name__ == "__main__":
    main()
