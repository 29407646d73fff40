"""Models: pretrained folders, growing vocabularies, and the attention function beside transformers' own."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    Qwen3Config,
    RobertaConfig,
)

from artel.config import ModelConfig
from artel.models.attention_switch import use_artel_attention
from artel.models.loading.build import build_model
from artel.models.loading.request import ModelRequest
from support.runs import succeed, write_run


def tiny(vocabulary=270):
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=vocabulary, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


def test_a_folder_with_pytorch_model_bin_loads_and_is_the_same(tokenizer, tmp_path):
    model = tiny()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    model_config = ModelConfig.model_validate({"from": str(tmp_path)})
    built = build_model(ModelRequest(model_config, "AutoModelForCausalLM", block=8, seed=1), tokenizer)
    ids = torch.arange(10)[None]
    assert torch.equal(built.model.eval()(ids).logits, model(ids).logits)
    assert built.notes == []


def test_a_larger_tokenizer_grows_the_model_in_the_open(tokenizer, tmp_path):
    tiny(vocabulary=200).save_pretrained(tmp_path)
    model_config = ModelConfig.model_validate({"from": str(tmp_path)})
    built = build_model(ModelRequest(model_config, "AutoModelForCausalLM", block=8, seed=1), tokenizer)
    assert built.model.get_input_embeddings().weight.shape[0] == 270
    assert "70 new ones were added" in built.notes[0]


@pytest.mark.slow
def test_fine_tuning_from_a_folder_with_the_gpt2_tokenizer(shared_data, tmp_path):
    """A folder as people have it (vocab.json, merges.txt, weights) trains, and the result opens again."""
    folder = tmp_path / "pretrained"
    tiny(vocabulary=50257).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes((shared_data / "tokenizers" / "gpt2" / name).read_bytes())
    run = write_run(
        tmp_path / "run.yaml",
        model={"config": None, "from": str(folder)},
        tokenizer={"train": None},
        train={"steps": 2, "batch": 4},
    )
    succeed("train", run)
    trained = AutoModelForCausalLM.from_pretrained(run.with_suffix("") / "model")
    assert trained.config.vocab_size == 50257
    succeed("generate", run.with_suffix(""), "--prompt", "The", "--max-new-tokens", 3)


SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 64, "vocab_size": 100}  # fmt: skip
ENCODER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
           "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_layer=2, n_embd=36, n_head=4, vocab_size=100),  # heads of 9: an odd size
        LlamaConfig(**SMALL),  # grouped keys
        Qwen3Config(**SMALL, head_dim=12),
        MistralConfig(**SMALL, sliding_window=5),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_gives_what_the_eager_reference_gives(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 100, (2, 17))
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False).logits
    assert use_artel_attention(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        RobertaConfig(**ENCODER),
        ModernBertConfig(**ENCODER, cls_token_id=0, bos_token_id=0, eos_token_id=2, sep_token_id=2, local_attention=6,
                         layer_types=["sliding_attention", "full_attention"]),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
@pytest.mark.parametrize("padded", [False, True])
def test_encoders_see_no_padding_and_give_what_the_eager_reference_gives(config, padded):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config).eval()
    seen = torch.ones(2, 17, dtype=torch.int64)
    if padded:
        seen[0, 9:] = 0
    inputs = {"input_ids": torch.randint(3, 100, (2, 17)), "attention_mask": seen}
    model.set_attn_implementation("eager")
    expected = model(**inputs).logits
    assert use_artel_attention(model)
    assert model.config._attn_implementation == "artel_masked"
    torch.testing.assert_close(model(**inputs).logits[seen == 1], expected[seen == 1], atol=2e-5, rtol=1e-4)
