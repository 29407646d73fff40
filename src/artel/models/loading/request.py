"""`ModelRequest` and `BuiltModel`, the input and output of building a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from artel.config import ModelConfig
from artel.models.loading.heads import Head
from artel.models.loading.materialize import WeightSource
from artel.models.quantization import num_weights


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A model to build."""

    config: ModelConfig
    """The `model` section of a run file."""
    auto_class: str
    """The transformers class that an objective needs: `AutoModelForCausalLM`."""
    heads: Mapping[str, Head] = field(default_factory=dict)
    """Modules that an objective adds to the model, by name. They are trained, sharded and saved with it."""
    block: int = 1
    """The longest input in tokens."""
    seed: int = 0
    """Fixes the initial weights, the same on every process."""
    head_config: Mapping[str, Any] = field(default_factory=dict)
    """Values of the transformers configuration that the head needs: {"num_labels": 3}."""
    base_config: Path | None = None
    """The configuration of an adapter's base model, if it differs from the one in the base model's folder."""
    base_dtype: torch.dtype | None = None
    """The dtype of frozen matrices under adapters (`half_base.py`); None for float32."""
    end_ids: frozenset[int] = frozenset()
    """End tokens of generated text, saved with the model. Empty for a model that generates none."""


@dataclass(slots=True)
class BuiltModel:
    """A model in float32 on the CPU or meta device (if quantized, on the compute device), and notes about it."""

    model: PreTrainedModel
    notes: list[str] = field(default_factory=list)
    """Notes for the user, one sentence each."""
    new_modules: list[str] = field(default_factory=list)
    """Modules that the pretrained model lacks. Their weights are initialized."""
    weights: WeightSource | None = None
    """The source of weights for `materialize`, if the model is on the meta device."""

    @property
    def num_parameters(self) -> int:
        """The number of parameters, adapters included. A tied parameter counts once."""
        return sum(num_weights(parameter) for parameter in self.model.parameters())

    @property
    def num_trainable(self) -> int:
        """The number of trainable parameters."""
        return sum(num_weights(parameter) for parameter in self.model.parameters() if parameter.requires_grad)
