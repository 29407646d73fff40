"""Adapters under DeepSpeed and fsdp: the numbers of one process, and no process reads the whole base."""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from artel.config import ModelConfig, RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.models.loading.build import build_model
from artel.models.loading.materialize import materialize
from artel.models.loading.request import ModelRequest
from artel.parallel.deepspeed.config import read_deepspeed
from artel.tokens import load_tokenizer, train_tokenizer
from support.adapter_runs import adapter_run, train_in
from support.deepspeed_cases import GPU, SMALL, bare_objective, cpu_processes, pytorch_optimizer, resolve, train_section
from support.ranks import run_ranks
from support.runs import DEEPSPEED, largest_difference, losses, succeed
from support.saved_models import CAUSAL
from support.tensor_reads import noted_reads

pytestmark = pytest.mark.usefixtures("deepspeed_beside")

OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
ZERO = {
    "2": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3, **SMALL},
    "3-offloaded": {"stage": 3, **SMALL, **OFFLOADED},
}
# Widths that two processes do not divide: pieces are filled up.
SIZES = {"hidden_size": 66, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
         "intermediate_size": 65, "vocab_size": 301, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A pretrained folder in bf16, as models are published."""
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    tokenizer = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.1)).bfloat16().save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def adapted(
    path: Path,
    base: Path,
    rows: int,
    parallel: dict | None = None,
    lora: dict | None = None,
    *,
    steps: int = 3,
    precision: str = "fp32",
) -> Path:
    """A run file of adapters over `base`; `parallel` is its section, or a block of ZeRO."""
    train = {"micro_batch": rows, "steps": steps, "clip": 0.5, "precision": precision}
    model = {"from": str(base), "lora": {"rank": 4} | (lora or {})}
    return adapter_run(path, model, train, parallel)


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory) -> Path:
    """A folder of runs: by one process, by two, and begun by one of these and ended by the other."""
    folder = tmp_path_factory.mktemp("runs")

    def write(name: str, rows: int, *how, **more) -> Path:
        return adapted(folder / f"{name}.yaml", base, rows, *how, **more)

    head, half, dora = {"save": ["lm_head"]}, {"base": "bf16"}, {"dora": True}
    one = [
        write("one", 8, None, head),
        write("one-bf16", 8, None, half),
        write("one-dora", 8, None, dora),
        write("spread", 8, None, head, steps=2),
    ]
    train_in(1, one)
    two = [
        write("zero-2", 4, ZERO["2"], head),
        write("zero-3", 4, ZERO["3"], head),
        write("zero-3-bf16", 4, ZERO["3-offloaded"], half),
        write("zero-3-in-bf16", 4, ZERO["3"], head, precision="bf16"),
        write("zero-3-dora", 4, ZERO["3"], dora),
        write("fsdp", 4, {"data": "fsdp"}, head),
        write("fsdp-bf16", 4, {"data": "fsdp"}, half),
        write("gathered", 4, ZERO["3"], head, steps=2),
        write("spread", 4, ZERO["3-offloaded"], head),
    ]
    train_in(2, two)
    train_in(1, [write("gathered", 8, None, head)])
    return folder


@pytest.mark.processes
def test_adapters_learn_as_in_one_process(runs):
    for one, names in {
        "one": ["zero-2", "zero-3", "fsdp", "gathered", "spread"],
        "one-bf16": ["zero-3-bf16", "fsdp-bf16"],
        "one-dora": ["zero-3-dora"],
    }.items():
        for name in names:
            assert largest_difference(losses(runs / one), losses(runs / name)) < 1e-5, name
    assert largest_difference(losses(runs / "one"), losses(runs / "zero-3-in-bf16")) < 2e-2, "as bf16 rounds"


@pytest.mark.processes
def test_their_folders_and_checkpoints_are_those_of_one_process(runs, base, tmp_path):
    expected = load_file(runs / "one/model/adapter_model.safetensors")
    for name in ("zero-2", "zero-3", "fsdp", "gathered", "spread"):
        saved = load_file(runs / name / "model/adapter_model.safetensors")
        assert saved.keys() == expected.keys()
        assert all(torch.allclose(saved[key], expected[key], atol=1e-5) for key in expected), name
    dora = [load_file(runs / name / "model/adapter_model.safetensors") for name in ("one-dora", "zero-3-dora")]
    assert dora[0].keys() == dora[1].keys()
    checkpoint = load_file(runs / "zero-3/checkpoints/latest/model.safetensors")
    assert all(".lora_" in key or "modules_to_save" in key for key in checkpoint)
    succeed("export", runs / "zero-3/model", tmp_path / "merged", "--merge")
    before, merged = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    saved = load_file(runs / "zero-3/model/adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    change = saved[f"base_model.model.{name}.lora_B.weight"] @ saved[f"base_model.model.{name}.lora_A.weight"]
    assert change.any()
    assert torch.equal(merged[f"{name}.weight"], (before[f"{name}.weight"].float() + change * 32 / 4).bfloat16())


def on_two(rank: int, world: int) -> dict[str, float]:
    """What a process reads of a base in bf16, and which part of its bytes it holds."""
    sys.path.append(str(DEEPSPEED))
    from artel.parallel.deepspeed.engine import DeepSpeedStrategy

    read = noted_reads()
    folder, train = Path(os.environ["BASE"]), train_section(world)
    config = ModelConfig.model_validate({"from": str(folder), "lora": {"rank": 4}})
    request = ModelRequest(config, CAUSAL, block=16, base_dtype=torch.bfloat16)
    built = build_model(request, load_tokenizer(str(folder)), on_meta=True)
    with tempfile.TemporaryDirectory() as place:
        resolved = resolve({"zero_optimization": ZERO["3"]}, place, world=world, **train)
    bring = partial(materialize, weights=built.weights)
    layout = DeepSpeedStrategy(built.model, bare_objective(), cpu_processes(rank, world), resolved, bring)
    layout.own_optimizer(pytorch_optimizer(built.model, resolved.config.train), 2, 2)
    frozen = [parameter for parameter in built.model.parameters() if not parameter.requires_grad]
    assert sum(parameter.numel() for parameter in frozen) == 0  # nothing is gathered
    whole = sum(parameter.ds_numel for parameter in frozen)
    return {"read": len(read), "held": sum(parameter.ds_tensor.nbytes for parameter in frozen) / whole}


@pytest.mark.processes
def test_no_process_holds_the_whole_base(base):
    first, second = run_ranks(2, __file__, "on_two", BASE=str(base))
    assert (first["read"], second["read"]) == (len(load_file(base / "model.safetensors")), 0)
    for rank in (first, second):
        assert 1 <= rank["held"] < 1.01, "of two bytes a weight, one"


def test_a_base_in_another_dtype_than_deepspeed_s_is_refused(tmp_path):
    file = tmp_path / "ds.json"
    for precision, base in (("bf16", "fp32"), ("fp16", "bf16"), ("bf16", "bf16")):
        file.write_text(json.dumps({"zero_optimization": {"stage": 3}, precision: {"enabled": True}}))
        run = RunConfig.model_validate({"data": {"sources": [{"format": "dummy"}]},
                                        "model": {"from": "base", "lora": {"base": base}}})  # fmt: skip
        if base == precision:
            assert read_deepspeed(str(file), run, 2, GPU).precision == precision
        else:
            with pytest.raises(InputError, match=f"model.lora.base: is {base}, but DeepSpeed"):
                read_deepspeed(str(file), run, 2, GPU)
