"""What small runs tell of larger ones: the constants in fits.json, written by benchmarks/budget_fits.py.

The loss of a model with N parameters in its layers that has seen D tokens is E + A / N^a + B / D^b (Hoffmann et al.
2022, "Chinchilla"). Two things make D less than the tokens that passed:

- a batch of more tokens than the critical one takes fewer steps than those tokens could (McCandlish et al. 2018): D is
  divided by 1 + batch / critical batch, which itself grows with D;
- tokens seen again are worth less than new ones: U + U R* (1 - exp(-R / R*)) for R passes over U tokens after the first
  (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """value x (quantity / unit) ^ power."""

    value: float
    unit: float
    power: float

    def at(self, quantity: float) -> float:
        return self.value * (quantity / self.unit) ** self.power


@dataclass(frozen=True, slots=True)
class Fits:
    floor: float
    """E, bits per byte."""
    size: PowerLaw
    """A / N^a, of parameters in the layers."""
    data: PowerLaw
    """B / D^b, of tokens."""
    critical_batch: PowerLaw
    """Tokens, of the tokens of the run."""
    repeats: float
    """R*: passes after the first that are worth one pass over new text, before the worth of more of them fades."""
    rates: dict[str, dict[str, PowerLaw]]
    """Optimizer -> key of `train` -> peak learning rate, of the tokens of the run."""
    keys: dict[str, Any]
    """Keys of `train` that were the best of those tried: weight decay, warmup, decay."""
    largest: dict[str, float]
    """The largest `layer_parameters`, `tokens` and `epochs` that were measured: what lies beyond is extrapolated."""
    assumed: tuple[str, ...]
    """Which of these constants, in words, no run was made for."""

    def loss(self, layer_parameters: float, tokens: float, batch: float, unique: float) -> float:
        """Bits per byte after `tokens` tokens in steps of `batch` tokens, where the text has `unique` tokens."""
        worth = self.worth(tokens, batch, unique)
        return self.floor + self.size.at(layer_parameters) + self.data.at(worth)

    def worth(self, tokens: float, batch: float, unique: float) -> float:
        """D: as many tokens of new text, in small steps, would be worth as much."""
        serial = tokens / (1 + batch / self.critical_batch.at(tokens))
        again = serial / unique - 1
        return serial if again <= 0 else unique * (1 + self.repeats * (1 - math.exp(-again / self.repeats)))


@cache
def read_fits() -> Fits:
    """The constants that artel comes with."""
    content = orjson.loads(files("artel.planning.budget").joinpath("fits.json").read_bytes())
    rates = {
        optimizer: {key: PowerLaw(**law) for key, law in keys.items()} for optimizer, keys in content["rates"].items()
    }
    laws = {key: PowerLaw(**content[key]) for key in ("size", "data", "critical_batch")}
    return Fits(
        floor=content["floor"],
        size=laws["size"],
        data=laws["data"],
        critical_batch=laws["critical_batch"],
        repeats=content["repeats"],
        rates=rates,
        keys=content["keys"],
        largest=content["largest"],
        assumed=tuple(content["assumed"]),
    )
