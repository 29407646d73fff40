"""Model folders without all of their weights, or with NaN among them: used by nobody; a new head is learned."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from artel.config import ModelConfig, TokenizerTraining
from artel.errors import InputError
from artel.generation.generate import Sampling, generate_text, generate_tokens
from artel.inference import export, open_model
from artel.models.loading.build import build_model, load_model
from artel.models.loading.check import check_pretrained
from artel.models.loading.heads import check_sizes
from artel.models.loading.request import ModelRequest
from artel.models.quantization import keep_trainable_format, set_compute_precision
from artel.tokens import train_tokenizer

CAUSAL, ANSWERS = "AutoModelForCausalLM", "AutoModelForQuestionAnswering"
ATTENTION = "transformer.h.1.attn.c_attn.weight"


@pytest.fixture(scope="module")
def whole(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "whole"
    config = GPT2Config(vocab_size=tokenizer.vocabulary, n_layer=2, n_embd=32, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def change(folder, change):
    """Write the folder's weights after `change` was made to them."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without(*endings):
    def remove(weights):
        for name in [name for name in weights if name.endswith(endings)]:
            del weights[name]

    return remove


def uses(folder, tokenizer, tmp_path):
    """Each way to use a model folder, by what it is called."""
    model_config = ModelConfig.model_validate({"from": str(folder)})
    kind = {"auto_class": CAUSAL, "block": 8, "seed": 0}
    return {
        "open": lambda: open_model(str(folder)),
        "export": lambda: export(str(folder), tmp_path / "out"),
        "check": lambda: check_pretrained(model_config, CAUSAL),
        "train": lambda: build_model(ModelRequest(model_config, **kind), tokenizer),
        "train in shards": lambda: build_model(ModelRequest(model_config, **kind), tokenizer, on_meta=True),
    }


@pytest.mark.parametrize(
    ("endings", "names"),
    [
        (("h.1.attn.c_attn.weight",), ATTENTION),
        (("ln_1.weight", "ln_2.weight", "ln_f.weight"), "transformer.h.0.ln_1.weight, transformer.h.0.ln_2.weight"),
        (("wte.weight",), "transformer.wte.weight"),
    ],
    ids=["one matrix", "all norms", "embeddings"],
)
def test_a_model_without_all_of_its_weights_is_used_by_nobody(endings, names, folder, tokenizer, tmp_path):
    change(folder, without(*endings))
    for use in uses(folder, tokenizer, tmp_path).values():
        with pytest.raises(InputError, match="has no weights for") as caught:
            use()
        assert names in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_whole_model_is_used(folder, tokenizer, tmp_path):
    for use in uses(folder, tokenizer, tmp_path).values():
        use()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_new_head_is_learned_and_not_used(tokenizer, tmp_path):
    config = BertConfig(vocab_size=tokenizer.vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64)  # fmt: skip
    encoder = tmp_path / "encoder"
    BertForMaskedLM(config).save_pretrained(encoder)
    tokenizer.save(encoder)
    model_config = ModelConfig.model_validate({"from": str(encoder)})
    kind = {"auto_class": ANSWERS, "block": 8, "seed": 0, "heads": {"class_head": 5}}
    built = build_model(ModelRequest(model_config, **kind), tokenizer)
    assert built.notes[0].startswith(
        f"not in {encoder}, so newly initialized: class_head.bias, class_head.weight, qa_out"
    )
    assert build_model(ModelRequest(model_config, **kind), tokenizer, on_meta=True).notes[0] == built.notes[0]
    check_pretrained(model_config, ANSWERS)
    with pytest.raises(InputError, match=r"has no weights for class_head\.bias, class_head\.weight, qa_outputs"):
        load_model(ModelRequest(model_config, **kind), tokenizer)
    change(encoder, without("layer.1.output.dense.weight"))
    with pytest.raises(InputError, match=r"has no weights for bert\.encoder\.layer\.1\.output\.dense\.weight\n"):
        build_model(ModelRequest(model_config, **kind), tokenizer)


