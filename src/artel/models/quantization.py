"""Low-bit layers: 8- or 4-bit weights under adapters (bitsandbytes), and training in float8 (torchao).

Weights under adapters (QLoRA, Dettmers et al. 2023): int8 is LLM.int8(); nf4 is 4-bit NormalFloat with double
quantization, 0.52 bytes per weight. Both run on a GPU, and much more slowly on a CPU. Only layers of the body are
quantized; embeddings, norms and output heads stay float32. Packed weights are sharded without unpacking. Every process
keeps all of the scales, which are small.

float8 is for matmuls in training, with dynamic scaling and one scale per tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from artel.errors import InputError, missing_extra
from artel.integers import ceil_div
from artel.models.compile import repeated_layers
from artel.models.device import autocast_dtype, current_device
from artel.models.lora.adapters import is_adapted

_BLOCK, _NESTED_BLOCK = 64, 256
"""Weights per scale, and scales per nested scale: the defaults of bitsandbytes."""
_FLOAT8_MULTIPLE = 16
"""float8 matmuls on a GPU need matrices whose dimensions are multiples of 16."""


def require_bitsandbytes() -> None:
    """Raise InputError if the extra `quantize` is not installed."""
    for package in ("bitsandbytes", "accelerate"):
        try:
            __import__(package)
        except ImportError:
            raise missing_extra(package, "quantize", "model.quantize") from None


def loading_options(quantize: str, reference: PreTrainedModel, in_full: Sequence[str]) -> dict[str, Any]:
    """Return the options of `from_pretrained` that quantize (`int8`, `nf4`) while it loads.

    `reference` is the model on the meta device; `in_full` names modules that are trained in full. Weights go straight
    to this process's device: quantizing 13 billion weights on a CPU first would take minutes, and memory for them.
    4-bit layers multiply in float32 until `set_compute_precision` changes that.
    """
    require_bitsandbytes()
    # It warns at every matmul that inputs are rounded to float16, which is how LLM.int8() works.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    heads = [name for name, _ in reference.named_children() if name != reference.base_model_prefix]
    options: dict[str, Any] = {"llm_int8_skip_modules": [*heads, *in_full]}  # used for 4 bits too
    if quantize == "int8":
        options |= {"load_in_8bit": True}
    else:
        options |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": current_device()}}


def quantize_structure(model: PreTrainedModel, quantize: str) -> None:
    """Replace layers of a model on the meta device by quantized ones, using the quantizer of `from_pretrained`."""
    from transformers.quantizers import AutoHfQuantizer

    config = loading_options(quantize, model, ())["quantization_config"]
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
    keep_trainable_format(model)


def shrink_weights(model: PreTrainedModel, device: torch.device) -> None:
    """Give the layers of `quantize_structure` empty tensors on `device`, as large as those of loaded weights.

    The sizes are those of bitsandbytes (functional.py, nn/modules.py). int8: a byte per weight and a float32 per row.
    nf4: half a byte per weight, a byte per block of 64, and a float32 per 256 blocks.
    """
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for layer in model.modules():
        if isinstance(layer, Linear8bitLt):
            rows, columns = layer.out_features, layer.in_features
            weight: Any = _frozen(torch.empty(rows, columns, dtype=torch.int8, device=device))
            weight.CB, weight.SCB = weight.data, torch.empty(rows, device=device)
            layer.state.reset_grads()
            layer.weight = weight
        elif isinstance(layer, Linear4bit):
            num_weights = layer.out_features * layer.in_features
            weight = _frozen(torch.empty((num_weights + 1) // 2, 1, dtype=torch.uint8, device=device))
            weight.quant_state = layer.quant_state = _make_4bit_state(layer, device)
            layer.weight = weight


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _make_4bit_state(layer: Any, device: torch.device) -> Any:
    """Return the scales of a 4-bit layer, with double quantization."""
    from bitsandbytes.functional import QuantState

    blocks = ceil_div(layer.out_features * layer.in_features, _BLOCK)
    nested = ceil_div(blocks, _NESTED_BLOCK)
    return QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8, device=device),
        shape=torch.Size([layer.out_features, layer.in_features]),
        code=torch.empty(16, device=device),
        blocksize=_BLOCK,
        quant_type="nf4",
        dtype=torch.float32,
        offset=torch.zeros(()),  # a number, which `state_dict` reads
        state2=QuantState(
            absmax=torch.empty(nested, device=device),
            code=torch.empty(256, device=device),
            blocksize=_NESTED_BLOCK,
            dtype=torch.float32,
        ),
    )


def quantization_scales(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the scales of a model's quantized weights, before the first step."""
    for layer in _linear_layers(model):
        weight = layer.weight
        if hasattr(weight, "SCB"):
            yield weight.SCB
        elif isinstance(layer, ShardableInt8):
            yield layer.scales
        state = layer.quant_state if isinstance(layer, Shardable4bit) else getattr(weight, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            state = state.state2


def _linear_layers(model: nn.Module) -> list[Any]:
    """Return the linear layers that have weights (not those of another pipeline stage), without peft's wrappers.

    A wrapper's `weight` is that of the wrapped layer.
    """
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    return [layer for layer in layers if getattr(layer, "weight", None) is not None]


class ShardableInt8(nn.Linear):
    """An 8-bit layer of bitsandbytes whose weight, int8 (rows, columns), may be sharded and gathered.

    bitsandbytes' own layer keeps a second, full copy of the weight and computes with that.
    """

    threshold: float
    """Larger inputs are multiplied in 16 bits (LLM.int8(), on a GPU)."""
    scales: torch.Tensor
    """float32 (rows,)."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        from bitsandbytes import MatmulLtState, matmul

        state = MatmulLtState(CB=self.weight, SCB=self.scales)
        state.threshold, state.has_fp16_weights, state.is_training = self.threshold, False, self.training
        bias = None if self.bias is None else self.bias.to(input.dtype)
        product: torch.Tensor = matmul(input, self.weight, bias=bias, state=state)
        return product


class Shardable4bit(nn.Linear):
    """A 4-bit layer of bitsandbytes that saves only its weight parameter for the backward pass.

    bitsandbytes' own layer saves a view, which would keep the weights gathered by DeepSpeed alive until then.
    """

    compute_dtype: torch.dtype
    quant_state: Any

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product: torch.Tensor = _Matmul4bit.apply(input.to(self.compute_dtype), self.weight, bias, self.quant_state)
        return product.to(input.dtype)


class _Matmul4bit(torch.autograd.Function):
    """bitsandbytes' MatMul4Bit, forward and backward, with a frozen bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: Any
    ) -> torch.Tensor:
        from bitsandbytes import matmul_4bit

        ctx.save_for_backward(weight)
        ctx.state = state
        product: torch.Tensor = matmul_4bit(hidden, weight, bias=bias, quant_state=state)
        return product

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        from bitsandbytes.functional import dequantize_4bit

        (weight,) = ctx.saved_tensors
        return grad_output @ dequantize_4bit(weight, ctx.state).to(grad_output.dtype), None, None, None


