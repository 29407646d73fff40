"""Speed of training: artel and other trainers in turns, on the same weights and tokens.

    python benchmarks/train_speed.py
    python benchmarks/train_speed.py --peer benchmarks/peers/trainer.py:default --peer benchmarks/peers/trainer.py:tuned
    python benchmarks/train_speed.py --model llama.json --objective causal --batch 4 --length 4096 --steps 50

A peer is a function `train(work, after_step)`; benchmarks/peers/contestant.py has its contract. Each contestant is a
process of its own: all are started first, then one trains while the others sleep. Tokens are random.

- tokens/s: input tokens of whole optimizer steps over elapsed seconds, the median of the rounds.
- MFU: FLOPs of a token (artel/models/flops.py) x tokens/s over the dense peak of the device.
- peak GiB: allocated on the GPU, or the largest resident size of the process.
- first step s: from the start of the process, with imports, loading and compiling (of which `compiling s`).
- loss: of the last step that all have done. Nearly equal losses show that they did the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parent / "peers"))

import contestant
from artel_loop import run_of
from contestant import Work

from artel.config import ModelConfig
from artel.models.device import pick_precision
from artel.models.flops import device_name, estimate_flops_per_token, peak_flops, utilization
from artel.models.loading.build import build_model
from artel.models.loading.request import ModelRequest
from artel.objectives import build_objective
from artel.registry import OBJECTIVES
from artel.tokens import Sample, StoreWriter, Tokenizer, TokenStore, load_tokenizer, micro_batches, step_positions

DEFAULT_MODEL = {
    "causal": "{model_type: gpt2, n_layer: 6, n_embd: 384, n_head: 6, vocab_size: 16384, "
    "attn_pdrop: 0.0, embd_pdrop: 0.0, resid_pdrop: 0.0}",
    "masked": "{model_type: roberta, num_hidden_layers: 6, hidden_size: 384, num_attention_heads: 6, "
    "intermediate_size: 1536, vocab_size: 16384, type_vocab_size: 1, pad_token_id: 1, "
    "hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}",
}
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
WARM_UP = 2
"""Steps after the first one that do not count: optimizers allocate their state there, and compilers work late."""


def make_inputs(work: Work, model: dict[str, Any], steps: int) -> Any:
    """Write model/, store/, inputs.npy and targets.npy into `work.folder`. Return the configuration of the model."""
    folder, objective = Path(work.folder), OBJECTIVES[work.objective]
    vocabulary = int(model["vocab_size"])
    words = [*SPECIAL.values(), *(f"t{at}" for at in range(len(SPECIAL), vocabulary))]
    backend = Backend(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL).save_pretrained(folder / "store" / "tokenizer")
    tokenizer = load_tokenizer(str(folder / "store" / "tokenizer"))
    request = ModelRequest(ModelConfig(config=model), objective.auto_class, block=work.length, seed=0)
    built = build_model(request, tokenizer)
    built.model.save_pretrained(work.model)
    tokenizer.save(Path(work.model))
    write_rows(work, tokenizer, vocabulary, steps)
    return built.model.config


def write_rows(work: Work, tokenizer: Tokenizer, vocabulary: int, steps: int) -> None:
    """Write store/, inputs.npy and targets.npy into `work.folder`: random tokens."""
    folder = Path(work.folder)
    rows = steps * work.batch
    writer = StoreWriter(folder / "store", vocabulary)
    ids = np.random.default_rng(0).integers(len(SPECIAL), vocabulary, rows * work.length + 1)
    writer.add("train", [Sample(ids)], len(ids), "random")
    about = {"key": "benchmark", "objective": work.objective, "tokenizer": tokenizer.fingerprint}
    writer.close(about | {"vocabulary": vocabulary})
    (folder / "store" / "ledger.json").write_text("{}")

    # The global batches in artel's order, for the peers.
    learned = build_objective(run_of(work), tokenizer)
    part = TokenStore(folder / "store").train
    samples = learned.dataset(part)
    order = learned.order(part, len(samples))
    files = {
        name: np.lib.format.open_memmap(folder / f"{file}.npy", "w+", np.int32, (rows, work.length))
        for name, file in (("input_ids", "inputs"), ("targets", "targets"))
    }
    for step in range(steps):
        positions = step_positions(step, work.batch, rows)
        indices, epochs = order.at(positions), positions // len(samples)
        [batch_rows] = micro_batches(
            samples, indices, epochs, rank=0, world_size=1, batch_size=work.batch, max_rows=work.batch
        )
        batch = learned.batch(batch_rows)
        for name, file in files.items():
            file[positions] = batch.tensors[name].numpy()


class Contestant:
    """A process and the turns that it has taken. `failed`: why it takes no further part."""

    def __init__(self, name: str, function: str, work: Work) -> None:
        self.name, self.function = name, function
        self.precision = getattr(contestant.function_of(function), "precision", work.precision)
        self.turns: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.failed = ""

    def start(self, folder: Path, environment: dict[str, str]) -> None:
        started = time.monotonic()
        # -P: no module in the working folder shadows one that a library imports.
        self.process = subprocess.Popen(
            [sys.executable, "-P", contestant.__file__, str(folder / "work.json"), self.function],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.first = self._answer()
        self.first_step = time.monotonic() - started

    def take_turn(self, steps: int, seconds: float) -> dict[str, Any]:
        """Train `steps` steps, or fewer when `seconds` run out, at least one."""
        if self.failed:
            return {}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([steps, seconds]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: there is no answer
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        turn: dict[str, Any] = json.loads(line) if line else {"failed": f"exit status {self.process.wait()}"}
        self.failed = turn.get("failed", "")
        self.losses += turn.get("losses", [])
        return turn

    def end(self) -> None:
        """Kill the process and everything it started."""
        if hasattr(self, "process") and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def train_in_turns(contestants: list[Contestant], work: Work, asked: argparse.Namespace) -> None:
    # All use the first of several GPUs; Trainer would split a batch over all that it sees.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if work.device == "cuda" else ""
    environment = {"CUDA_VISIBLE_DEVICES": gpu, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {name: str(work.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    try:
        for each in contestants:
            print(f"{each.name}: first steps", file=sys.stderr)
            each.start(Path(work.folder), environment)
            each.take_turn(WARM_UP, asked.time_limit)
        for number in range(asked.rounds):
            for each in contestants:
                print(f"{each.name}: round {number + 1} of {asked.rounds}", file=sys.stderr)
                if work.device == "cuda":  # allocate again the memory that others have used
                    each.take_turn(1, asked.time_limit)
                each.turns.append(each.take_turn(asked.steps, asked.time_limit))
    finally:
        for each in contestants:
            each.end()


def results(contestants: list[Contestant], work: Work, flops: float | None) -> list[dict[str, Any]]:
    device = device_name(torch.device(work.device))
    good = [each for each in contestants if not each.failed]
    step = min((len(each.losses) for each in good), default=0)
    rows = []
    for each in contestants:
        if each.failed:
            rows.append({"name": each.name, "failed": each.failed})
            continue
        tokens = work.batch * work.length
        rate = statistics.median(len(turn["losses"]) * tokens / turn["seconds"] for turn in each.turns)
        rows.append(
            {
                "name": each.name,
                "tokens/s": rate,
                "MFU": utilization(flops, rate, peak_flops(device, each.precision)),
                "precision": each.precision,
                "peak GiB": max(turn["peak_memory"] for turn in each.turns) / 2**30,
                "first step s": each.first_step,
                "compiling s": each.first["compile_seconds"],
                "steps": [len(turn["losses"]) for turn in each.turns],
                f"loss at {step}": each.losses[step - 1],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a JSON or YAML file, or {model_type: …}; by default a small one")
    parser.add_argument("--objective", choices=list(DEFAULT_MODEL), default="causal")
    parser.add_argument("--batch", type=int, default=8, help="rows in a global batch")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=60, help="seconds after which a turn ends")
    parser.add_argument("--peer", action="append", default=[], help="module:function or FILE.py:function")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    text = asked.model or DEFAULT_MODEL[asked.objective]
    model = yaml.safe_load(text if text.startswith("{") else Path(text).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        work = Work(
            folder=name,
            objective=asked.objective,
            batch=asked.batch,
            length=asked.length,
            device=asked.device,
            precision=pick_precision(asked.precision, torch.device(asked.device)),
            optimizer=asked.optimizer,
            threads=torch.get_num_threads(),
        )
        (Path(name) / "work.json").write_text(json.dumps(asdict(work)))
        own = Path(__file__).parent / "peers" / "artel_loop.py"
        contestants = [Contestant("artel", f"{own}:train", work)]
        contestants += [Contestant(peer, peer, work) for peer in asked.peer]
        config = make_inputs(work, model, 1 + WARM_UP + asked.rounds * (asked.steps + 1))
        train_in_turns(contestants, work, asked)
    rows = results(
        contestants, work, estimate_flops_per_token(config, OBJECTIVES[work.objective].auto_class, work.length)
    )
    if asked.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            " · ".join(
                f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
        if row is not rows[0] and "tokens/s" in row and "tokens/s" in rows[0]:
            print(f"    artel is {rows[0]['tokens/s'] / row['tokens/s']:.2f} times as fast")


if __name__ == "__main__":
    main()
