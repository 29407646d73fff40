"""What small runs tell of larger ones: the constants in fits.json, written by benchmarks/budget_fits.py.

The loss of a model with N parameters in its layers that has seen D tokens is E + A / N^a + B / D^b (Hoffmann et al.
2022, "Chinchilla"), and more for what it has learned by heart. Two things make D less than the tokens that passed:

- a batch of more tokens than the critical one takes fewer steps than those tokens could (McCandlish et al. 2018): D is
  divided by 1 + batch / critical batch, which itself grows with D;
- tokens seen again are worth less than new ones: U + U R* (1 - exp(-R / R*)) for R passes over U tokens after the first
  (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", section 3).

That law only falls. On a novel the loss rises again after three passes or so, sooner for a larger model. What it rises
by is C passes^p (parameters / U)^q, with the parameters of the embeddings and the head, which learn words by heart too.
A weight decay by which weights forget within half a pass nearly takes that away, and costs a little where there are
few passes: a run has one or the other (`Regularization`). Weights forget in 1 / (learning rate x weight decay) steps;
that this should be a part of a pass, however long the pass is, is from Wang and Aitchison 2024, "How to set AdamW's
weight decay as you scale model and dataset size".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import orjson

_MOST_OF_A_STEP = 0.1
"""The share of a weight that a step takes away at most, where a pass has few steps; 0.13 was measured."""


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """value x (quantity / unit) ^ power."""

    value: float
    unit: float
    power: float

    def at(self, quantity: float) -> float:
        return self.value * (quantity / self.unit) ** self.power


@dataclass(frozen=True, slots=True)
class Overfit:
    """value x passes ^ passes_power x (parameters / tokens of the text) ^ size_power, in bits per byte."""

    value: float
    passes_power: float
    size_power: float

    def at(self, passes: float, parameters_a_token: float) -> float:
        return self.value * passes**self.passes_power * parameters_a_token**self.size_power


@dataclass(frozen=True, slots=True)
class Regularization:
    """A weight decay, and what passes over a text are worth with it."""

    weight_decay: float
    """At least."""
    timescale: float
    """Of the weights' moving average, in passes: within it they forget. 0: the weight decay is what it is."""
    repeats: float
    """R*: passes after the first until one more is worth 1 / e of a pass over new text."""
    overfit: Overfit
    cost: float
    """Bits per byte, however many passes there are."""

    def decay(self, rate: float, steps_a_pass: float) -> float:
        """The weight decay at that peak learning rate."""
        if not self.timescale:
            return self.weight_decay
        of_a_step = min(_MOST_OF_A_STEP, 1 / (steps_a_pass * self.timescale))
        return max(self.weight_decay, of_a_step / rate)

    def worth(self, tokens: float, unique: float) -> float:
        """As many tokens of new text would be worth as much as `tokens` of a text that has `unique`."""
        again = tokens / unique - 1
        return tokens if again <= 0 else unique * (1 + self.repeats * (1 - math.exp(-again / self.repeats)))


@dataclass(frozen=True, slots=True)
class Fits:
    bytes_per_character: float
    """Of the text that the runs were made with, in UTF-8: a Russian novel."""
    floor: float
    """E, bits per byte."""
    size: PowerLaw
    """A / N^a, of parameters in the layers."""
    data: PowerLaw
    """B / D^b, of tokens."""
    critical_batch: PowerLaw
    """Tokens, of the tokens of the run."""
    regularizations: tuple[Regularization, ...]
    rates: dict[str, dict[str, PowerLaw]]
    """Optimizer -> key of `train` -> peak learning rate, of the tokens of the run."""
    keys: dict[str, Any]
    """Keys of `train` that were the best of those tried: warmup, decay."""
    largest: dict[str, float]
    """The largest `layer_parameters`, `tokens`, `epochs` and `parameters_a_token` (of the text) that were measured:
    what lies beyond is extrapolated."""
    assumed: tuple[str, ...]
    """Which of these constants, in words, no run was made for."""

    @property
    def optimizer(self) -> str:
        """That most runs were made with, and that is chosen."""
        return next(iter(self.rates))

    def layers_rate(self, tokens: float) -> float:
        """Its peak learning rate of the layers, by which their weights decay too."""
        return self.rates[self.optimizer]["muon_learning_rate"].at(tokens)

    def bits_per_byte(self, loss: float, bytes_per_character: float) -> float:
        """A loss by `loss` as that of a text whose characters take another number of bytes.

        Bits per character are taken to be those of the novel that the runs were made with: "Moby-Dick" had 2.15 where
        they say 2.16 (benchmarks/NOTES.md).
        """
        return loss * self.bytes_per_character / bytes_per_character

    def loss(
        self,
        regularization: Regularization,
        layer_parameters: float,
        parameters: float,
        tokens: float,
        batch: float,
        unique: float,
    ) -> float:
        """Bits per byte after `tokens` tokens in steps of `batch` tokens, where the text has `unique` tokens."""
        serial = tokens / (1 + batch / self.critical_batch.at(tokens))  # that small steps would need for as much
        worth = regularization.worth(serial, unique)
        by_heart = regularization.overfit.at(tokens / unique, parameters / unique) + regularization.cost
        return self.floor + self.size.at(layer_parameters) + self.data.at(worth) + by_heart


@cache
def read_fits() -> Fits:
    """The constants that artel comes with."""
    content = orjson.loads(files("artel.planning.budget").joinpath("fits.json").read_bytes())
    rates = {
        optimizer: {key: PowerLaw(**law) for key, law in keys.items()} for optimizer, keys in content["rates"].items()
    }
    laws = {key: PowerLaw(**content[key]) for key in ("size", "data", "critical_batch")}
    return Fits(
        bytes_per_character=content["bytes_per_character"],
        floor=content["floor"],
        size=laws["size"],
        data=laws["data"],
        critical_batch=laws["critical_batch"],
        regularizations=tuple(
            Regularization(**{**each, "overfit": Overfit(**each["overfit"])}) for each in content["regularizations"]
        ),
        rates=rates,
        keys=content["keys"],
        largest=content["largest"],
        assumed=tuple(content["assumed"]),
    )
