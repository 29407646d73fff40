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
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artel.config import RunConfig, run_from
from artel.models.attention_switch import use_for_training
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
KILO = 1024


@dataclass(frozen=True, slots=True)
class Trial:
    """One run at a constant rate, and where copies of it decay."""

    group: str
    width: int = 128
    layers: int = 2
    tokens: tuple[int, ...] = (256 * KILO,)
    """Lengths of the whole runs, decay included; powers of two times the first."""
    text: str = "novel"
    share: float = 1.0
    """Of the training text that is there; the rest is never seen."""
    family: str = "nanochat"
    tied: bool = False
    softcap: bool = False
    """nanochat: bound the logits, which keeps artel from computing head and loss together."""
    init: float = 0.02
    vocab: int = 4096
    block: int = 256
    batch: int = 8
    """Blocks."""
    optimizer: str = "muon"
    rate: float = 8e-3
    """Peak learning rate of AdamW: embeddings, head, norms."""
    muon_rate: float = 0.02
    weight_decay: float = 0.1
    dropout: float = 0.0
    decay: float = 0.5
    seed: int = 0

    @property
    def key(self) -> str:
        """Tells finished runs apart; the group is only a heading."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "group"}, sort_keys=True)


SIZES = {64: 2, 128: 2, 192: 3, 256: 4, 320: 5, 384: 6}
"""Layers by width."""


def powers(first: int, last: int) -> tuple[int, ...]:
    """Tokens from 1,024 doubled `first` times to 1,024 doubled `last` times."""
    return tuple(KILO << power for power in range(first, last + 1))


def trials() -> Iterator[Trial]:
    """All trials, those first that decide most."""
    first = Trial("family", 256, 4, rate=2e-3)
    for family, tied in (("llama", True), ("gpt2", True), ("llama", False), ("qwen3", True)):
        yield replace(first, family=family, tied=tied, softcap=True)
    yield replace(first, softcap=True)
    yield first
    for adam in (0.5, 1, 2, 4):
        yield Trial("rate", rate=2e-3 * adam)
    for width, last in ((64, 8), (128, 7), (192, 7)):
        yield Trial("size", width, SIZES[width], powers(5, last))
    yield Trial("family-rate", family="llama", tied=True, softcap=True)
    for muon in (0.5, 2):
        yield Trial("rate", muon_rate=0.02 * muon)
    yield Trial("rate", rate=1.6e-2)
    yield Trial("size", 64, 2, powers(7, 10))
    yield Trial("size", 128, 2, powers(7, 10))
    yield Trial("size", 192, 3, powers(7, 9))
    for batch in (2, 4, 16, 32):
        yield Trial("batch", batch=batch)
    for width, last in ((192, 12), (256, 12)):
        yield Trial("passes", width, SIZES[width], powers(9, last))
    for width, last in ((128, 11), (192, 11), (256, 10), (64, 11), (384, 9)):
        yield Trial("repeat", width, SIZES[width], powers(7, last), share=1 / 4)
    for weight_decay in (0.4, 1.6):
        yield Trial("regularize", 256, 4, powers(9, 10), share=1 / 4, weight_decay=weight_decay)
    for width, last, weight_decay in ((256, 10, 3.2), (192, 11, 1.6), (256, 10, 6.4), (192, 11, 3.2)):
        trial = Trial("regularize", width, SIZES[width], powers(8, last), share=1 / 4)
        yield replace(trial, weight_decay=weight_decay)
    for width, last in ((256, 11), (192, 12), (320, 11)):
        yield Trial("regularize-novel", width, SIZES[width], powers(10, last), weight_decay=0.4)
    yield Trial("regularize-novel", 256, 4, powers(10, 11), weight_decay=0.8)
    yield Trial("repeat", 128, 2, powers(7, 10), share=1 / 8)
    yield Trial("size", 256, 4, powers(7, 9))
    yield Trial("repeat", 64, 2, powers(7, 10), share=1 / 8)
    for weight_decay in (0.0, 0.4):
        yield Trial("regularize", tokens=powers(9, 9), share=1 / 8, weight_decay=weight_decay)
    for adam in (0.25, 0.5, 1, 2):
        yield Trial("rate-width", 256, 4, powers(7, 7), rate=8e-3 * adam)
    for muon in (0.5, 2):
        yield Trial("rate-width", 256, 4, powers(7, 7), muon_rate=0.02 * muon)
    for decay in (0.25, 0.75):
        yield Trial("decay", decay=decay)
    yield Trial("family", tied=True)
    yield Trial("size", 128, 2, powers(7, 10), text="pile")
    for muon in (0.5, 2):
        yield Trial("rate-length", tokens=powers(10, 10), muon_rate=0.02 * muon)
    for rate in (2e-3, 4e-3, 8e-3):
        yield Trial("adamw", optimizer="adamw", rate=rate)
    for layers in (1, 4):
        yield Trial("depth", 128, layers)
    for init in (0.01, 0.04):
        yield Trial("init", init=init)
    yield Trial("repeat", 256, 4, powers(7, 9), share=1 / 8)
    for batch in (2, 4, 16):
        yield Trial("batch-width", 256, 4, powers(8, 8), batch=batch)
    yield Trial("size", 384, 6, powers(7, 9))
    for vocab in (1024, 2048, 8192):
        yield Trial("vocab", vocab=vocab)
    for batch in (2, 32):
        yield Trial("batch-length", tokens=powers(10, 10), batch=batch)
    for width in (64, 192):
        yield Trial("size", width, SIZES[width], powers(7, 10), text="other-novel")
    for width in (64, 192):
        yield Trial("size", width, SIZES[width], powers(7, 10), text="pile")
    yield Trial("size", 64, 2, powers(7, 13))
    yield Trial("size", 128, 2, powers(7, 12))
    yield Trial("size", 256, 4, powers(7, 11))
    yield Trial("size", 384, 6, powers(7, 10))


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
    use_for_training(model.model)
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
        optimizer.clip_and_step(multiplier, strategy.norm())

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


@dataclass(frozen=True, slots=True)
class Point:
    """One whole run."""

    trial: Trial
    tokens: int
    layer_parameters: int
    loss: float
    """Bits per byte."""
    seconds: float
    epochs: float
    unique: float
    """Tokens of its text."""
    measured: dict[str, Any]


def points_of(runs: list[dict[str, Any]]) -> list[Point]:
    """The points of all runs; of two runs that share the beginning, the points of both are the same, and count once."""
    points = [
        Point(
            Trial(**{**line["trial"], "tokens": tuple(line["trial"]["tokens"])}),
            point["tokens"],
            point["layer_parameters"],
            point["bits_per_byte"],
            point["seconds"],
            point["epochs"],
            point["text_tokens"],
            point,
        )
        for line in runs
        for point in line["points"]
    ]
    return list({(point.tokens, replace(point.trial, group="", tokens=())): point for point in points}.values())


def choosable(point: Point) -> int | None:
    """Which of the two habits of fits.py a run has, counted from 0; None for one that tells of something else.

    Runs of a few steps tell of warmup, and those that read a novel often without forgetting of nothing that is chosen.
    """
    trial, base = point.trial, Trial("base")
    free = {"group", "width", "layers", "tokens", "share", "batch", "weight_decay"}
    if any(value != getattr(base, name) for name, value in asdict(trial).items() if name not in free):
        return None
    if point.tokens < FEWEST_TOKENS:
        return None
    if trial.weight_decay == base.weight_decay:
        return 0 if point.epochs < MOST_PASSES else None
    forgets_within = trial.batch * trial.block / (trial.muon_rate * trial.weight_decay * point.unique)
    return 1 if 0.4 < forgets_within < 0.7 else None


FEWEST_TOKENS = 128 * KILO
MOST_PASSES = 5
WHOLE = 3.0
"""The weight of a run of the whole novel, beside those of its parts."""


class Law:
    """The law of fits.py, fitted: powers and what bends it on a grid, the rest by least squares of relative errors."""

    def __init__(self, points: list[Point]) -> None:
        """Points that are `choosable`."""
        self._sizes = np.array([point.layer_parameters / 1e6 for point in points])
        self._tokens = np.array([point.tokens for point in points], dtype=float)
        self._unique = np.array([point.unique for point in points])
        self._batch = np.array([point.trial.batch * point.trial.block for point in points])
        self._a_token = np.array([point.measured["parameters"] for point in points]) / self._unique
        self._losses = np.array([point.loss for point in points])
        # A part of a novel is harder than the whole, by a number of its own: sizes and passes are compared on one text.
        shares = np.array([point.trial.share for point in points])
        self._parts = np.stack([shares == share for share in sorted({*shares} - {1.0})], axis=1)
        self._forgets = np.array([choosable(point) for point in points]) == 1
        self.residual, self.found = min(map(self._fit, self._grid()), key=lambda fitted: fitted[0])
        self.fits = (1 + self._relative(self.found)) * self._losses

    @staticmethod
    def _grid() -> Iterator[dict[str, float]]:
        """Powers of the size and the tokens from 0.2 on, since Chinchilla's are 0.34 and 0.28. The critical batch ends
        at 20,000 tokens: beyond, runs of few steps would seem to cost nothing, and 32 steps cost more than the fit.
        """
        grids = {
            "size_power": (-0.2, -0.3, -0.4),
            "data_power": (-0.2, -0.25, -0.3, -0.35, -0.4),
            "critical": (4_000, 8_000, 12_000, 16_000, 20_000),
            "repeats": (1, 2, 4, 8, 15),
            "repeats_forgetting": (0.5, 1, 2, 4, 8),
            "passes_power": (1.0, 1.5, 2.0),
            "passes_power_forgetting": (0.5, 1.0),
            "overfit_power": (0.2, 0.4, 0.6, 0.8),
        }
        for values in itertools.product(*grids.values()):
            yield dict(zip(grids, values, strict=True))

    def _terms(self, at: dict[str, float]) -> Any:
        """Columns whose sum is the loss: the floor, size, tokens, what is learned by heart with either habit, and what
        the second costs; then the parts of the text."""
        serial = self._tokens / (1 + self._batch / (at["critical"] * (self._tokens / 1e6) ** 0.5))
        again = np.maximum(0.0, serial / self._unique - 1)
        repeats = np.where(self._forgets, at["repeats_forgetting"], at["repeats"])
        worth = np.where(again > 0, self._unique * (1 + repeats * (1 - np.exp(-again / repeats))), serial) / 1e6
        passes = self._tokens / self._unique
        a_token = self._a_token ** at["overfit_power"]
        plain, forgetting = (passes ** at[power] * a_token for power in ("passes_power", "passes_power_forgetting"))
        columns = (
            np.ones_like(worth), self._sizes ** at["size_power"], worth ** at["data_power"],
            plain * ~self._forgets, forgetting * self._forgets, self._forgets,
        )  # fmt: skip
        return np.column_stack([*columns, self._parts])

    def _fit(self, at: dict[str, float]) -> tuple[float, dict[str, Any]]:
        relative = self._terms(at) / self._losses[:, None]
        weights = np.where(self._parts.any(axis=1), 1.0, WHOLE)
        values, *_ = np.linalg.lstsq(relative * weights[:, None], weights, rcond=None)
        residual = float(np.average((relative @ values - 1) ** 2, weights=weights**2) ** 0.5)
        return math.inf if (values[:6] < 0).any() else residual, {**at, "values": values}

    def _relative(self, found: dict[str, Any]) -> Any:
        return self._terms(found) @ found["values"] / self._losses - 1


def write_fits(runs: list[dict[str, Any]], out: Path, constants: Path) -> None:
    """Fit what there is, and write the page and the constants; constants that nothing was measured for stay."""
    points = points_of(runs)
    fitted = [point for point in points if choosable(point) is not None]
    law = Law(fitted)
    found = law.found
    floor, size, data, by_heart, forgetting, cost = (round(float(value), 5) for value in found["values"][:6])
    content = json.loads(constants.read_text())
    base = Trial("base")
    content |= {
        "source": f"benchmarks/budget_fits.py, {len(points)} runs",
        "floor": floor,
        "size": {"value": size, "unit": 1e6, "power": found["size_power"]},
        "data": {"value": data, "unit": 1e6, "power": found["data_power"]},
        "critical_batch": {"value": found["critical"], "unit": 1e6, "power": 0.5},
        "habits": [
            habit(base, 0.0, found["repeats"], by_heart, found["passes_power"], found["overfit_power"], 0.0),
            habit(
                base,
                0.5,
                found["repeats_forgetting"],
                forgetting,
                found["passes_power_forgetting"],
                found["overfit_power"],
                cost,
            ),
        ],
        "largest": {
            "layer_parameters": max(point.layer_parameters for point in fitted),
            "tokens": max(point.tokens for point in fitted),
            "epochs": round(max(point.epochs for point in fitted), 2),
            "parameters_a_token": round(max(point.measured["parameters"] / point.unique for point in fitted)),
        },
        "assumed": ["learning rates by size and length", "muon_learning_rate", "warmup, decay", "adamw"],
    }
    like_base = {"group": base.group, "tokens": base.tokens}
    swept = [point for point in points if replace(point.trial, rate=base.rate, **like_base) == base
             and point.tokens == base.tokens[0]]  # fmt: skip
    best = min(swept, key=lambda point: point.loss).trial
    content["rates"]["muon"]["learning_rate"] = {"value": best.rate, "unit": 1e6, "power": 0.0}
    constants.write_text(json.dumps(content, indent=2) + "\n")
    out.write_text(page(points, fitted, law, content))
    print(out.read_text())


def habit(
    base: Trial, within: float, repeats: float, value: float, passes_power: float, size_power: float, costs: float
) -> dict[str, Any]:
    overfit = {"value": value, "passes_power": passes_power, "size_power": size_power}
    decay = {"weight_decay": base.weight_decay, "forgets_within": within}
    return {**decay, "repeats": repeats, "overfit": overfit, "costs": costs}


def page(points: list[Point], fitted: list[Point], law: Law, content: dict[str, Any]) -> str:
    size, data, critical = content["size"], content["data"], content["critical_batch"]
    plain, forgetting = content["habits"]
    lines = [
        "# Small runs, and what they tell",
        "",
        f"`python benchmarks/budget_fits.py --fit`: {len(points)} runs, one thread, "
        f"{sum(point.seconds for point in points) / 60:.0f} minutes of processor time. Constants: "
        "`src/artel/planning/budget/fits.json`. Each run warms up for ten steps, and half of it decays.",
        "",
        "Not measured, but assumed: " + "; ".join(content["assumed"]) + ".",
        "",
        "## Loss by size, tokens and passes",
        "",
        f"Bits per byte = {content['floor']:.2f} + {size['value']:.3f} (N / 1M)^{size['power']:.2f} + "
        f"{data['value']:.3f} (D / 1M)^{data['power']:.2f} + what is learned by heart. N counts the layers. D is the "
        f"tokens divided by 1 + batch / critical batch, which is {critical['value']:,.0f} (tokens / 1M)^"
        f"{critical['power']:.1f} tokens; what goes beyond the U tokens of the text is worth U R (1 - exp(-passes "
        "after the first / R)).",
        "",
        f"- Weight decay {plain['weight_decay']}: R is {plain['repeats']:g}; {plain['overfit']['value']:.4f} passes^"
        f"{plain['overfit']['passes_power']} (parameters / U)^{plain['overfit']['size_power']} is learned by heart. "
        f"Fitted to runs of less than {MOST_PASSES} passes.",
        f"- Weight decay by which weights forget within {forgetting['forgets_within']} passes: R is "
        f"{forgetting['repeats']:g}; {forgetting['overfit']['value']:.4f} passes^"
        f"{forgetting['overfit']['passes_power']} (parameters / U)^"
        f"{forgetting['overfit']['size_power']} is learned by heart, and it costs {forgetting['costs']:.4f}.",
        "",
        f"Root mean square of the relative differences: {law.residual:.2%}.",
        "",
        "| width × layers | N | tokens | passes | weight decay | batch | bits per byte | fit | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = zip(fitted, law.fits, strict=True)
    for point, fit in sorted(rows, key=lambda row: (row[0].unique, row[0].trial.width, row[0].tokens)):
        trial = point.trial
        lines.append(
            f"| {trial.width} × {trial.layers} | {point.layer_parameters:,} | {point.tokens:,} | {point.epochs:.1f} | "
            f"{trial.weight_decay} | {trial.batch} | {point.loss:.4f} | {fit:.4f} | {fit / point.loss - 1:+.1%} |"
        )
    names = [field.name for field in fields(Trial) if field.name not in ("group", "tokens", "width", "layers", "seed")]
    base = Trial("base")
    lines += ["", "## Every run", "", f"What differs from {described(base, names, all_of_them=True)}.", ""]
    lines += ["| | width × layers | tokens | epochs | what differs | bits per byte | seconds |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for point in points:
        trial = point.trial
        lines.append(
            f"| {trial.group} | {trial.width} × {trial.layers} | {point.tokens:,} | {point.epochs:.1f} | "
            f"{described(trial, names)} | {point.loss:.4f} | {point.seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def described(trial: Trial, names: list[str], *, all_of_them: bool = False) -> str:
    values = {name: getattr(trial, name) for name in names}
    base = asdict(Trial("base"))
    return ", ".join(f"{name} {value}" for name, value in values.items() if all_of_them or value != base[name])


if __name__ == "__main__":
    main()
