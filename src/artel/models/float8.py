"""Matrix products of the layers in float8, by torchao (dynamic scaling, one scale for each tensor)."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from artel.errors import InputError
from artel.models.adapters import is_adapted
from artel.models.compile import repeated_layers

_SIDE = 16  # of a matrix: what float8 products on a GPU must be divisible by


def use_float8(model: PreTrainedModel, *, emulate: bool = False) -> str:
    """Let the linear layers of the repeated layers multiply in float8; what was done, in words.

    Embeddings and the output head are not among them and compute in bf16, as do matrices with a side that 16 does not
    divide, and GPT-2's Conv1D, whose matrix lies the other way round. The parameters are the same objects as before,
    under the same names: they are trained, saved and loaded in their own type. To be called before layers are compiled.
    `emulate` rounds to float8 and multiplies in the weights' type: for tests on a CPU.

    Raises InputError for a model with adapters, whose matrices are too narrow to gain by it.
    """
    if is_adapted(model):
        what = "fp8 is for whole matrices, and model.lora trains narrow ones"
        raise InputError.at("train.precision", what, "write train.precision: bf16")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Without padding, a micro-batch whose tokens 16 does not divide would fail in the product for the gradient.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    layers = repeated_layers(model)
    matrices = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear | Conv1D)]
    chosen = {module for module in matrices if _fits(module)}
    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=lambda module, _: module in chosen, config=config)
    return f"float8: {len(chosen)} of {len(matrices)} linear layers" + _rest(matrices, len(chosen))


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and all(side % _SIDE == 0 for side in module.weight.shape)


def _rest(matrices: list[nn.Module], chosen: int) -> str:
    if chosen == len(matrices):
        return ""
    if any(isinstance(module, Conv1D) for module in matrices):
        return "; Conv1D, GPT-2's kind, computes in bf16"
    return f"; matrices with a side that {_SIDE} does not divide compute in bf16"
