"""Matrix products of the layers in float8 by torchao, with dynamic scaling and one scale for each tensor."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from artel.errors import InputError
from artel.models.compile import repeated_layers
from artel.models.lora.adapters import is_adapted

_SIDE_MULTIPLE = 16  # float8 products on a GPU need matrices with sides divisible by it


def use_float8(model: PreTrainedModel, *, emulate: bool = False) -> str:
    """Make the linear layers of the repeated layers multiply in float8. Returns what was done, in words.

    Embeddings and the output head compute in bf16, as do matrices with a side that is not a multiple of 16 and GPT-2's
    Conv1D, whose matrix is transposed. Parameters stay the same objects under the same names: they are trained, saved
    and loaded in their own dtype. Call it before layers are compiled. `emulate` rounds to float8 and multiplies in the
    weights' dtype: for tests on a CPU.

    Raises InputError for a model with adapters, whose matrices are too narrow to gain by it.
    """
    if is_adapted(model):
        what = "fp8 is for whole matrices, and model.lora trains narrow ones"
        raise InputError.at("train.precision", what, "write train.precision: bf16")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Without padding, the gradient's product fails for a micro-batch whose number of tokens is not a multiple of 16.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    layers = repeated_layers(model)
    matrices = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear | Conv1D)]
    chosen = {module for module in matrices if _fits(module)}
    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=lambda module, _: module in chosen, config=config)
    return f"float8: {len(chosen)} of {len(matrices)} linear layers" + _rest(matrices, len(chosen))


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and all(side % _SIDE_MULTIPLE == 0 for side in module.weight.shape)


def _rest(matrices: list[nn.Module], chosen: int) -> str:
    if chosen == len(matrices):
        return ""
    if any(isinstance(module, Conv1D) for module in matrices):
        return "; Conv1D, GPT-2's kind, computes in bf16"
    return f"; matrices with a side that {_SIDE_MULTIPLE} does not divide compute in bf16"
