"""Weights that are pages of the model's file: a plan counts once for a host what loading leaves mapped."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from artel.config import TokenizerTraining, run_from
from artel.models.loading.build import base_dtype, build_model
from artel.objectives import objective_of
from artel.planning.plan.mapped_weights import mapped_bytes
from artel.planning.plan.models import ModelOutline
from artel.tokens import train_tokenizer
from support.runs import TINY

MAPS = Path("/proc/self/maps")
pytestmark = pytest.mark.skipif(not MAPS.exists(), reason="Linux tells what is mapped")
LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 136, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))


def saved(folder, tokenizer, dtype):
    LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocabulary, **LLAMA)).to(dtype).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def mappings(folder):
    """The addresses at which the model's file is mapped."""
    lines = [line for line in MAPS.read_text().splitlines() if line.endswith(str(folder / "model.safetensors"))]
    spans = [re.match(r"(\w+)-(\w+)", line).groups() for line in lines]
    return [range(int(first, 16), int(end, 16)) for first, end in spans]


@pytest.mark.parametrize(
    ("dtype", "model"),
    [
        (torch.float32, {"lora": {"rank": 4}}),
        (torch.float32, {"freeze": ["model.layers.0.*"]}),
        (torch.float32, {"lora": {"rank": 4}, "quantize": "int8"}),
        (torch.float32, {"lora": {"rank": 4}, "quantize": "nf4"}),
        (torch.float32, {"lora": {"rank": 4, "base": "bf16"}}),
        (torch.bfloat16, {"lora": {"rank": 4}}),
        (torch.bfloat16, {"lora": {"rank": 4, "base": "fp32"}}),
        (torch.bfloat16, {"lora": {"rank": 4}, "quantize": "nf4"}),
    ],
    ids=["adapters", "frozen", "int8", "nf4", "half base", "saved in half", "widened", "nf4 of half"],
)
def test_a_plan_knows_which_weights_are_pages_of_the_file(dtype, model, tmp_path, tokenizer):
    if "quantize" in model:
        pytest.importorskip("bitsandbytes", reason="needs the extra `quantize`")
    folder = saved(tmp_path, tokenizer, dtype)
    run = run_from(TINY | {"model": {"from": str(folder)} | model, "tokenizer": {}}, {}, {})
    objective = objective_of(run, tokenizer)
    request = objective.model_request(run.model, run.data.block, run.seed)
    request = replace(request, base_dtype=base_dtype(run, "bf16"))
    outline = ModelOutline.of(run, objective, tokenizer)
    frozen, read_from = mapped_bytes(outline, "bf16")
    built = build_model(request, tokenizer).model
    spans = mappings(folder)
    weights = [parameter for parameter in built.parameters() if not parameter.requires_grad]
    assert frozen == sum(each.nbytes for each in weights if any(each.data_ptr() in span for span in spans))
    if frozen and "freeze" not in model:
        assert sum(map(len, spans)) == pytest.approx(frozen + read_from, abs=16384)  # and the file's header
    else:
        assert read_from == 0