def make_shardable(model: nn.Module) -> None:
    """Convert a model's quantized weights, if any, to plain frozen parameters that a strategy can shard.

    Layers under DoRA do not change: peft computes the norms of their weights from bitsandbytes' attributes.
    """
    under_dora = {module.base_layer for module in model.modules() if getattr(module, "lora_variant", None)}
    for layer in _linear_layers(model):
        weight: Any = layer.weight
        if layer in under_dora:
            continue
        if hasattr(weight, "SCB"):
            state: Any = layer.state
            layer.threshold = state.threshold
            # The layer moves the scales from its weight to its state in its first step.
            layer.register_buffer("scales", weight.SCB if state.SCB is None else state.SCB, persistent=False)
            del layer.state
            layer.__class__ = ShardableInt8
        elif hasattr(weight, "quant_state"):
            layer.quant_state = weight.quant_state
            layer.__class__ = Shardable4bit
        else:
            continue
        layer.weight = _frozen(weight.data)


def keep_trainable_format(model: PreTrainedModel) -> None:
    """Keep 4-bit weights in the format that supports gradients.

    On a CPU with AVX512-BF16, bitsandbytes (0.50) converts them at the first matmul without gradients (a validation)
    to a format without gradients, and never converts them back.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def set_compute_precision(model: PreTrainedModel, precision: str) -> None:
    """Make 4-bit layers, if any, multiply in `precision`: fp32, bf16, fp16, or bf16 for fp8."""
    for layer in model.modules():
        if hasattr(layer, "compute_dtype") and hasattr(getattr(layer, "weight", None), "quant_state"):
            layer.compute_dtype = autocast_dtype(precision) or torch.float32


def num_weights(parameter: nn.Parameter) -> int:
    """Return the number of weights in a parameter. A byte of 4-bit weights holds two."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def float8_layers(model: nn.Module) -> set[nn.Linear]:
    """Return the linear layers that `use_float8` converts."""
    return {
        module
        for layer in repeated_layers(model)
        for module in layer.modules()
        if type(module) is nn.Linear and all(size % _FLOAT8_MULTIPLE == 0 for size in module.weight.shape)
    }


def use_float8(model: PreTrainedModel, *, emulate: bool = False) -> str:
    """Make the linear layers of the repeated layers multiply in float8. Return a description.

    Embeddings and the output head compute in bf16, and so do matrices with a dimension that is not a multiple
    of 16, and GPT-2's Conv1D, whose matrix is transposed. Parameters keep their identity, names and dtype: training,
    saving and loading do not change. Call it before layers are compiled. `emulate` rounds to float8 but multiplies in
    the weights' dtype, for tests on a CPU.

    Raise InputError for a model with adapters, whose matrices are too narrow to benefit.
    """
    if is_adapted(model):
        what = "fp8 needs full matrices, but model.lora trains narrow ones"
        raise InputError.at("train.precision", what, "write train.precision: bf16")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Without padding, the gradient's matmul fails for a micro-batch whose number of tokens is not a multiple of 16.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    layers = repeated_layers(model)
    matrices = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear | Conv1D)]
    converted = float8_layers(model)
    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=lambda module, _: module in converted, config=config)
    exceptions = ""
    if len(converted) < len(matrices):
        exceptions = f"; matrices with a side that {_FLOAT8_MULTIPLE} does not divide compute in bf16"
        if any(isinstance(module, Conv1D) for module in matrices):
            exceptions = "; Conv1D, GPT-2's kind, computes in bf16"
    return f"float8: {len(converted)} of {len(matrices)} linear layers{exceptions}"
