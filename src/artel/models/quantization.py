"""Pretrained weights held in 8 or 4 bits under adapters (QLoRA, Dettmers et al. 2023), by bitsandbytes.

int8 is LLM.int8(), nf4 is 4-bit NormalFloat with double quantization: 0.52 bytes a weight. Both run on a GPU and, far
more slowly, on a CPU. The layers of the body are quantized; embeddings, norms and output heads stay float32.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from artel.errors import missing_extra
from artel.models.device import autocast_dtype


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
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    heads = [name for name, _ in skeleton.named_children() if name != skeleton.base_model_prefix]
    options: dict[str, Any] = {"llm_int8_skip_modules": [*heads, *whole]}  # so named for 4 bits too
    if quantize == "int8":
        options |= {"load_in_8bit": True}
    else:
        options |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": device}}


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
