"""The optimizer of a run, with its state as named tensors."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from artel.config import TrainConfig
from artel.models.compiling import repeated_layers
from artel.training.muon import Muon


class Optimizer:
    """One or two optimizers of PyTorch, stepped together; each group's peak learning rate follows one schedule."""

    def __init__(self, model: PreTrainedModel, train: TrainConfig) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._parts = _parts(model, train)
        for part in self._parts:
            for group in part.param_groups:
                group["peak"] = group["lr"]

    def step(self, rate: float) -> None:
        """One step at `rate` times the peak learning rate; the gradients are gone afterwards."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = group["peak"] * rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """`parameter name|state name` -> tensor. What an optimizer keeps as a number becomes a float64 tensor."""
        found = {}
        for part in self._parts:
            for parameter, values in part.state.items():
                for key, value in values.items():
                    if value is not None:
                        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                        found[f"{self._names[parameter]}|{key}"] = tensor
        return found

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `state`, for the same model and optimizer."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        owner = {
            parameter: part for part in self._parts for group in part.param_groups for parameter in group["params"]
        }
        for name, tensor in state.items():
            parameter_name, _, key = name.rpartition("|")
            parameter = parameters[parameter_name]
            # AdamW keeps its step count on the CPU unless it is fused; the rest lives where the parameter does.
            on_device = key != "step" or owner[parameter].defaults.get("fused")
            owner[parameter].state[parameter][key] = tensor.to(parameter.device) if on_device else tensor


def _parts(model: PreTrainedModel, train: TrainConfig) -> list[torch.optim.Optimizer]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if train.optimizer == "sgd":
        return [torch.optim.SGD(_groups(parameters, train), lr=train.learning_rate, momentum=train.momentum)]
    matrices: list[nn.Parameter] = []
    if train.optimizer == "muon":
        matrices = [
            p for layer in repeated_layers(model) for p in layer.parameters() if p.ndim == 2 and p.requires_grad
        ]
    rest = [parameter for parameter in parameters if all(parameter is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(
        _groups(rest, train),
        lr=train.learning_rate,
        betas=(train.betas[0], train.betas[1]),
        eps=train.epsilon,
        fused=True,
    )
    if not matrices:
        return [adamw]
    return [adamw, Muon(matrices, lr=train.muon_learning_rate, weight_decay=train.weight_decay)]


def _groups(parameters: list[nn.Parameter], train: TrainConfig) -> list[dict[str, object]]:
    """Decay for matrices, none for biases and the scales of norms: both have one dimension."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
