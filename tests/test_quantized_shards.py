"""Frozen weights of 8 and 4 bits that processes share out: the numbers of one process, and a part of the bytes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from artel.config import ModelConfig, load_run
from artel.errors import InputError
from artel.models.loading.build import build_model
from artel.models.loading.request import ModelRequest
from artel.models.quantization import make_shardable
from artel.tokens import load_tokenizer
from artel.training.model_setup import check_layout
from support import WORKERS
from support.adapter_runs import adapter_run, train_in
from support.chat_models import saved
from support.deepspeed_cases import SMALL
from support.ranks import run_ranks
from support.runs import largest_difference, losses
from support.saved_models import CAUSAL

pytest.importorskip("bitsandbytes", reason="needs the extra `quantize`")

# An odd number of rows: one of two processes holds one more.
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 129, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
LAYOUTS = {
    "fsdp": {"data": "fsdp"},
    "offloaded": {"data": "fsdp", "offload": "cpu"},
    "zero2": {"data": "zero2"},
    "pipeline": {"pipeline": 2},
    "zero-3": {"stage": 3, **SMALL},
}
KINDS = ("int8", "nf4")


def save_base(folder: Path, tokenizer, **sizes) -> Path:
    torch.manual_seed(0)
    return saved(folder, LlamaForCausalLM(LlamaConfig(**SIZES | sizes, initializer_range=0.1)), tokenizer)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer) -> Path:
    return save_base(tmp_path_factory.mktemp("pretrained") / "base", tokenizer)


@pytest.mark.parametrize(("kind", "dtype"), [("int8", torch.int8), ("nf4", torch.uint8)])
def test_a_shardable_layer_computes_what_bitsandbytes_s_does(base, kind, dtype):
    config = ModelConfig.model_validate({"from": str(base), "lora": {"rank": 4}, "quantize": kind})
    tokenizer = load_tokenizer(str(base))
    ids = torch.randint(3, 260, (2, 16), generator=torch.Generator().manual_seed(0))
    results = []
    for shardable in (False, True):
        model = build_model(ModelRequest(config, CAUSAL, block=32), tokenizer).model.train()
        if shardable:
            make_shardable(model)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        with torch.no_grad():
            results.append((loss, gradients, model.eval()(input_ids=ids).logits))
    packed = [parameter for parameter in model.parameters() if parameter.dtype == dtype]
    assert len(packed) == 14
    assert all(type(parameter) is torch.nn.Parameter for parameter in packed)
    (loss, gradients, logits), (own_loss, own_gradients, own_logits) = results
    assert torch.equal(own_loss, loss)
    assert torch.equal(own_logits, logits)
    assert all(torch.equal(own_gradients[name], gradient) for name, gradient in gradients.items())


def quantized(
    path: Path, base: Path, kind: str, rows: int, parallel: dict | None = None, steps: int = 3, dora: bool = False
) -> Path:
    model = {"from": str(base), "lora": {"rank": 4, "dora": dora}, "quantize": kind}
    return adapter_run(path, model, {"micro_batch": rows, "steps": steps}, parallel)


@pytest.mark.processes
@pytest.mark.usefixtures("deepspeed_beside")
def test_they_learn_and_resume_as_in_one_process(base, tmp_path):
    def write(name: str, *how, **more) -> Path:
        return quantized(tmp_path / f"{name}.yaml", base, *how, **more)

    train_in(1, [*(write(f"one-{kind}", kind, 8) for kind in KINDS), write("one-dora", "nf4", 8, dora=True)])
    files = [write(f"{name}-{kind}", kind, 4, parallel) for kind in KINDS for name, parallel in LAYOUTS.items()]
    begun = [write(f"gathered-{kind}", kind, 4, {"data": "fsdp"}, steps=2) for kind in KINDS]
    train_in(2, [*files, *begun, write("dora", "nf4", 4, {"data": "fsdp"}, dora=True)])
    train_in(1, [write(f"gathered-{kind}", kind, 8) for kind in KINDS])
    assert largest_difference(losses(tmp_path / "one-dora"), losses(tmp_path / "dora")) < 1e-5
    for kind in KINDS:
        expected = load_file(tmp_path / f"one-{kind}/model/adapter_model.safetensors")
        for name in (*LAYOUTS, "gathered"):
            run = tmp_path / f"{name}-{kind}"
            assert largest_difference(losses(tmp_path / f"one-{kind}"), losses(run)) < 1e-5, run.name
            saved = load_file(run / "model/adapter_model.safetensors")
            assert all(torch.allclose(saved[key], expected[key], atol=1e-5) for key in expected), run.name


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "bytes_a_weight"), [("int8", 1.0), ("nf4", 0.5)])
def test_each_process_holds_its_part(kind, bytes_a_weight, tmp_path, tokenizer):
    base = save_base(tmp_path / "base", tokenizer, hidden_size=256, num_hidden_layers=4, intermediate_size=1024)
    run = quantized(tmp_path / "run.yaml", base, kind, 4, {"data": "fsdp"})
    body, ends = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 1024), 2 * 300 * 256
    adapters = 4 * 4 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 1024))
    for held in run_ranks(2, WORKERS / "layout_cases.py", "held_at_the_step", CASES=str(run)):
        # Half of the packed weights and of the ends in float32; of adapters also the gradient and Adam's averages.
        expected = (bytes_a_weight * body + 4 * ends + 16 * adapters) / 2
        assert held["own"] == pytest.approx(expected, rel=0.01)
        assert held["other"] < bytes_a_weight * body / 2, "the scales, and the ends as they are gathered"


@pytest.mark.parametrize("kind", KINDS)
def test_split_matrices_are_refused_before_text_is_read(kind, base, tmp_path):
    file = str(quantized(tmp_path / "run.yaml", base, kind, 4))
    check_layout(load_run(file, {"parallel.data": "fsdp"}), CAUSAL, 2, 2)
    with pytest.raises(InputError, match=r"parallel\.tensor: quantized matrices cannot be split"):
        check_layout(load_run(file, {"parallel.tensor": 2}), CAUSAL, 2, 2)


def test_dora_over_int8_shards_is_refused_before_text_is_read(base, tmp_path):
    file = str(quantized(tmp_path / "run.yaml", base, "int8", 4))
    check_layout(load_run(file, {"model.lora.dora": True}), CAUSAL, 2, 2)
    with pytest.raises(InputError, match=r"model\.lora\.dora: true with sharded int8 weights"):
        check_layout(load_run(file, {"parallel.data": "fsdp", "model.lora.dora": True}), CAUSAL, 2, 2)
