"""Definitions of training speed: FLOPs per token, tokens per second, MFU, and the peak of each device.

**FLOPs per token**: the floating-point operations (a multiply-add is two) of the matmuls and convolutions for training
on one input token. They are 3 times those of the forward pass, since the backward pass takes twice as many (Kaplan et
al. 2020, section 2.1). Attention counts the pairs of tokens that may see each other, so a causal model counts half of
an encoder. Embedding lookups count nothing, and by convention neither do norms, activations, softmax and the optimizer.
Activation checkpointing does not count: that work belongs to the implementation, not the model (Chowdhery et al. 2022,
"PaLM", appendix B). For a dense transformer this is PaLM's 6N + 12·L·H·Q·T, but with half of the second term under a
causal mask, which PaLM counts in full. N is the number of weights that multiply a token: all except lookup tables. The
output head counts, even if it is tied to the input embeddings.

**tokens/s**: input tokens, without padding, over elapsed seconds of wall-clock time.

**MFU**, model FLOPs utilization: FLOPs per token x tokens/s over the peak of the devices, in the precision that layers
compute in (PaLM, appendix B).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from artel.messages import logger
from artel.models.loading.heads import model_class

_NAME = "artel_counted"
_EAGER = "eager"
# (attention, with a mask), tried in this order: the function below; the model's own attention, if it takes no other.
# With a mask of ones, since some models otherwise read the values of their input, which meta tensors lack.
_ATTEMPTS = ((_NAME, False), (_NAME, True), (_EAGER, False), (_EAGER, True))


def estimate_flops_per_token(config: PreTrainedConfig, auto_class: str, length: int) -> float | None:
    """Return the training FLOPs per token in rows of `length`; None if the model does not run on the meta device.

    `auto_class`: the transformers class with its head (`AutoModelForCausalLM`); the head counts at every token. The
    forward pass runs on the meta device, and PyTorch counts. A mixture counts the experts that a token goes to. An
    architecture with custom attention (BLOOM, MPT, GPT-J) counts the full square, which it computes. All weights count
    as trained. An encoder-decoder reads `length` tokens and predicts as many.

    An architecture that takes other attention functions, but fails with the counted one, is unknown: its own attention
    would count the full square, and the MFU would have another definition. The reason is logged.
    """
    reason: Exception | None = None
    for attention, masked in _ATTEMPTS:
        try:
            model = _build_on_meta(config, auto_class, attention)
            if attention == _EAGER and model._supports_attention_backend:
                break
            tokens = 2 * length if model.config.is_encoder_decoder else length
            return 3 * _forward_flops(model, length, masked) / tokens
        except Exception as error:  # an architecture may raise anything
            reason = reason or error
    logger.info("%s: FLOPs per token are unknown, so there is no MFU (%s)", config.model_type, reason)
    return None


def token_rate(tokens: int, seconds: float) -> float | None:
    """Return input tokens, without padding, per second; None if no time has passed."""
    return tokens / seconds if seconds > 0 else None


def utilization(flops: float | None, tokens: float | None, peak: float | None, devices: int = 1) -> float | None:
    """Return the MFU, 0 to 1: FLOPs per token x tokens per second over the peak of `devices` with `peak` FLOP/s each.

    None (unknown) if any of them is None.
    """
    if flops is None or tokens is None or peak is None:
        return None
    return flops * tokens / (peak * devices)


def device_name(device: torch.device) -> str:
    """Return the name that a GPU reports, or the type of any other device (`cpu`)."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops(name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device by name, in `fp32`, `tf32`, `bf16`, `fp16` or `fp8`; None if unknown.

    Dense, accumulated in fp32, from the vendors' data sheets (half of a number given only with sparsity): NVIDIA's data
    sheets of H100, H200, B200 (HGX), GH200, A100, A40, A30, A10, L40S, L40, L4, T4 and V100; the white papers "GA102"
    (RTX 3090, A6000), "Ada" (RTX 4090, 6000 Ada) and "RTX Blackwell" (RTX 5090); AMD's data sheet of the MI300X. Names
    must match exactly, so a laptop's RTX 4090, a slice of an H100 (MIG) and a CPU are unknown.
    """
    teraflops = data_sheet(name).get(precision)
    return None if teraflops is None else teraflops * 1e12


def data_sheet(name: str) -> dict[str, float]:
    """Return a device's peak TFLOP/s by precision; empty if unknown."""
    return _TERAFLOPS.get(name.removeprefix("NVIDIA "), {})


