"""Adapters over plain and quantized weights, frozen parameters: the same losses, small checkpoints, peft's folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM

from artel.config import ModelConfig
from artel.errors import InputError
from artel.inference import open_model
from artel.inference.export.export import export
from artel.models.loading.build import build_model, load_model
from artel.models.loading.check import check_model
from artel.models.loading.request import ModelRequest
from artel.models.loading.save import save_model
from artel.models.lora.adapter_folder import read_adapter
from support import WORKERS
from support.runs import (
    ENVIRONMENT,
    kill,
    largest_difference,
    losses,
    refused,
    start,
    succeed,
    torchrun,
    wait_for_step,
    write_run,
)
from support.waiting import LIMIT

CASES = WORKERS / "train_cases.py"
CAUSAL = "AutoModelForCausalLM"
SMALL = {"vocab_size": 270, "n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "bos_token_id": 0,
         "eos_token_id": 0, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # fmt: skip


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory) -> Path:
    """A pretrained folder: a GPT-2 of 2 layers (its linear layers lie transposed, its head is tied)."""
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**SMALL)).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


FROZEN = ["*wte*", "*wpe*", "transformer.h.0.*"]


def write_tuning(path: Path, base: Path, train: dict | None = None, **changes) -> Path:
    """A run file that goes on from `base`: adapters of rank 4, unless `model` says otherwise."""
    model = {"config": None, "from": str(base), "lora": {"rank": 4}} | changes.pop("model", {})
    # One thread: bitsandbytes' kernels wait for all of theirs at each of these tiny products.
    settings = {"learning_rate": 3e-3, "schedule": "constant", "threads": 1} | (train or {})
    return write_run(path, model=model, train=settings, tokenizer={"train": None}, **changes)


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory) -> Path:
    """Eight trained runs in three launches, by name; a folder."""
    folder = tmp_path_factory.mktemp("runs")

    def write(name: str, micro_batch: int = 64, data: str = "auto", **model) -> Path:
        train, parallel = {"micro_batch": micro_batch}, {"data": data}
        return write_tuning(folder / f"{name}.yaml", base, train, model=model, parallel=parallel)

    frozen = {"lora": None, "freeze": FROZEN}
    alone = [
        write("lora-accumulated", 16),
        write("int8", quantize="int8"),
        write("nf4", quantize="nf4"),
        write("frozen", **frozen),
    ]
    done = subprocess.run(
        [sys.executable, CASES, *alone], env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared = write("frozen-2", 32, data="fsdp", **frozen)
    done = torchrun(2, CASES, write("lora-2", 32), write("nf4-2", 8, quantize="nf4"), shared)
    assert done.returncode == 0, done.stderr[-3000:]
    done = succeed("train", write("lora"))
    assert "adapters of rank 4 on 8 matrices (linear layers): 8,192 parameters are trained" in done.stderr
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("name", ["lora", "int8", "nf4", "frozen"])
def test_each_way_lowers_the_loss(runs, name):
    by_step = losses(runs / name)
    assert by_step[6][0] < by_step[1][0] - 0.05


@pytest.mark.processes
def test_adapters_learn_the_same_however_the_batch_is_cut(runs):
    """1 process, 4 micro-batches, 2 processes; over 4-bit weights too: 1e-5 relative."""
    reference = losses(runs / "lora")
    assert largest_difference(reference, losses(runs / "lora-accumulated")) < 1e-5
    assert largest_difference(reference, losses(runs / "lora-2")) < 1e-5
    assert largest_difference(losses(runs / "nf4"), losses(runs / "nf4-2")) < 1e-5


@pytest.mark.processes
def test_a_checkpoint_holds_what_is_trained_and_no_more(runs, base):
    whole = (base / "model.safetensors").stat().st_size
    for name in ("lora", "nf4"):
        weights = load_file(runs / name / "checkpoints" / "latest" / "model.safetensors")
        assert all(".lora_" in tensor for tensor in weights)
        assert sum(tensor.numel() for tensor in weights.values()) == 8192
        assert (runs / name / "model" / "adapter_model.safetensors").stat().st_size < whole / 8
    kept = load_file(runs / "frozen" / "checkpoints" / "latest" / "model.safetensors")
    assert not any("wte" in name or ".h.0." in name for name in kept)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, runs / "frozen" / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(kept)
    assert "transformer.h.1.attn.c_attn.weight" in changed


@pytest.mark.processes
def test_the_final_model_has_its_frozen_weights_however_it_was_sharded(runs):
    alone, sharded = (load_file(runs / name / "model/model.safetensors") for name in ("frozen", "frozen-2"))
    assert sharded.keys() == alone.keys()
    assert torch.equal(sharded["transformer.wte.weight"], alone["transformer.wte.weight"])
    assert all(torch.allclose(sharded[name], alone[name], atol=1e-5) for name in alone)


@pytest.mark.processes
def test_the_adapter_opens_with_peft_and_with_artel(runs, base):
    ids = torch.arange(20)[None]
    folder = runs / "lora" / "model"
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base).eval()
        before = plain(ids).logits
        theirs = PeftModel.from_pretrained(plain, str(folder)).eval()(ids).logits
        ours = open_model(str(runs / "lora")).model.eval()(ids).logits
        bare = open_model(str(folder)).model.eval()(ids).logits
    assert torch.equal(theirs, ours)
    assert torch.equal(bare, ours)
    assert (ours - before).abs().max() > 0.1
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert sorted(config["target_modules"]) == ["c_attn", "c_fc", "c_proj"]


@pytest.mark.processes
def test_an_unfinished_run_opens_from_its_checkpoint(runs, base, tmp_path):
    """The newest checkpoint holds adapters only; with the base they are the model that RUN/model is."""
    ids = torch.arange(20)[None]
    run = runs / "lora"
    with torch.no_grad():
        finished = open_model(str(run)).model.eval()(ids).logits
        (run / "model").rename(tmp_path / "model")
        try:
            unfinished = open_model(str(run)).model.eval()(ids).logits
        finally:
            (tmp_path / "model").rename(run / "model")
    assert torch.equal(finished, unfinished)


@pytest.mark.long
def test_killed_and_resumed_over_quantized_weights_ends_bit_equal(base, tmp_path):
    changes = {"train": {"steps": 40, "batch": 16}, "checkpoint": {"every": 4},
               "model": {"lora": {"rank": 4, "dropout": 0.1}, "quantize": "nf4"}}  # fmt: skip
    whole, broken = (write_tuning(tmp_path / f"{name}.yaml", base, **changes) for name in ("whole", "broken"))
    succeed("train", whole)
    process = start("train", broken)
    wait_for_step(process, broken.with_suffix(""), 18)
    kill(process)
    assert "resuming from step" in succeed("train", broken).stderr
    expected, actual = (
        load_file(run.with_suffix("") / "model" / "adapter_model.safetensors") for run in (whole, broken)
    )
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert losses(whole.with_suffix("")) == losses(broken.with_suffix(""))
    opened = open_model(str(broken.with_suffix(""))).model
    assert {parameter.dtype for parameter in opened.parameters()} == {torch.uint8, torch.float32}


def model_config_of(base: Path, **model) -> ModelConfig:
    return ModelConfig.model_validate({"from": str(base), **model})


def test_the_first_weights_depend_on_the_seed_alone(base, tokenizer):
    def adapters(seed: int, drawn_before: int) -> dict[str, torch.Tensor]:
        torch.rand(drawn_before)
        model = build_model(
            ModelRequest(model_config_of(base, lora={"rank": 4}), CAUSAL, block=8, seed=seed), tokenizer
        ).model
        return {name: value for name, value in model.named_parameters() if value.requires_grad}

    one, same, other = adapters(1, 0), adapters(1, 5), adapters(2, 0)
    assert all(".lora_" in name for name in one)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_what_the_base_has_not_is_trained_in_full_and_kept(tokenizer, tmp_path, quantize):
    """A masked model becomes one for questions, with fewer ids than the tokenizer: new heads and rows must be learned,
    and come back with the adapter."""
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                           intermediate_size=64, max_position_embeddings=66, type_vocab_size=1)  # fmt: skip
    RobertaForMaskedLM(config).save_pretrained(tmp_path / "base")
    heads = {"answer_class": 5}
    asked = {"auto_class": "AutoModelForQuestionAnswering", "heads": heads}
    model_config = model_config_of(tmp_path / "base", lora={"rank": 2}, quantize=quantize)
    check_model(model_config, asked["auto_class"])
    built = build_model(ModelRequest(model_config, block=8, seed=1, **asked), tokenizer)
    trained = {name for name, value in built.model.named_parameters() if value.requires_grad and ".lora_" not in name}
    assert {name.split(".modules_to_save")[0] for name in trained} == {
        "roberta.embeddings.word_embeddings", "qa_outputs", "answer_class"
    }  # fmt: skip
    with torch.no_grad():
        for parameter in built.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    save_model(built.model, tokenizer, tmp_path / "adapter")
    saved = model_config_of(tmp_path / "adapter").model_copy(update={"quantize": quantize})
    again = load_model(ModelRequest(saved, **asked), tokenizer)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected, actual = (model.eval()(ids).start_logits for model in (built.model, again))
    assert torch.equal(expected, actual)


@pytest.mark.parametrize(
    ("model", "where", "what"),
    [
        ({"lora": {"target": "q_proj"}}, "model.lora.target", "c_attn, c_proj, c_fc"),
        ({"lora": {"save": ["embed_tokens"]}}, "model.lora.save", "transformer.wte"),
        ({"freeze": ["*embed_tokens*"]}, "model.freeze", "transformer.h.*.attn.c_attn.weight"),
        ({"freeze": ["*"]}, "model.freeze", "no parameter is left to train"),
        ({"lora": {"target": ["score"]}}, "model.lora.target", "no linear layer is named score"),
        ({"lora": {"target": ["lm_head"]}}, "model.lora.target",
         "lm_head is the output layer, which cannot have an adapter\n    write model.lora.save: [lm_head]"),
    ],
)  # fmt: skip
def test_names_that_the_model_has_not_are_told_with_those_it_has(base, model, where, what):
    with pytest.raises(InputError) as raised:
        check_model(model_config_of(base, **model), CAUSAL)
    assert [problem.where for problem in raised.value.problems] == [where]
    assert what in str(raised.value)
    check_model(model_config_of(base, lora={"rank": 2, "save": ["lm_head"]}), CAUSAL)


@pytest.mark.slow
def test_wrong_adapters_are_refused_before_any_text_is_read(base, tmp_path):
    run = write_tuning(tmp_path / "run.yaml", base, model={"lora": {"target": ["c_attn", "q_proj"]}})
    assert "model.lora.target: no linear layer is named q_proj" in refused("train", run).stderr
    assert not (tmp_path / "stores").exists()
    both = write_tuning(tmp_path / "both.yaml", base, model={"freeze": ["*wte*"]})
    assert "remove freeze" in refused("train", both).stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("package", "model", "remedy"),
    [
        ("peft", {}, "model.lora: needs the package peft"),
        ("bitsandbytes", {"quantize": "int8"}, "model.quantize: needs the package bitsandbytes"),
    ],
)
def test_a_missing_extra_is_told_with_its_remedy(base, tmp_path, package, model, remedy):
    run = write_tuning(tmp_path / "run.yaml", base, model=model)
    program = f"import sys; sys.modules[{package!r}] = None; from artel.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", run], env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 2, done.stderr
    assert remedy in done.stderr
    assert f"pip install 'artel-lm[{'lora' if package == 'peft' else 'quantize'}]'" in done.stderr
    assert not (tmp_path / "stores").exists()


@pytest.mark.parametrize("written", ["{tmp}/old/models/base", "models/base", "../models/base", "D:\\old\\models\\base"])
def test_an_adapter_finds_its_base_where_the_project_lies_now(base, tokenizer, tmp_path, caplog, written):
    project, name = tmp_path / "new", str(tmp_path / "new" / "runs" / "a" / "model")
    shutil.copytree(base, project / "models" / "base")
    built = build_model(ModelRequest(model_config_of(base, lora={"rank": 2}), CAUSAL, block=8, seed=1), tokenizer)
    save_model(built.model, tokenizer, Path(name))
    file = Path(name, "adapter_config.json")
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"base_model_name_or_path": written.format(tmp=tmp_path)}))
    assert read_adapter(name).base == str(project / "models" / "base")
    assert "was not found; using" in caplog.text
    export(name, tmp_path / "copy")
    copied = json.loads((tmp_path / "copy" / "adapter_config.json").read_text())
    assert copied["base_model_name_or_path"] == str(project / "models" / "base")
    with torch.no_grad():
        ids = torch.arange(9)[None]
        assert torch.equal(open_model(name).model(ids).logits, open_model(str(tmp_path / "copy")).model(ids).logits)


def test_a_hub_id_is_not_shortened_to_a_folder_near_the_adapter(base, tokenizer, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    built = build_model(ModelRequest(model_config_of(base, lora={"rank": 2}), CAUSAL, block=8, seed=1), tokenizer)
    save_model(built.model, tokenizer, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(file.read_text().replace(str(base.resolve()), "someone/base"))
    adapter = read_adapter(str(tmp_path / "adapter"))
    assert adapter.base == "someone/base"
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"adapter_model.safetensors: cannot be read"):
        assert not adapter.full_modules


@pytest.mark.long
def test_an_adapter_is_no_model_to_start_from_and_needs_its_base(base, tokenizer, tmp_path):
    moved = tmp_path / "base"
    moved.symlink_to(base)
    built = build_model(ModelRequest(model_config_of(base, lora={"rank": 2}), CAUSAL, block=8, seed=1), tokenizer)
    folder = tmp_path / "adapter"
    save_model(built.model, tokenizer, folder)
    with pytest.raises(InputError, match=f"is an adapter.*\n.*artel export {folder} FOLDER --merge"):
        check_model(model_config_of(folder), CAUSAL)
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace(str(base.resolve()), str(tmp_path / "gone")))
    with pytest.raises(InputError, match=r"gone was not found, and there is no .*/gone with a model .*\n.*write"):
        open_model(str(folder))
    (folder / "adapter_model.safetensors").rename(folder / "elsewhere")
    file.write_text(file.read_text().replace(str(tmp_path / "gone"), str(moved)))
    with pytest.raises(InputError, match=r"there is no adapter_model\.safetensors beside it"):
        open_model(str(folder))
