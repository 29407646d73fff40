"""What a builder of models is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from artel.config import ModelConfig
from artel.models.loading.materialize import WeightSource
from artel.models.quantization import count


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Which model to build, and what for."""

    config: ModelConfig
    """The section `model` of a run file."""
    auto_class: str
    """The transformers class that an objective needs: `AutoModelForCausalLM`."""
    heads: Mapping[str, int] = field(default_factory=dict)
    """Linear heads that an objective adds, and the outputs of each."""
    block: int = 1
    """The longest input in tokens."""
    seed: int = 0
    """Fixes the initial weights, the same on every process."""
    head_config: Mapping[str, Any] = field(default_factory=dict)
    """Values of the transformers configuration that the head needs: {"num_labels": 3}."""
    base_config: Path | None = None
    """The configuration of an adapter's base where it is not the base's own."""
    base_dtype: torch.dtype | None = None
    """What the matrices beneath adapters are held in (`half_base.py`); None for float32."""
    end_ids: frozenset[int] = frozenset()
    """The tokens that end what the model writes: it is saved with them. Empty for a model that writes nothing."""


@dataclass(slots=True)
class BuiltModel:
    """A model in float32 on the CPU or on the meta device (quantized weights: on their device), and notes about it."""

    model: PreTrainedModel
    notes: list[str] = field(default_factory=list)
    """What the user should know, one sentence each."""
    new_modules: list[str] = field(default_factory=list)
    """Modules with weights that are not from the pretrained model, but initialized."""
    weights: WeightSource | None = None
    """For a model on the meta device: where `materialize` gets its weights."""

    @property
    def num_parameters(self) -> int:
        """The number of parameters, adapters included. A tied parameter counts once."""
        return sum(count(parameter) for parameter in self.model.parameters())

    @property
    def num_trainable(self) -> int:
        """The number of parameters that are trained."""
        return sum(count(parameter) for parameter in self.model.parameters() if parameter.requires_grad)
