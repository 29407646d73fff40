"""Architectures that transformers' own code makes special: trained by the loop, saved, and the same in transformers."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, DogeConfig, Llama4TextConfig, PhimoeConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from artel.config import ModelConfig, TokenizerTraining
from artel.errors import InputError
from artel.inference import open_model
from artel.models.attention_switch import use_artel_attention
from artel.models.loading.build import build_model
from artel.models.loading.check import check_model
from artel.models.loading.request import ModelRequest
from artel.models.loading.structure import build_from_scratch
from artel.tokens import train_tokenizer
from support.runs import losses, succeed, write_run

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SPARSE = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
          "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 2, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}  # fmt: skip
TRAINED = {
    "openai-gpt": {"n_layer": 2, "n_embd": 32, "n_head": 2},
    "modernbert-decoder": SIZES,
    "deepseek_v32": {**SIZES, **SPARSE},
}


def tokenizer():
    return train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_three_steps_by_the_loop_open_with_transformers(kind, tmp_path):
    run = write_run(tmp_path / "run.yaml", model={"config": {"model_type": kind, **TRAINED[kind]}}, train={"steps": 3})
    succeed("train", str(run))
    by_step = losses(tmp_path / "run")
    assert sorted(by_step) == [1, 2, 3]
    # An untrained model guesses: its loss is near the logarithm of the vocabulary's size.
    assert all(abs(loss - math.log(400)) < 0.5 and math.isfinite(norm) for loss, norm in by_step.values())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", attn_implementation="eager").eval()
    ours = open_model(str(tmp_path / "run")).model.eval()
    use_artel_attention(ours)
    ids = torch.randint(3, 100, (2, 31), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(ours(ids, use_cache=False).logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        Llama4TextConfig(**SIZES | {"num_hidden_layers": 4}, num_key_value_heads=2, head_dim=16,
                         num_local_experts=2, attention_chunk_size=8, intermediate_size_mlp=64, vocab_size=100,
                         pad_token_id=0),
        PhimoeConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, sliding_window=8, vocab_size=100),
        DogeConfig(**SIZES, num_key_value_heads=2, vocab_size=100),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_attention_that_says_more_by_its_masks_is_left_to_the_model(config):
    """Chunks, a window that layers do not name, a mask of the model's own making."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 100, (2, 31))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert not use_artel_attention(model)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=0, rtol=0)


def test_ids_that_a_configuration_cannot_do_without():
    """modernbert-decoder takes no None for its special tokens; a tokenizer may have but an end."""
    bare = tokenizer()
    bare.hf.pad_token = bare.hf.bos_token = None

    def config(model_type):
        values = ModelConfig(config={"model_type": model_type, **SIZES})
        return build_from_scratch(ModelRequest(values, "AutoModelForCausalLM", block=8), bare).config

    names = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
    assert [getattr(config("modernbert-decoder"), name) for name in names] == [bare.end_id] * 5
    assert config("llama").pad_token_id is None


def training_model(values, auto_class="AutoModelForCausalLM"):
    return build_model(ModelRequest(ModelConfig(config=values), auto_class, block=64), tokenizer()).model


ENCODERS = {
    "bert": "is_decoder", "roberta": "is_decoder", "electra": "is_decoder", "camembert": "is_decoder",
    "xlm-roberta": "is_decoder", "roformer": "is_decoder", "bert-generation": "is_decoder", "xlm": "causal",
}  # fmt: skip


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_predicts_next_tokens_only_as_a_decoder(kind, tmp_path):
    sizes = {"n_layers": 2, "emb_dim": 32, "n_heads": 2} if kind == "xlm" else SIZES
    values, key = {"model_type": kind, **sizes}, ENCODERS[kind]
    with pytest.raises(InputError, match=rf"{kind} is an encoder.*\n.*model\.config\.{key}: true") as raised:
        check_model(ModelConfig(config=values), "AutoModelForCausalLM")
    assert ("objective: masked" in str(raised.value)) == (kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    with pytest.raises(InputError, match="is an encoder"):
        training_model(values)
    model = training_model(values | {key: True}).eval()
    ids = torch.randint(3, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, first = model(ids).logits, model(ids[:, :7]).logits
    torch.testing.assert_close(whole[:, :7], first, atol=1e-5, rtol=1e-4)
    model.save_pretrained(tmp_path)
    saved = ModelConfig.model_validate({"from": str(tmp_path)})
    check_model(saved, "AutoModelForCausalLM")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {key: False}))
    with pytest.raises(InputError, match=rf'is an encoder.*\n.*"{key}": true in its config.json'):
        check_model(saved, "AutoModelForCausalLM")


@pytest.mark.parametrize("kind", ["modernbert", "deberta-v2", "albert"])
def test_an_encoder_without_a_causal_head_names_the_objective_that_it_has(kind):
    with pytest.raises(InputError, match=r"no head for next tokens.*\n.*write objective: masked"):
        check_model(ModelConfig(config={"model_type": kind}), "AutoModelForCausalLM")


def test_decoders_are_not_taken_for_encoders():
    for kind in ("gpt2", "gpt_neox", "llama", "trocr", "bart", "xlnet", "modernbert-decoder"):
        check_model(ModelConfig(config={"model_type": kind}), "AutoModelForCausalLM")


def test_a_pass_of_reformer_depends_on_the_seed_alone():
    """transformers takes seeds from the operating system: a resumed run ended with other weights."""
    sizes = {"hidden_size": 32, "attention_head_size": 16, "num_attention_heads": 2, "feed_forward_size": 64,
             "axial_pos_embds": False, "is_decoder": True, "attn_layers": ["local", "lsh"], "num_buckets": 4,
             "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16, "hidden_dropout_prob": 0.2}  # fmt: skip
    model = training_model({"model_type": "reformer", **sizes}).train()
    ids = torch.randint(3, 100, (2, 64), generator=torch.Generator().manual_seed(0))

    def gradients(seed):
        model.zero_grad()
        torch.manual_seed(seed)
        model(ids, labels=ids).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    first, again, other = gradients(1), gradients(1), gradients(2)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not all(map(torch.equal, other, first))


def test_a_pass_of_big_bird_does_not_depend_on_the_rows_before_it():
    """Short rows are computed with full attention; transformers keeps that for all that follows."""
    sizes = SIZES | {"block_size": 4, "num_random_blocks": 1, "attention_type": "block_sparse", "is_decoder": False}
    model = training_model({"model_type": "big_bird", **sizes}, "AutoModelForMaskedLM").train()
    rows = torch.randint(3, 100, (2, 64), generator=torch.Generator().manual_seed(0))

    def loss(length):
        torch.manual_seed(1)
        ids = rows[:, :length].contiguous()
        return model(ids, labels=ids).loss

    long, short = loss(64), loss(16)
    assert (loss(16), loss(64), loss(64)) == (short, long, long)