def test_a_new_head_beside_a_body_without_a_name_of_its_own_is_learned(tokenizer, tmp_path):
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    folder = tmp_path / "t5"
    T5ForConditionalGeneration(T5Config(vocab_size=tokenizer.vocabulary, **sizes)).save_pretrained(folder)
    tokenizer.save(folder)
    model_config = ModelConfig.model_validate({"from": str(folder)})
    check_pretrained(model_config, ANSWERS)
    built = build_model(ModelRequest(model_config, ANSWERS, block=8, seed=0), tokenizer)
    assert "newly initialized: qa_outputs.bias, qa_outputs.weight" in built.notes[0]
    change(folder, without("encoder.block.0.layer.1.DenseReluDense.wi.weight"))
    with pytest.raises(InputError, match=r"has no weights for encoder\.block\.0\.layer\.1\.DenseReluDense\.wi"):
        check_pretrained(model_config, ANSWERS)


def test_packed_weights_have_names_of_their_own(folder, tmp_path):
    """Of a GPTQ folder nothing is missing, though no weight has its usual name; it is exported as it is."""

    def pack(weights):
        for name in [name for name in weights if name.endswith("c_attn.weight")]:
            weights[name.replace("weight", "qweight")] = weights.pop(name).int()

    change(folder, pack)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(values))
    check_pretrained(ModelConfig.model_validate({"from": str(folder)}), CAUSAL)
    export(str(folder), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_folder_that_bitsandbytes_quantized_opens(folder, tmp_path):
    """As the hub's many *-bnb-4bit folders: 4-bit weights under their usual names, in shapes of their own."""
    pytest.importorskip("bitsandbytes")
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"])
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, dtype=torch.float32)
    packed = tmp_path / "packed"
    shutil.copytree(folder, packed, ignore=shutil.ignore_patterns("*.safetensors"))
    theirs.save_pretrained(packed)
    opened = open_model(str(packed))
    keep_trainable_format(theirs)
    set_compute_precision(theirs, "fp32")
    with torch.no_grad():
        expected, logits = (model.eval()(torch.arange(9)[None]).logits for model in (theirs, opened.model))
    assert torch.allclose(logits, expected, atol=1e-5)


def test_sizes_that_each_layer_has_for_itself_are_not_looked_at():
    for kind in ("dots3_note", "dots3_note_text"):
        check_sizes(CONFIG_MAPPING[kind]())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(number, folder):
    change(folder, lambda weights: weights[ATTENTION][3].fill_(number))
    with pytest.raises(InputError, match=f"NaN or infinite weights: {ATTENTION}"):
        open_model(str(folder))


def test_logits_that_are_no_numbers(folder):
    """Weights so large that what is computed with them is not finite."""
    change(folder, lambda weights: weights["transformer.h.0.mlp.c_fc.weight"].fill_(3e38))
    opened = open_model(str(folder))
    for temperature in (0.0, 0.8):
        with pytest.raises(InputError, match="logits are NaN or infinite"):
            list(generate_text(opened.model, opened.tokenizer, "words", Sampling(3, temperature), None))


def test_a_tokenizer_with_more_tokens_than_embeddings(folder, tokenizer):
    """What texts can have must be embedded; marks that were added for another use need not be."""

    def opened_with(*tokens, special):
        more = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
        more.hf.add_tokens(list(tokens), special_tokens=special)
        more.save(folder)
        return open_model(str(folder))

    opened = opened_with("<|image|>", special=True)
    rows = opened.model.get_input_embeddings().weight.shape[0]
    assert rows == tokenizer.vocabulary < opened.tokenizer.vocabulary
    assert torch.tensor(next(opened.tokenizer.encode(["<|image|> words"]))).max() < rows
    with pytest.raises(InputError, match=rf"no embedding for '<\|image\|>' \(id {rows} of {rows}\)"):
        list(generate_tokens(opened.model, opened.tokenizer, [rows], Sampling(2), None, frozenset()))
    with pytest.raises(
        InputError, match=f"2 tokens that its model has no embedding for, from 'elephant' on .id {rows}"
    ):
        opened_with("elephant", "giraffe", special=False)


def test_weights_that_a_constructor_keeps_off_the_meta_device_are_drawn_and_read(tokenizer, tmp_path):
    """XLNet makes its attention's by torch.FloatTensor(sizes): memory as it was found was trained further."""
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    config = ModelConfig(config={"model_type": "xlnet", **sizes})
    model = build_model(ModelRequest(config, CAUSAL, {}, 32, 0), tokenizer).model
    assert 0.015 < model.transformer.layer[1].rel_attn.q.std() < 0.025
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    again = load_model(ModelRequest(ModelConfig.model_validate({"from": str(tmp_path)}), CAUSAL, {}), tokenizer)
    assert all(value.equal(again.state_dict()[name]) for name, value in model.state_dict().items())
