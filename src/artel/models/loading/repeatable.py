"""Models whose forward pass depends on more than weights, inputs and PyTorch's random state.

A run that is resumed must end with the same weights to the bit as one that was not stopped. Dropout is drawn from a
seed of the step (`training/loop.py`). Two architectures of transformers 5.24 draw or keep something else:

- Reformer's layers take a seed from the operating system in each forward pass.
- BigBird with block-sparse attention changes to full attention at the first batch of short rows, and stays there: what
  a step computes depends on the rows before it. The change also draws weights that are thrown away. Here each forward
  pass begins with the attention of the configuration, and the change draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def make_repeatable(model: PreTrainedModel) -> None:
    """Change `model` in place, so that the same step computes the same in a run that is resumed."""
    for module in model.modules():
        if hasattr(module, "_init_attention_seed"):  # ReformerLayer
            module._init_attention_seed = partial(_draw_seed, module, "attention_seed")
            module._init_feed_forward_seed = partial(_draw_seed, module, "feed_forward_seed")
    for module in _with_attention_type(model):
        module.set_attention_type = partial(_set_attention_type, module.set_attention_type)
        module.register_forward_pre_hook(partial(_reset_attention_type, module.attention_type))


def _draw_seed(layer: nn.Module, name: str) -> None:
    """Keep a seed in the layer, and seed PyTorch with it: the backward pass computes dropout again with that."""
    seed = int(torch.randint(torch.iinfo(torch.int64).max, ()))
    setattr(layer, name, seed)
    torch.manual_seed(seed)


def _with_attention_type(module: nn.Module) -> Iterator[Any]:
    """The outermost modules that set the attention of those in them."""
    if hasattr(module, "set_attention_type"):
        yield module
        return
    for child in module.children():
        yield from _with_attention_type(child)


def _set_attention_type(change: Callable[[str], None], name: str) -> None:
    with torch.device("meta"):  # projections are made anew, and then replaced by those with the weights
        change(name)


def _reset_attention_type(name: str, module: Any, inputs: tuple[Any, ...]) -> None:
    module.set_attention_type(name)