def _build_on_meta(config: PreTrainedConfig, auto_class: str, attention: str) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config.use_cache = False
    options: dict[str, Any] = {"attn_implementation": attention}
    # Multiplies each token with its number of experts. The meta device does not know which ones.
    options["experts_implementation"] = "batched_mm"
    with torch.device("meta"):
        model = model_class(config, auto_class, {})._from_config(config, **options)
    return model.eval()


def _forward_flops(model: PreTrainedModel, length: int, masked: bool) -> int:
    inputs = {"input_ids": torch.zeros(1, length, dtype=torch.int64, device="meta")}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    if masked:
        inputs["attention_mask"] = torch.ones(1, length, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


def _counted_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention on meta tensors, for the counter: two matmuls over the number of visible pairs."""
    rows, heads, length, size = query.shape
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    pairs = _count_pairs(length, key.shape[2], causal, sliding_window)
    torch.bmm(query.new_empty(rows * heads, 1, size), query.new_empty(rows * heads, size, pairs))
    torch.bmm(query.new_empty(rows * heads, 1, pairs), query.new_empty(rows * heads, pairs, value.shape[3]))
    return query.new_empty(rows, length, heads, value.shape[3]), None


def _count_pairs(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """Return the number of visible (query, key) pairs. In a window they are less than `window` tokens apart."""
    reach = keys if window is None else min(window, keys)
    before = reach * (reach + 1) // 2 + (queries - reach) * reach if queries == keys else queries * reach
    if causal:
        return before
    return 2 * before - queries if window is not None and window < keys else queries * keys


AttentionInterface.register(_NAME, _counted_attention)

_HOPPER_SXM = {"fp32": 67.0, "tf32": 989 / 2, "bf16": 1979 / 2, "fp16": 1979 / 2, "fp8": 3958 / 2}
_HOPPER_NVL = {"fp32": 60.0, "tf32": 835 / 2, "bf16": 1671 / 2, "fp16": 1671 / 2, "fp8": 3341 / 2}
_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_V100_SXM = {"fp32": 15.7, "fp16": 125.0}
_V100_PCIE = {"fp32": 14.0, "fp16": 112.0}
_TERAFLOPS: dict[str, dict[str, float]] = {
    "B200": {"fp32": 600 / 8, "tf32": 18_000 / 16, "bf16": 4500 / 2, "fp16": 4500 / 2, "fp8": 9000 / 2},
    "GH200 480GB": _HOPPER_SXM,
    "H200": _HOPPER_SXM,
    "H200 NVL": _HOPPER_NVL,
    "H100 80GB HBM3": _HOPPER_SXM,
    "H100 NVL": _HOPPER_NVL,
    # 96 GB of HBM2e at 500 W; its peak is between those of SXM and NVL: torchtitan, llama3_h100_202412_torchtitan.md.
    "H100": _HOPPER_NVL,
    "H100 PCIe": {"fp32": 51.0, "tf32": 756 / 2, "bf16": 1513 / 2, "fp16": 1513 / 2, "fp8": 3026 / 2},
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100 80GB PCIe": _A100,
    "A40": {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7},
    "A30": {"fp32": 10.3, "tf32": 82.0, "bf16": 165.0, "fp16": 165.0},
    "A10": {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0},
    "L40S": {"fp32": 91.6, "tf32": 183.0, "bf16": 362.05, "fp16": 362.05, "fp8": 733.0},
    "L40": {"fp32": 90.5, "tf32": 90.5, "bf16": 181.05, "fp16": 181.05, "fp8": 362.0},
    "L4": {"fp32": 30.3, "tf32": 120 / 2, "bf16": 242 / 2, "fp16": 242 / 2, "fp8": 485 / 2},
    "Tesla T4": {"fp32": 8.1, "fp16": 65.0},
    "Tesla V100-SXM2-16GB": _V100_SXM,
    "Tesla V100-SXM2-32GB": _V100_SXM,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "GeForce RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0},
    "RTX A6000": {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8},
    "GeForce RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
    "RTX 6000 Ada Generation": {"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp16": 364.2, "fp8": 728.5},
    "GeForce RTX 5090": {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419.0},
    "AMD Instinct MI300X": {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
}
