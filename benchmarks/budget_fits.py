"""Small models from scratch on this machine, and what they tell of larger ones: writes benchmarks/budget_fits.md.

    python benchmarks/budget_fits.py --data ../shared/data --runs runs/fits [--minutes 60] [--only family,rate]
    python benchmarks/budget_fits.py --data ../shared/data --runs runs/fits --fit

The first command trains, one run after another, and appends each finished run to RUNS/runs.jsonl; started again it does
what is missing. The second fits what is there, prints the table, and writes benchmarks/budget_fits.md and the constants
that `train.budget` chooses by, src/artel/planning/budget/fits.json.

A run trains at a constant learning rate after warmup. From several points on its way a copy decays linearly to zero,
over as many tokens as came before, and is validated: each is a whole warmup-stable-decay run, with half of it decaying,
at a fraction of the cost (Hu et al. 2024, MiniCPM; Hägele et al. 2024). Seconds are processor time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from budget_law import write_fits
from budget_trials import Trial, trials

from artel.config import RunConfig, run_from
from artel.models.attention_switch import use_artel_attention
from artel.models.device import pick_precision
from artel.models.loading.build import build_model
from artel.models.loading.request import ModelRequest
from artel.objectives import objective_of
from artel.parallel import World, join_world
from artel.parallel.data_parallel import DataParallel
from artel.preparing import prepare
from artel.tokens import Order, micro_batches, step_numbers
from artel.training.evaluation import Validation
from artel.training.optim.optimizer import Optimizer

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 10
"""Steps."""
MICRO_BATCH = 4096
"""Tokens that are run at a time."""
TEXTS = {
    "novel": [{"path": "literature/anna_karenina.txt"}],
    "other-novel": [{"path": "literature/crime_and_punishment.txt"}],
    "pile": [{"path": "pile/0*.jsonl.zst"}],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with literature/ and pile/")
    parser.add_argument("--runs", type=Path, required=True, help="where finished runs are kept, and token stores")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--only", default="", help="groups of trials, with commas between")
    parser.add_argument("--fit", action="store_true", help="train nothing: fit what is there, and write the results")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "budget_fits.md")
    parser.add_argument("--constants", type=Path, default=ROOT / "src" / "artel" / "planning" / "budget" / "fits.json")
    asked = parser.parse_args()
    if asked.fit:
        write_fits(read_runs(asked.runs / "runs.jsonl"), asked.out, asked.constants)
        return
    os.environ.setdefault("ARTEL_CACHE", str(asked.runs / "cache"))
    asked.runs.mkdir(parents=True, exist_ok=True)
    train_all(asked.data, asked.runs / "runs.jsonl", asked.minutes, set(filter(None, asked.only.split(","))))


def train_all(data: Path, file: Path, minutes: float, groups: set[str]) -> None:
    done = {line["key"] for line in read_runs(file)}
    end = time.monotonic() + 60 * minutes
    with join_world(1) as world:
        for trial in trials():
            if trial.key in done or (groups and trial.group not in groups):
                continue
            if time.monotonic() > end:
                print("the time is over; the same command goes on", file=sys.stderr)
                return
            points = train(trial, data, world)
            with file.open("a") as stream:
                stream.write(json.dumps({"key": trial.key, "trial": asdict(trial), "points": points}) + "\n")
            for point in points:
                print(f"{trial.group} {trial.width} x {trial.layers} {point}", file=sys.stderr, flush=True)
            done.add(trial.key)


def read_runs(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def train(trial: Trial, data: Path, world: World) -> list[dict[str, Any]]:
    """The points of a trial: tokens, bits per byte, processor seconds for each length."""
    run = run_of(trial, data)
    prepared = prepare(run)
    store, tokenizer = prepared.open(), prepared.tokenizer()
    objective = objective_of(run, tokenizer)
    samples = objective.dataset(store.train)
    seen = max(1, round(len(samples) * trial.share))
    order = Order(seen, trial.seed)
    model = build_model(
        ModelRequest(run.model, objective.auto_class, objective.heads, trial.block, trial.seed), tokenizer
    )
    use_artel_attention(model.model)
    precision = pick_precision("auto", world.device)
    model.model.train()
    strategy = DataParallel(model.model, objective, world, precision)
    optimizer = Optimizer(model.model, run.train, trial.seed, None, precision)
    validation = Validation(objective, store.validation)
    rows = max(1, MICRO_BATCH // trial.block)

    def step(number: int, multiplier: float) -> None:
        numbers = step_numbers(number, trial.batch, sys.maxsize)
        parts = micro_batches(
            samples, order.at(numbers), numbers // seen, rank=0, world=1, batch=trial.batch, size=rows
        )
        batches = [objective.batch(part) for part in parts]
        torch.manual_seed(number)
        strategy.run(batches, float(sum(batch.targets for batch in batches)), optimizer.loss_factor)
        optimizer.clip_and_step(multiplier, strategy.gradient_norm())

    per_step = trial.batch * trial.block
    points, seconds, done = [], 0.0, 0
    for tokens in trial.tokens:
        steps = round(tokens / per_step)
        stable = round(steps * (1 - trial.decay))
        started = time.process_time()
        for number in range(done, stable):
            step(number, min(1.0, (number + 1) / WARMUP))
        done = stable
        seconds += time.process_time() - started
        kept = [
            {name: tensor.clone() for name, tensor in tensors.items()}
            for tensors in (optimizer.weights(), optimizer.state())
        ]
        started = time.process_time()
        for later in range(stable, steps):
            step(later, (steps - later) / (steps - stable))
        decayed = time.process_time() - started
        metrics, _ = validation.evaluate(strategy, rows)
        optimizer.load_weights(kept[0])
        optimizer.load(kept[1])
        points.append(
            {
                "tokens": steps * per_step,
                "steps": steps,
                "bits_per_byte": metrics["bits_per_byte"],
                "seconds": round(seconds + decayed, 2),
                "epochs": steps * trial.batch / seen,
                "parameters": model.num_parameters,
                "layer_parameters": layer_parameters(model.model),
                "vocabulary": tokenizer.vocabulary,
                "bytes_a_token": store.train.bytes / store.train.tokens,
                "text_tokens": seen * trial.block,
                "precision": precision,
            }
        )
    return points


def layer_parameters(model: torch.nn.Module) -> int:
    """Parameters of the layers: neither embeddings nor the head."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings()  # type: ignore[operator]
    return sum(p.numel() for p in model.parameters() if id(p) not in tables | {id(head.weight)})


