"""Tensors of a checkpoint that transformers ignores: saved again bit for bit, or left out in words."""

import json
import logging
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BertConfig, BertForMaskedLM

from artel.config import ModelConfig, TokenizerTraining
from artel.inference import export
from artel.models.loading.build import build_model
from artel.models.loading.extra_tensors import get_extra_tensors
from artel.models.loading.materialize import materialize
from artel.models.loading.request import ModelRequest
from artel.models.loading.save import save_model
from artel.tokens import train_tokenizer
from support.runs import succeed, write_run

CAUSAL, LABELS = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SPARSE = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16, "num_experts": 4,
          "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
FAMILIES = {
    "deepseek_v3": (SIZES | SPARSE | LATENT, "model.layers.2."),
    "glm4_moe": (SIZES | SPARSE | {"head_dim": 16}, "model.layers.2."),
    "qwen3_next": (SIZES | LINEAR, "mtp.layers.0."),
}


@pytest.fixture(scope="module")
def base_of(tokenizer, tmp_path_factory):
    """Save a tiny model of a family, whose file has a layer that predicts one more token, in bf16."""

    def make(kind):
        sizes, prefix = FAMILIES[kind]
        folder = tmp_path_factory.mktemp("bases") / kind
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](vocab_size=tokenizer.vocabulary, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save(folder)
        saved = load_file(folder / "model.safetensors")
        copied = {name.replace("model.layers.1.", prefix): value for name, value in saved.items()
                  if name.startswith("model.layers.1.")}  # fmt: skip
        extra = {name: torch.randn(value.shape).bfloat16() for name, value in copied.items()}
        extra |= {f"{prefix}eh_proj.weight": torch.randn(4, 4), f"{prefix}note": torch.arange(3)}
        save_file({**saved, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
        return folder, extra

    return make


def built(folder, tokenizer, auto_class=CAUSAL, *, on_meta=False, **values):
    labels = {"num_labels": 2} if auto_class == LABELS else {}
    config = ModelConfig.model_validate({"from": str(folder), **values})
    made = build_model(
        ModelRequest(config, auto_class, block=8, seed=1, head_config=labels), tokenizer, on_meta=on_meta
    )
    if on_meta:
        materialize(made.model, made.weights, device="cpu")
    return made


def tensors_in(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_has(folder, extra):
    saved = tensors_in(folder)
    assert {name: value.dtype for name, value in extra.items()} == {name: saved[name].dtype for name in extra}
    assert all(torch.equal(saved[name], value) for name, value in extra.items())


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_that_predict_further_tokens_are_saved_as_they_were(kind, on_meta, base_of, tokenizer, tmp_path):
    folder, extra = base_of(kind)
    made = built(folder, tokenizer, on_meta=on_meta)
    assert any("saved again unchanged" in note and f"({len(extra)} in all)" in note for note in made.notes), made.notes
    save_model(made.model, tokenizer, tmp_path / "model")
    assert_has(tmp_path / "model", extra)
    assert set(tensors_in(tmp_path / "model")) == set(tensors_in(folder))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    save_model(built(tmp_path / "model", tokenizer).model, tokenizer, tmp_path / "again")
    assert_has(tmp_path / "again", extra)


@pytest.mark.parametrize("extra", [{}, {"mtp.attn.bias": torch.zeros(4)}])
def test_masks_and_positions_that_earlier_versions_saved_are_not(tokenizer, tmp_path, extra):
    """transformers 4.30 and older saved these buffers of GPT-2, GPT-NeoX, BERT and Llama."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = CONFIG_MAPPING["gpt2"](vocab_size=tokenizer.vocabulary, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    saved = load_file(tmp_path / "base" / "model.safetensors")
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    buffers = {"h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    buffers |= {"h.0.attention.bias": mask.clone(), "embeddings.position_ids": torch.arange(16)[None]}
    buffers |= {"layers.0.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**saved, **buffers, **extra}, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    carried = get_extra_tensors(built(tmp_path / "base", tokenizer).model)
    assert (carried.names if carried else ()) == tuple(extra)


def test_a_sharded_model_names_them_in_its_index(base_of, tokenizer, tmp_path, monkeypatch):
    folder, extra = base_of("glm4_moe")
    model = built(folder, tokenizer).model
    save = model.save_pretrained
    monkeypatch.setattr(model, "save_pretrained", partial(save, max_shard_size="40KB"))
    save_model(model, tokenizer, tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert extra.keys() <= index.keys()
    assert_has(tmp_path / "model", extra)
    save_model(built(tmp_path / "model", tokenizer).model, tokenizer, tmp_path / "again")
    assert_has(tmp_path / "again", extra)


def test_a_merged_adapter_has_them(base_of, tokenizer, tmp_path):
    folder, extra = base_of("glm4_moe")
    save_model(built(folder, tokenizer, lora={"rank": 2}).model, tokenizer, tmp_path / "adapter")
    assert not extra.keys() & tensors_in(tmp_path / "adapter").keys()
    export(str(tmp_path / "adapter"), tmp_path / "merged", merge=True)
    assert_has(tmp_path / "merged", extra)


def test_another_head_leaves_them_out_and_the_configuration_says_so(base_of, tokenizer, tmp_path):
    folder, extra = base_of("deepseek_v3")
    made = built(folder, tokenizer, LABELS)
    (note,) = [note for note in made.notes if "left out" in note]
    assert note.endswith("; num_nextn_predict_layers becomes 0")
    save_model(made.model, tokenizer, tmp_path / "model")
    assert not extra.keys() & tensors_in(tmp_path / "model").keys()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_rows_of_a_smaller_vocabulary_are_left_out(base_of, tokenizer, tmp_path):
    folder, _ = base_of("glm4_moe")
    rows = {"model.layers.2.embed_tokens.weight": torch.randn(tokenizer.vocabulary, 32)}
    save_file({**tensors_in(folder), **rows}, folder / "model.safetensors", metadata={"format": "pt"})
    larger = train_tokenizer(
        iter(["other words, quite other things, and again more words. " * 50]), TokenizerTraining(vocab=272)
    )
    made = built(folder, larger)
    assert any("left out" in note and "becomes 0" in note for note in made.notes)
    assert get_extra_tensors(made.model) is None
    assert get_extra_tensors(built(folder, tokenizer).model) is not None


def test_a_source_that_has_gone_is_told(base_of, tokenizer, tmp_path, caplog):
    folder, extra = base_of("glm4_moe")
    model = built(folder, tokenizer).model
    (folder / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "artel"):
        save_model(model, tokenizer, tmp_path / "model")
    assert f"{folder} can no longer be read" in caplog.text
    assert "num_nextn_predict_layers becomes 0" in caplog.text
    assert not extra.keys() & tensors_in(tmp_path / "model").keys()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_any_other_tensor_stays_but_not_what_the_model_computes(tokenizer, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    BertForMaskedLM(BertConfig(vocab_size=tokenizer.vocabulary, **sizes)).save_pretrained(tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    extra = {"bert.pooler.dense.weight": torch.randn(32, 32, dtype=torch.float16), "of.another": torch.arange(3)}
    positions = {"bert.embeddings.position_ids": torch.arange(512)[None]}  # saved by earlier versions of transformers
    file = tmp_path / "base" / "model.safetensors"
    save_file({**load_file(file), **extra, **positions}, file, metadata={"format": "pt"})
    save_model(built(tmp_path / "base", tokenizer, "AutoModelForMaskedLM").model, tokenizer, tmp_path / "model")
    assert_has(tmp_path / "model", extra)
    assert not positions.keys() & tensors_in(tmp_path / "model").keys()


@pytest.mark.processes
@pytest.mark.parametrize("parallel", [{"data": "fsdp"}, {"pipeline": 2}], ids=["fsdp", "pipeline"])
def test_a_run_on_two_processes_saves_them(parallel, base_of, tmp_path):
    folder, extra = base_of("glm4_moe")
    run = write_run(
        tmp_path / "run.yaml",
        model={"from": str(folder), "config": None},
        tokenizer={"from": str(folder), "train": None},
        train={"steps": 2},
        parallel=parallel,
    )
    succeed("train", run, "--nproc", "2")
    assert_has(tmp_path / "run" / "model", extra)
