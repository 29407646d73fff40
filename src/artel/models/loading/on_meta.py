"""A model's structure on the meta device, where its weights take no memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def build_on_meta(kind: type[PreTrainedModel], config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """A model of a copy of `config`, with all of its parameters on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = kind._from_config(copy.deepcopy(config), **settings)
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            # torch.FloatTensor(sizes), as in XLNet, heeds no device: whatever its memory held would be taken for
            # weights that are there.
            if parameter is not None and not parameter.is_meta:
                new = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), new)
    return model
