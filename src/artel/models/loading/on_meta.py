"""Models on the meta device, where weights take no memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_tie_weights


def build_on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """Build a model from a copy of `config`, with all parameters on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(copy.deepcopy(config), **settings)
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            # torch.FloatTensor(sizes), as in XLNet, ignores the default device: its uninitialized memory would be taken
            # for loaded weights.
            if parameter is not None and not parameter.is_meta:
                on_meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), on_meta)
    return model


def build_untied(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Like `build_on_meta` in float32, without tied weights."""
    with no_tie_weights():
        return build_on_meta(model_class, config, dtype=torch.float32)
