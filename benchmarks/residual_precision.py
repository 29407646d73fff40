"""The loss with hidden states between layers in float32 and in bf16: the numbers of benchmarks/gpu_step.md.

    python benchmarks/residual_precision.py [--steps 300] [--seeds 0 1 2]

A Llama over bytes, 12 layers of 96, learns a novel that comes with artel. Any processor can run this, because bf16 is
imitated in float32: the inputs and outputs of every matmul and attention are rounded to bf16, forward and backward, as
autocast does on a GPU. For `bf16` so are the embedding's outputs and the sums of hidden states or of their gradients.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import artel

BOOK = Path(artel.__file__).parent / "books/moby-dick.jsonl.xz"
WIDTH, LENGTH, ROWS, PEAK_RATE, WARMUP = 96, 96, 16, 2e-3, 50
aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, ATTENTION,
           aten._scaled_dot_product_flash_attention_for_cpu_backward.default}  # fmt: skip
SUMS = {aten.add.Tensor, aten.embedding.default}


class ImitateBf16(TorchDispatchMode):
    """Rounds as autocast does inside the block; with `hidden_states`, also the sums of hidden states."""

    def __init__(self, *, hidden_states: bool) -> None:
        super().__init__()
        self._hidden_states = hidden_states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MATMULS:
            outputs = func(*map(rounded, args), **(kwargs or {}))
            # The log-sum-exp of attention stays float32.
            return (rounded(outputs[0]), outputs[1]) if func is ATTENTION else rounded(outputs)
        output = func(*args, **(kwargs or {}))
        is_sum = func in SUMS and output.ndim == 3 and output.shape[-1] == WIDTH
        return rounded(output) if self._hidden_states and is_sum else output


def rounded(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.to(torch.bfloat16).float()
    return tuple(map(rounded, value)) if isinstance(value, tuple) else value


def train(mode: ImitateBf16, seed: int, steps: int, text: torch.Tensor) -> float:
    """Return the loss in nats per byte on the last twentieth of `text` after training on the rest."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, num_hidden_layers=12, num_attention_heads=3, intermediate_size=256,
        max_position_embeddings=LENGTH, tie_word_embeddings=True))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    held_out = math.ceil(len(text) / 20)
    training, validation = text[:-held_out], text[-held_out:]
    for step, ids in enumerate(batches(training, steps, seed)):
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = PEAK_RATE * min(1, (step + 1) / WARMUP) * decay
        with mode:
            model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), mode:
        return statistics.mean(float(model(ids, labels=ids).loss) for ids in batches(validation, 20, 0))


def batches(text: torch.Tensor, count: int, seed: int) -> Iterable[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator).tolist()
        yield torch.stack([text[start : start + LENGTH] for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    with lzma.open(BOOK, "rt", encoding="utf-8") as lines:
        text = torch.tensor(list("\n".join(json.loads(line)["text"] for line in lines).encode()))
    print("| seed | float32 | bf16 | difference |\n|---|---|---|---|")
    for seed in options.seeds:
        exact, rough = (train(ImitateBf16(hidden_states=each), seed, options.steps, text) for each in (False, True))
        print(f"| {seed} | {exact:.4f} | {rough:.4f} | {rough / exact - 1:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