def run_of(trial: Trial, data: Path) -> RunConfig:
    sources = [{"path": str(data / source["path"])} for source in TEXTS[trial.text]]
    described = {
        "run": "fits",
        "data": {"sources": sources, "block": trial.block},
        "tokenizer": {"train": {"vocab": trial.vocab}},
        "model": {"config": model_config(trial)},
        "train": {
            "steps": 1,
            "batch": trial.batch,
            "optimizer": trial.optimizer,
            "learning_rate": trial.rate,
            "muon_learning_rate": trial.muon_rate,
            "weight_decay": trial.weight_decay,
        },
    }
    return run_from(described, {}, {(): "budget_fits.py"})


def model_config(trial: Trial) -> dict[str, Any]:
    heads = trial.width // 64
    shared = {"tie_word_embeddings": trial.tied, "initializer_range": trial.init}
    if trial.family == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), trial.dropout)
        return shared | dropout | {
            "model_type": "gpt2", "n_embd": trial.width, "n_layer": trial.layers, "n_head": heads
        }  # fmt: skip
    gated = trial.family != "nanochat"  # which squares ReLU, with no gate
    return shared | {
        "model_type": trial.family,
        "hidden_size": trial.width,
        "num_hidden_layers": trial.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "intermediate_size": round(8 * trial.width / 3 / 64) * 64 if gated else 4 * trial.width,
        "attention_dropout": trial.dropout,
        **({} if gated else {"final_logit_softcapping": 15.0 if trial.softcap else None}),
    }


if __name__ == "__main__":
    main()
