"""What the small runs of benchmarks/budget_fits.py tell of larger ones: the law of planning/budget/fits.py, fitted."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from budget_trials import KILO, Trial


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


def regularization_of(point: Point) -> int | None:
    """Which of the two regularizations of fits.py a run has, from 0; None for one that tells of something else.

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
    timescale = trial.batch * trial.block / (trial.muon_rate * trial.weight_decay * point.unique)
    return 1 if 0.4 < timescale < 0.7 else None


FEWEST_TOKENS = 128 * KILO
MOST_PASSES = 5
WHOLE = 3.0
"""The weight of a run of the whole novel, beside those of its parts."""


class Law:
    """The law of fits.py, fitted: powers and what bends it on a grid, the rest by least squares of relative errors."""

    def __init__(self, points: list[Point]) -> None:
        """Points with a `regularization_of`."""
        self._sizes = np.array([point.layer_parameters / 1e6 for point in points])
        self._tokens = np.array([point.tokens for point in points], dtype=float)
        self._unique = np.array([point.unique for point in points])
        self._batch = np.array([point.trial.batch * point.trial.block for point in points])
        self._a_token = np.array([point.measured["parameters"] for point in points]) / self._unique
        self._losses = np.array([point.loss for point in points])
        # A part of a novel is harder than the whole, by a number of its own: sizes and passes are compared on one text.
        shares = np.array([point.trial.share for point in points])
        self._parts = np.stack([shares == share for share in sorted({*shares} - {1.0})], axis=1)
        self._forgets = np.array([regularization_of(point) for point in points]) == 1
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
        """Columns whose sum is the loss: the floor, size, tokens, what is learned by heart with either regularization,
        and what the second costs; then the parts of the text."""
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
    fitted = [point for point in points if regularization_of(point) is not None]
    law = Law(fitted)
    found = law.found
    floor, size, data, by_heart, forgetting, cost = (round(float(value), 5) for value in found["values"][:6])
    content = json.loads(constants.read_text())
    base = Trial("base")

    def overfit(value: float, passes_power: float) -> dict[str, float]:
        return {"value": value, "passes_power": passes_power, "size_power": found["overfit_power"]}

    content |= {
        "source": f"benchmarks/budget_fits.py, {len(points)} runs",
        "floor": floor,
        "size": {"value": size, "unit": 1e6, "power": found["size_power"]},
        "data": {"value": data, "unit": 1e6, "power": found["data_power"]},
        "critical_batch": {"value": found["critical"], "unit": 1e6, "power": 0.5},
        "regularizations": [
            {
                "weight_decay": base.weight_decay,
                "timescale": 0.0,
                "repeats": found["repeats"],
                "overfit": overfit(by_heart, found["passes_power"]),
                "cost": 0.0,
            },
            {
                "weight_decay": base.weight_decay,
                "timescale": 0.5,
                "repeats": found["repeats_forgetting"],
                "overfit": overfit(forgetting, found["passes_power_forgetting"]),
                "cost": cost,
            },
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


def page(points: list[Point], fitted: list[Point], law: Law, content: dict[str, Any]) -> str:
    size, data, critical = content["size"], content["data"], content["critical_batch"]
    plain, forgetting = content["regularizations"]
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
        f"- Weight decay by which weights forget within {forgetting['timescale']} passes: R is "
        f"{forgetting['repeats']:g}; {forgetting['overfit']['value']:.4f} passes^"
        f"{forgetting['overfit']['passes_power']} (parameters / U)^"
        f"{forgetting['overfit']['size_power']} is learned by heart, and it costs {forgetting['cost']:.4f}.",
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
