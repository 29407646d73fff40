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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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


SIZES = {64: 2, 128: 2, 192: 3, 256: 4, 384: 6}
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


def like(points: list[Point], base: Trial, *free: str) -> list[Point]:
    """The points whose trials are as `base`, but for width, layers, lengths and `free`."""
    ignored = {"group", "width", "layers", "tokens", *free}

    def rest(trial: Trial) -> dict[str, Any]:
        return {name: value for name, value in asdict(trial).items() if name not in ignored}

    return [point for point in points if rest(point.trial) == rest(base)]


def in_small_steps(tokens: float, trial: Trial, critical: dict[str, float]) -> float:
    """Tokens that would be worth as much in small steps (fits.py)."""
    at = critical["value"] * (tokens / critical["unit"]) ** critical["power"]
    return tokens / (1 + trial.batch * trial.block / at)


def fit_loss(points: list[Point], critical: dict[str, float]) -> dict[str, float]:
    """E + A (N / 1e6)^-a + B (D / 1e6)^-b with the least squared relative residuals: a, b and E on a grid."""
    sizes = np.array([point.layer_parameters for point in points]) / 1e6
    tokens = np.array([in_small_steps(point.tokens, point.trial, critical) for point in points]) / 1e6
    losses = np.array([point.loss for point in points])
    best: tuple[float, dict[str, float]] = (math.inf, {})
    for a, b, floor in itertools.product(
        np.arange(0.05, 0.61, 0.025), np.arange(0.05, 0.81, 0.025), np.arange(0.0, losses.min(), 0.05)
    ):
        terms = np.stack([sizes**-a, tokens**-b], axis=1) / losses[:, None]
        (size, data), *_ = np.linalg.lstsq(terms, (losses - floor) / losses, rcond=None)
        residual = float((((terms @ [size, data]) - (losses - floor) / losses) ** 2).sum())
        if size > 0 and data > 0 and residual < best[0]:
            found = {"floor": floor, "size": size, "size_power": -a, "data": data, "data_power": -b}
            best = residual, {name: round(float(value), 4) for name, value in found.items()}
    return best[1]


def fit_one(values: Iterable[float], points: list[Point], predict: Callable[[float, Point], float]) -> float:
    """The value with the least squared relative residuals."""
    return min(values, key=lambda value: sum((predict(value, point) / point.loss - 1) ** 2 for point in points))


def write_fits(runs: list[dict[str, Any]], out: Path, constants: Path) -> None:
    """Fit what there are enough points for; constants that nothing was measured for stay what they are."""
    points, base = points_of(runs), Trial("base")
    content = json.loads(constants.read_text())
    assumed = []
    plain = like(points, base)
    if len({point.trial.width for point in plain}) >= 3 and len({point.tokens for point in plain}) >= 3:
        law = fit_loss(plain, content["critical_batch"])
        content["floor"] = law["floor"]
        content["size"] = {"value": law["size"], "unit": 1e6, "power": law["size_power"]}
        content["data"] = {"value": law["data"], "unit": 1e6, "power": law["data_power"]}
        largest = content["largest"]
        largest["layer_parameters"] = max(point.layer_parameters for point in plain)
        largest["tokens"] = max(point.tokens for point in plain)
        largest["epochs"] = round(max(point.epochs for point in plain), 2)
    else:
        assumed.append("loss by size and tokens")
    batches = [point for point in like(points, base, "batch") if point.trial.batch != base.batch]
    if batches:

        def by_batch(value: float, point: Point) -> float:
            tokens = in_small_steps(point.tokens, point.trial, {**content["critical_batch"], "value": value})
            return predicted(content, point.layer_parameters, tokens)

        content["critical_batch"]["value"] = fit_one(np.geomspace(256, 65536, 49).tolist(), batches, by_batch)
    else:
        assumed.append("critical batch")
    repeated = like(points, replace(base, share=1 / 8))
    if repeated:

        def by_repeats(value: float, point: Point) -> float:
            worth = in_small_steps(point.tokens, point.trial, content["critical_batch"])
            again = max(0.0, worth / point.unique - 1)
            worth = min(worth, point.unique * (1 + value * (1 - math.exp(-again / value))))
            return predicted(content, point.layer_parameters, worth)

        content["repeats"] = float(fit_one(np.geomspace(0.5, 64, 57).tolist(), repeated, by_repeats))
        content["largest"]["epochs"] = max(point.epochs for point in repeated)
    else:
        assumed.append("worth of repeated text")
    swept = [point for point in like(points, base, "rate") if point.trial.width == base.width]
    lengths = Counter(point.tokens for point in swept)
    at = max(lengths, key=lengths.__getitem__)
    best = min((point for point in swept if point.tokens == at), key=lambda point: point.loss)
    content["rates"]["muon"]["learning_rate"] = {"value": best.trial.rate, "unit": 1e6, "power": 0.0}
    assumed += ["learning rates by size and length", "muon_learning_rate", "weight_decay, warmup, decay", "adamw"]
    content["source"] = f"benchmarks/budget_fits.py, {len(points)} runs"
    content["assumed"] = assumed
    constants.write_text(json.dumps(content, indent=2) + "\n")
    out.write_text(page(points, plain, content))
    print(out.read_text())


def predicted(content: dict[str, Any], layer_parameters: float, tokens: float) -> float:
    laws = (content["size"], layer_parameters), (content["data"], tokens)
    return content["floor"] + sum(law["value"] * (at / law["unit"]) ** law["power"] for law, at in laws)


def page(points: list[Point], plain: list[Point], content: dict[str, Any]) -> str:
    size, data = content["size"], content["data"]
    lines = [
        "# Small runs, and what they tell",
        "",
        f"`python benchmarks/budget_fits.py --fit`: {len(points)} runs, one thread, "
        f"{sum(point.seconds for point in points) / 60:.0f} minutes of processor time. Constants: "
        "`src/artel/planning/budget/fits.json`. Each run warms up for ten steps, and half of it decays.",
        "",
        "Not measured, but assumed: " + "; ".join(content["assumed"]) + ".",
        "",
        "## Loss by size and tokens",
        "",
        f"Bits per byte = {content['floor']:.2f} + {size['value']:.3f} (N / 1M)^{size['power']:.3f} + "
        f"{data['value']:.3f} (D / 1M)^{data['power']:.3f}; N counts the layers, D is tokens / (1 + batch / critical "
        f"batch), and the critical batch {content['critical_batch']['value']:,.0f} (tokens / 1M)^"
        f"{content['critical_batch']['power']:.2f} tokens.",
        "",
        "| width × layers | N | tokens | bits per byte | fit | difference |",
        "|---|---|---|---|---|---|",
    ]
    for point in sorted(plain, key=lambda point: (point.trial.width, point.tokens)):
        tokens = in_small_steps(point.tokens, point.trial, content["critical_batch"])
        fit = predicted(content, point.layer_parameters, tokens)
        lines.append(
            f"| {point.trial.width} × {point.trial.layers} | {point.layer_parameters:,} | {point.tokens:,} | "
            f"{point.loss:.4f} | {fit:.4f} | {fit / point.loss - 1:+.1%} |"
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
