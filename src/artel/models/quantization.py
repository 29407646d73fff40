"""Pretrained weights held in 8 or 4 bits under adapters (QLoRA, Dettmers et al. 2023), by bitsandbytes.

int8 is LLM.int8(), nf4 is 4-bit NormalFloat with double quantization: 0.52 bytes a weight. Both run on a GPU and, far
more slowly, on a CPU. The layers of the body are quantized; embeddings, norms and output heads stay float32. Packed
weights are sharded as they are; their scales, which are few, stay whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from artel.errors import missing_extra
from artel.models.device import autocast_dtype, own_device

_BLOCK, _NESTED_BLOCK = 64, 256
"""Weights that share a scale, and scales that share one: the defaults of bitsandbytes."""


def require_bitsandbytes() -> None:
    """Raise InputError with the remedy where the extra `quantize` is not installed."""
    for package in ("bitsandbytes", "accelerate"):
        try:
            __import__(package)
        except ImportError:
            raise missing_extra(package, "quantize", "model.quantize") from None


def loading_options(quantize: str, skeleton: PreTrainedModel, whole: Sequence[str]) -> dict[str, Any]:
    """What `from_pretrained` must be told to quantize (`int8`, `nf4`) while it loads.

    `skeleton` is the model on the meta device; `whole` names modules that are trained in full. The weights are put
    where this process computes: quantizing 13 billion weights on a CPU first would take minutes and their memory.
    4-bit layers multiply in float32 until `compute_in` says otherwise.
    """
    require_bitsandbytes()
    # It warns at each product that inputs are rounded to float16, which is what LLM.int8() does.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    heads = [name for name, _ in skeleton.named_children() if name != skeleton.base_model_prefix]
    options: dict[str, Any] = {"llm_int8_skip_modules": [*heads, *whole]}  # so named for 4 bits too
    if quantize == "int8":
        options |= {"load_in_8bit": True}
    else:
        options |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": own_device()}}


def quantize_structure(model: PreTrainedModel, quantize: str) -> None:
    """Give a model on the meta device the quantized layers that `from_pretrained` gives it, by the same quantizer."""
    from transformers.quantizers import AutoHfQuantizer

    config = loading_options(quantize, model, ())["quantization_config"]
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
    keep_trainable(model)


def shrink_weights(model: PreTrainedModel, device: torch.device) -> None:
    """Give the layers of `quantize_structure` tensors on `device` of the sizes that they have when weights are loaded.

    The sizes are bitsandbytes's (functional.py, nn/modules.py): int8 has a byte a weight and a float32 a row; nf4 half
    a byte a weight, a byte for each block of 64 and a float32 for each 256 of these.
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
            size = layer.out_features * layer.in_features
            weight = _frozen(torch.empty((size + 1) // 2, 1, dtype=torch.uint8, device=device))
            weight.quant_state = layer.quant_state = _state_of_4_bits(layer, device)
            layer.weight = weight


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _state_of_4_bits(layer: Any, device: torch.device) -> Any:
    """How a 4-bit layer's weights are scaled, with double quantization."""
    from bitsandbytes.functional import QuantState

    blocks = -(-layer.out_features * layer.in_features // _BLOCK)
    nested = -(-blocks // _NESTED_BLOCK)
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


def scales(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors with which a model's quantized weights are scaled, before its first step."""
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
    """Those with a weight: not of another stage of a pipeline.

    Without peft's wrappers, whose `weight` is that of the layer within.
    """
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    return [layer for layer in layers if getattr(layer, "weight", None) is not None]


class ShardableInt8(nn.Linear):
    """An 8-bit layer of bitsandbytes that computes with its weight parameter, int8 (rows, columns), which may be
    sharded and gathered. bitsandbytes' own layer keeps the whole weight beside the parameter, and computes with that.
    """

    threshold: float
    """Inputs above it are multiplied in 16 bits (LLM.int8(), on a GPU)."""
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
    """A 4-bit layer of bitsandbytes that keeps nothing of its weight for the backward pass but the parameter.

    bitsandbytes' own keeps a view, by which what DeepSpeed has gathered would live on until then.
    """

    compute_dtype: torch.dtype
    quant_state: Any

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product: torch.Tensor = _Product4bit.apply(input.to(self.compute_dtype), self.weight, bias, self.quant_state)
        return product.to(input.dtype)


class _Product4bit(torch.autograd.Function):
    """What bitsandbytes' MatMul4Bit computes, forward and backward; the bias is frozen."""

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
    """Let a strategy shard a model's quantized weights, if it has any: plain frozen parameters beside their scales.

    Layers beneath DoRA stay bitsandbytes' own: peft reads the norms of their weights by its attributes.
    """
    beneath_dora = {module.base_layer for module in model.modules() if getattr(module, "lora_variant", None)}
    for layer in _linear_layers(model):
        weight: Any = layer.weight
        if layer in beneath_dora:
            continue
        if hasattr(weight, "SCB"):
            state: Any = layer.state
            layer.threshold = state.threshold
            # The layer takes the scales from its weight with its first step.
            layer.register_buffer("scales", weight.SCB if state.SCB is None else state.SCB, persistent=False)
            del layer.state
            layer.__class__ = ShardableInt8
        elif hasattr(weight, "quant_state"):
            layer.quant_state = weight.quant_state
            layer.__class__ = Shardable4bit
        else:
            continue
        layer.weight = _frozen(weight.data)


def keep_trainable(model: PreTrainedModel) -> None:
    """Keep 4-bit weights in the format whose products have gradients.

    On a CPU with AVX512-BF16, bitsandbytes (0.50) converts them at the first product without gradient (a validation)
    into a format whose products have none, and nothing converts them back.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def compute_in(model: PreTrainedModel, precision: str) -> None:
    """Make 4-bit layers, if `model` has any, multiply in `precision`: fp32, bf16, fp16, or bf16 for fp8."""
    for layer in model.modules():
        if hasattr(layer, "compute_dtype") and hasattr(getattr(layer, "weight", None), "quant_state"):
            layer.compute_dtype = autocast_dtype(precision) or torch.float32


def count(parameter: nn.Parameter) -> int:
    """The number of weights in a parameter. A byte of 4-bit weights holds two."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())
