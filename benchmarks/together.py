"""Greedy tokens of prompts computed together, held against those of each prompt alone: plain and LoRA, fp32 and bf16.

    python benchmarks/together.py FOLDER --tokens 16

Prompts are cuts of artel's own docs, of 3 to 150 words. Where the tokens part, the first one that does is named, with
the gap between the logits of the two tokens in the run of the prompt alone. The adapter is a LoRA of rank 8 with random
weights.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from artel.inference import OpenedModel, open_model
from artel.inference.engine.base import Engine, EngineError, Generation
from artel.inference.engine.make import make_engine
from artel.models.generate import continue_ids
from artel.models.sampler import Sampler, SamplingOptions, Token

ROOT = Path(__file__).parents[1]
NEVER = frozenset({-1})


@dataclass
class Alone:
    """The greedy tokens of one prompt, and the logits that each was chosen by."""

    tokens: list[int]
    logits: list[torch.Tensor]


def prompts(count: int) -> list[str]:
    words = (ROOT / "docs" / "text.md").read_text("utf-8").split()
    return [" ".join(words[number * 7 :][: 3 + number * 3]) for number in range(count)]


def alone(opened: OpenedModel, ids: list[int], count: int) -> Alone:
    kept: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> int:
        kept.append(logits.clone())
        return int(logits.argmax())

    tokens = list(continue_ids(opened.model, opened.tokenizer, ids, choose, count, None, NEVER))
    return Alone(tokens, kept)


def together(engine: Engine, opened: OpenedModel, asked: list[list[int]], count: int) -> list[list[int]]:
    items: queue.SimpleQueue[tuple[int, Token | EngineError | None]] = queue.SimpleQueue()
    generations = []
    for number, ids in enumerate(asked):
        sampler = Sampler(SamplingOptions(temperature=0), ids, opened.tokenizer.vocabulary)

        def deliver(item: Token | EngineError | None, number: int = number) -> None:
            items.put((number, item))

        generations.append(Generation(sampler, count, NEVER, deliver))
        engine.submit(ids, generations[-1])
    written: list[list[int]] = [[] for _ in asked]
    left = len(asked)
    while left:
        number, item = items.get()
        if isinstance(item, EngineError):
            raise item
        if item is None:
            left -= 1
            engine.cancel(generations[number])
        else:
            written[number].append(item.id)
    return written


def compare(name: str, opened: OpenedModel, count: int, tokens: int) -> None:
    asked = [ids.tolist() for ids in opened.tokenizer.encode(prompts(count))]
    singles = [alone(opened, ids, tokens) for ids in asked]
    engine = make_engine(opened.model, opened.tokenizer, 16, max(map(len, asked)) + tokens)
    try:
        batched = together(engine, opened, asked, tokens)
    finally:
        engine.close()
    parts = []
    for number, (single, others) in enumerate(zip(singles, batched, strict=True)):
        at = next((at for at in range(tokens) if single.tokens[at] != others[at]), None)
        if at is not None:
            mine, other = single.tokens[at], others[at]
            gap = float(single.logits[at][mine] - single.logits[at][other])
            words = f"{opened.tokenizer.decode([mine])!r}, not {opened.tokenizer.decode([other])!r}"
            parts.append(f"prompt {number}, token {at}: {words}; gap {gap:.4g}")
    lengths = f"prompts of {min(map(len, asked))} to {max(map(len, asked))} tokens"
    print(f"{name}: {count - len(parts)} of {count} equal, {tokens} tokens each; {lengths}; {engine.note}", flush=True)
    for part in parts:
        print(f"    {part}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = open_model(arguments.folder)
        torch.manual_seed(0)
        lora = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(base.model, lora).save_pretrained(folder)
        base.tokenizer.save(Path(folder))
        for name, model in (("plain", arguments.folder), ("LoRA", folder)):
            for dtype in (torch.float32, torch.bfloat16):
                opened = open_model(model)
                opened.model.to(dtype)
                compare(f"{name}, {str(dtype).removeprefix('torch.')}", opened, arguments.prompts, arguments.tokens)


if __name__ == "__main__":
    main()
