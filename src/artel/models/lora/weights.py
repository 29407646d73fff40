"""The weights of adapters by name: their first values, and what of a model's weights is theirs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

NAME = "default"
"""peft's name for the only adapter of a model."""


def first_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The first weights of a model's adapters by name, float32, on the CPU; the adapters stay on the meta device.

    Called right after `add_adapters` it draws what that draws for a model in memory: peft draws every matrix before it
    moves to the device of its layer, so the random numbers have come as far.
    """
    from peft.tuners.lora import LoraLayer

    weights: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or not is_on_meta(module):
            continue
        on_meta = {kind: getattr(module, kind) for kind in ("lora_A", "lora_B")}
        for kind, matrices in on_meta.items():
            setattr(module, kind, copy.deepcopy(matrices).to_empty(device="cpu"))
        module.reset_lora_parameters(NAME, init_lora_weights=True)
        for kind, matrices in on_meta.items():
            drawn = getattr(module, kind)[NAME].weight.detach()
            weights[f"{name}.{kind}.{NAME}.weight"] = drawn
            setattr(module, kind, matrices)
    return weights


def is_on_meta(module: Any) -> bool:
    return any(matrix.weight.is_meta for matrix in module.lora_A.values())


def adapter_state(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of a model's weights is its adapter's, by the names that peft saves it under.

    peft's own function looks for the modules of the model, of which a stage of a pipeline has some only.
    """
    state = {}
    for name, tensor in weights.items():
        if ".lora_" in name or f".modules_to_save.{NAME}." in name:
            name = name.replace(f".lora_magnitude_vector.{NAME}.weight", ".lora_magnitude_vector")
            state[name.replace(f".modules_to_save.{NAME}.", ".").replace(f".{NAME}.", ".")] = tensor
    return state


def name_in_base(name: str) -> str:
    """The name that a tensor of a model with adapters had before they were put in; other names stay as they are."""
    parts = name.replace(f".modules_to_save.{NAME}.", ".").split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))
