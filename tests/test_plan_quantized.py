"""A plan of quantized weights: layers of the sizes that loaded ones have, and steps traced with bitsandbytes' code."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from artel.config import parse_run
from artel.models.quantization import (
    loading_options,
    num_weights,
    quantization_scales,
    quantize_structure,
    shrink_weights,
)
from artel.parallel import World
from artel.planning.plan.batches import plan_data
from artel.planning.plan.fake_run import Trace, trace_steps
from artel.planning.plan.live_bytes import ACTIVATIONS, WEIGHTS, bytes_by_kind
from artel.planning.plan.models import ModelOutline
from support.runs import TINY, merged

pytest.importorskip("bitsandbytes", reason="needs the extra `quantize`")
KINDS = ("int8", "nf4")
LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 136, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is saved in bf16."""
    place = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(vocab_size=400, **LLAMA)).to(torch.bfloat16).save_pretrained(place)
    return place


def structure(folder: Path) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(LlamaConfig.from_pretrained(folder), dtype=torch.float32)


def sizes(model: torch.nn.Module) -> dict[str, Any]:
    """Of each parameter, and of what scales them."""
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in model.named_parameters()}
    return found | {"scales": [(tensor.dtype, tuple(tensor.shape)) for tensor in quantization_scales(model)]}


@pytest.mark.parametrize("quantize", KINDS)
def test_layers_have_the_sizes_that_they_have_when_they_are_loaded(folder: Path, quantize: str) -> None:
    planned = structure(folder)
    options = loading_options(quantize, planned, ())
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    quantize_structure(planned, quantize)
    shrink_weights(planned, torch.device("meta"))
    assert sizes(planned) == sizes(loaded)
    weights = sum(map(num_weights, planned.parameters()))
    assert weights == sum(parameter.numel() for parameter in structure(folder).parameters())


def traced(folder: Path, quantize: str, how: Any = "none", base: str = "fp32") -> Trace:
    """Two steps of an adapter over the model."""
    plain = parse_run(merged(TINY, {"model": {"config": {"model_type": "llama", **LLAMA}}}), {}, {})
    data = plan_data(plain)
    lora = {"rank": 4} if quantize != "none" else {"rank": 4, "base": base}
    tree = {"from": str(folder), "lora": lora, "quantize": quantize}
    run = parse_run(TINY | {"model": tree, "tokenizer": {}}, {}, {})
    whole = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).to("meta")
    outline = ModelOutline(run, data.objective, copy.deepcopy(whole))
    world = World(0, 1, 0, torch.device("cpu"))
    return trace_steps(run, outline.build("bf16"), data.objective, [data.batch(4)] * 2, world, how, "bf16")


def fullest(trace: Trace) -> dict[str, int]:
    return bytes_by_kind(trace.live.events, *trace.phases[2])


@pytest.mark.long
@pytest.mark.parametrize(("quantize", "bytes_a_weight"), [("int8", 1.0), ("nf4", 0.5)])
def test_steps_over_quantized_weights_hold_as_many_bytes_less(
    folder: Path, quantize: str, bytes_a_weight: float
) -> None:
    plain, small = traced(folder, "none"), traced(folder, quantize)
    body = sum(parameter.numel() for parameter in structure(folder).model.layers.parameters() if parameter.ndim == 2)
    saved = fullest(plain)[WEIGHTS] - fullest(small)[WEIGHTS]
    assert saved == pytest.approx((4 - bytes_a_weight) * body, rel=0.06)  # less the scales
    assert plain.checkpoint_bytes == small.checkpoint_bytes  # a checkpoint has the adapter alone


@pytest.mark.slow
def test_a_base_in_bf16_is_planned_as_it_is_saved(folder: Path) -> None:
    plain, half = traced(folder, "none"), traced(folder, "none", base="auto")
    matrices = sum(parameter.numel() for parameter in structure(folder).parameters() if parameter.ndim == 2)
    assert fullest(plain)[WEIGHTS] - fullest(half)[WEIGHTS] == 2 * matrices
    # Over float32 weights each product keeps a copy of its matrix in bf16 for the backward pass.
    assert fullest(half)[ACTIVATIONS] < fullest(plain)[ACTIVATIONS]
    assert plain.checkpoint_bytes == half.checkpoint_bytes


@pytest.mark.long
def test_under_int8_recomputing_spares_little(folder: Path) -> None:
    """bitsandbytes keeps the inputs of 8-bit layers where checkpointing does not see them."""
    kept = {kind: fullest(traced(folder, kind, "full"))[ACTIVATIONS] for kind in KINDS}
    assert kept["int8"] > 1.5 * kept["nf4"]
