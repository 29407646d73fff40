"""Scaling laws fitted to small runs. The constants are in fits.json; the runs are in benchmarks/budget_fits.md.

The loss of a model with N parameters in its layers that has seen D tokens is E + A / N^a + B / D^b (Hoffmann et al.
2022, "Chinchilla"), plus a term for overfitting. Two effects make D smaller than the number of tokens seen:

- with a batch larger than the critical batch, each token helps less (McCandlish et al. 2018): D is divided by
  1 + batch / critical batch, and the critical batch grows with D;
- repeated tokens are worth less than new ones: U + U R* (1 - exp(-R / R*)) for R further epochs over U tokens
  (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", section 3).

This law never predicts overfitting. On a novel the loss rises again after about three epochs, sooner for a larger
model. The rise is C epochs^p (parameters / U)^q. These parameters include embeddings and head, which overfit too.

A weight decay with a timescale of half an epoch nearly removes the rise, but costs a little in a run of few epochs. So
each run uses either this decay or the constant one (`Regularization`). The timescale is 1 / (learning rate x weight
decay) steps. Wang and Aitchison 2024, "How to set AdamW's weight decay as you scale model and dataset size", found that
its best value is a constant fraction of an epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import orjson

_MAX_DECAY_PER_STEP = 0.1
"""Maximum decay of a weight per step, if an epoch has few steps; up to 0.13 was measured."""


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """coefficient x (quantity / unit) ^ power."""

    coefficient: float
    unit: float
    power: float

    def value_at(self, quantity: float) -> float:
        return self.coefficient * (quantity / self.unit) ** self.power


@dataclass(frozen=True, slots=True)
class Overfit:
    """coefficient x epochs ^ epochs_power x (parameters / tokens of the text) ^ size_power, in bits per byte."""

    coefficient: float
    epochs_power: float
    size_power: float

    def value_at(self, epochs: float, parameters_per_token: float) -> float:
        return self.coefficient * epochs**self.epochs_power * parameters_per_token**self.size_power


@dataclass(frozen=True, slots=True)
class Regularization:
    """A weight decay, and the value of repeated epochs with it."""

    weight_decay: float
    """Minimum weight decay."""
    timescale: float
    """Timescale of the weights' moving average, in epochs. 0: use `weight_decay` at any learning rate."""
    repeat_scale: float
    """R*: number of repeated epochs until another one is worth 1 / e of an epoch of new text."""
    overfit: Overfit
    cost: float
    """Loss added by the decay, in bits per byte."""

    def decay(self, rate: float, steps_per_epoch: float) -> float:
        """Return the weight decay for a peak learning rate."""
        if not self.timescale:
            return self.weight_decay
        decay_per_step = min(_MAX_DECAY_PER_STEP, 1 / (steps_per_epoch * self.timescale))
        return max(self.weight_decay, decay_per_step / rate)

    def effective_tokens(self, tokens: float, unique_tokens: float) -> float:
        """Return the number of new tokens worth as much as `tokens` of a text with `unique_tokens`."""
        extra_epochs = tokens / unique_tokens - 1
        if extra_epochs <= 0:
            return tokens
        return unique_tokens * (1 + self.repeat_scale * (1 - math.exp(-extra_epochs / self.repeat_scale)))


@dataclass(frozen=True, slots=True)
class Fits:
    """All fitted constants, and the loss that they predict."""

    bytes_per_character: float
    """UTF-8 bytes per character of the fitted text, a Russian novel."""
    irreducible_loss: float
    """E, bits per byte."""
    size: PowerLaw
    """A / N^a, N: parameters in the layers."""
    data: PowerLaw
    """B / D^b, D: tokens."""
    critical_batch: PowerLaw
    """In tokens, as a function of the run's tokens."""
    regularizations: tuple[Regularization, ...]
    rates: dict[str, dict[str, PowerLaw]]
    """Optimizer -> key of `train` -> peak learning rate as a function of the run's tokens."""
    keys: dict[str, Any]
    """Best tried values of `train.warmup` and `train.decay`."""
    largest: dict[str, float]
    """The largest measured `layer_parameters`, `tokens`, `epochs` and `parameters_per_token` (per token of the text).
    Beyond them the laws extrapolate."""
    assumed: tuple[str, ...]
    """Names of constants that were not measured."""

    @property
    def optimizer(self) -> str:
        """The default optimizer, used by most of the runs."""
        return next(iter(self.rates))

    def layers_rate(self, tokens: float) -> float:
        """Return the peak learning rate for layers of the default optimizer. It also scales their weight decay."""
        return self.rates[self.optimizer]["muon_learning_rate"].value_at(tokens)

    def bits_per_byte(self, loss: float, bytes_per_character: float) -> float:
        """Convert a result of `loss` to a text with `bytes_per_character`.

        Assumes the bits per character of the fitted novel: "Moby-Dick" had 2.15, predicted 2.16 (benchmarks/NOTES.md).
        """
        return loss * self.bytes_per_character / bytes_per_character

    def loss(
        self,
        regularization: Regularization,
        layer_parameters: float,
        parameters: float,
        tokens: float,
        batch: float,
        unique_tokens: float,
    ) -> float:
        """Return bits per byte after `tokens` tokens in steps of `batch` tokens, for a text of `unique_tokens`."""
        # The number of tokens that small batches would need for the same loss.
        small_batch_tokens = tokens / (1 + batch / self.critical_batch.value_at(tokens))
        effective_tokens = regularization.effective_tokens(small_batch_tokens, unique_tokens)
        overfit = regularization.overfit.value_at(tokens / unique_tokens, parameters / unique_tokens)
        added_loss = overfit + regularization.cost
        size_loss = self.size.value_at(layer_parameters)
        data_loss = self.data.value_at(effective_tokens)
        return self.irreducible_loss + size_loss + data_loss + added_loss


@cache
def read_fits() -> Fits:
    """Return the constants shipped with artel."""
    content = orjson.loads(files("artel.planning.budget").joinpath("fits.json").read_bytes())
    rates = {
        optimizer: {key: PowerLaw(**law) for key, law in keys.items()} for optimizer, keys in content["rates"].items()
    }
    laws = {key: PowerLaw(**content[key]) for key in ("size", "data", "critical_batch")}
    return Fits(
        bytes_per_character=content["bytes_per_character"],
        irreducible_loss=content["irreducible_loss"],
        size=laws["size"],
        data=laws["data"],
        critical_batch=laws["critical_batch"],
        regularizations=tuple(
            Regularization(**{**values, "overfit": Overfit(**values["overfit"])})
            for values in content["regularizations"]
        ),
        rates=rates,
        keys=content["keys"],
        largest=content["largest"],
        assumed=tuple(content["assumed"]),
    )
