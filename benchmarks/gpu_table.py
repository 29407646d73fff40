"""Speeds on one GPU in one command, for a card that is lent for half an hour. Not run on a GPU yet.

    python benchmarks/gpu_table.py [--out build/gpu_table.jsonl] [--only NAME ...] [--minutes 25] [--tiny]

Each row is written when it ends, so a run that was cut continues with the next row: first tests of the kernels, then
artel beside its peers (train_speed.py) in bf16 and fp8. `--tiny` tries the script on any machine, with tiny models and
batches. Not here yet: torchtitan, LoRA, preferences, packed conversations, rewards, a profile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
PEERS = ("bare_loop.py:train", "trainer.py:tuned")
DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2 = {"model_type": "gpt2", "vocab_size": 50_257, **DROPOUT}
LLAMA = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 4096}  # fmt: skip
ROBERTA = {"model_type": "roberta", "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16,
           "intermediate_size": 4096, "vocab_size": 50_265, "type_vocab_size": 1, "max_position_embeddings": 514,
           "pad_token_id": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


class Row(NamedTuple):
    name: str
    model: dict[str, Any]
    batch: int
    length: int
    peers: tuple[str, ...] = PEERS
    options: tuple[str, ...] = ()


ROWS = (
    Row("gpt2 124M", GPT2, 32, 1024),
    Row("llama 1.5B, 128,256 ids", LLAMA | {"vocab_size": 128_256}, 4, 4096),
    Row("gpt2 124M, Trainer's defaults", GPT2, 32, 1024, ("trainer.py:default",)),
    Row("llama 1B, 32,000 ids", LLAMA | {"vocab_size": 32_000}, 8, 2048),
    Row("llama 1B, 32,000 ids, fp8", LLAMA | {"vocab_size": 32_000}, 8, 2048, (), ("--precision", "fp8")),
    Row("llama 1.5B, 128,256 ids, fp8", LLAMA | {"vocab_size": 128_256}, 4, 4096, (), ("--precision", "fp8")),
    Row("roberta-large", ROBERTA, 32, 512, PEERS, ("--objective", "masked")),
)
TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 300}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER.parent / "build/gpu_table.jsonl")
    parser.add_argument("--only", nargs="+", help="parts of the names of rows")
    parser.add_argument("--minutes", type=float, default=25, help="no row starts after this time")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {json.loads(line)["row"] for line in lines}
    started = time.monotonic()
    chosen = [row for row in ROWS if not options.only or any(part in row.name for part in options.only)]
    commands = {row.name: command_of(row, tiny=options.tiny) for row in chosen}
    if not options.only:
        tests = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "tests/test_gpu.py",
            "-k",
            "kernel or loss or attention",
        ]
        commands = {"tests of the kernels": tests} | commands
    for name, command in commands.items():
        if name in done or time.monotonic() - started > 60 * options.minutes:
            continue
        print(f"{name}: {' '.join(command)}", file=sys.stderr, flush=True)
        began = time.monotonic()
        result = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent)
        measured = json.loads(result.stdout) if "--json" in command and not result.returncode else result.stdout[-2000:]
        row = {"row": name, "seconds": round(time.monotonic() - began), "measured": measured}
        if result.returncode:
            row["failed"] = result.stderr[-2000:]
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def command_of(row: Row, *, tiny: bool) -> list[str]:
    model, batch, length, rounds = row.model, row.batch, row.length, ("--steps", "20", "--rounds", "2")
    if tiny:
        model = {name: TINY.get(name, value) for name, value in model.items()}
        model |= {"n_layer": 2, "n_embd": 32, "n_head": 2} if model["model_type"] == "gpt2" else {}
        batch, length, rounds = 4, 32, ("--steps", "2", "--rounds", "1")
    peers = [part for peer in row.peers for part in ("--peer", str(FOLDER / "peers" / peer))]
    sizes = ["--batch", str(batch), "--length", str(length)]
    script = [sys.executable, str(FOLDER / "train_speed.py"), "--model", json.dumps(model), "--json"]
    return [*script, *sizes, *rounds, *peers, *row.options]


if __name__ == "__main__":
    main()
