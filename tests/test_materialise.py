"""Models built without their weights: the same weights for any layout, read and drawn only where they are held."""

import copy
import json
import shutil

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.errors import InputError
from artel.models.loading.build import build_model, must_load_full
from artel.models.loading.heads import model_class
from artel.models.loading.init_weights import canonical_names, initial_values
from artel.models.loading.materialize import materialize
from artel.models.loading.request import ModelRequest
from support.saved_models import ANSWERS, CAUSAL, MASKED, SCRATCH, as_binary, as_fp8, gpt2, qwen3_moe, saved_model

# Every name that architectures have for a size; each is given those that it knows.
SIZES = {
    "hidden_size": 32, "embedding_size": 32, "word_embed_proj_dim": 32, "attention_hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "intermediate_size": 48, "ffn_dim": 48, "max_position_embeddings": 64, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "vocab_size": 100,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MORE = {
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1, "state_size": 4},
    "rwkv": {"context_length": 16},
}  # fmt: skip
ARCHITECTURES = [
    *(("AutoModelForCausalLM", kind) for kind in (
        "gpt2", "llama", "qwen3_moe", "mixtral", "gpt_neo", "opt", "bloom", "falcon", "mamba2", "rwkv", "gemma3_text",
        "deepseek_v3", "qwen3_next", "gpt_oss", "gptj", "xglm", "openai-gpt")),
    *(("AutoModelForMaskedLM", kind) for kind in (
        "roberta", "bert", "modernbert", "camembert", "albert", "longformer", "nystromformer", "deberta-v2")),
]  # fmt: skip


def configuration(kind):
    config = CONFIG_MAPPING[kind]
    known = {*config().to_dict(), *config().attribute_map}
    return config(**{key: value for key, value in {**SIZES, **MORE.get(kind, {})}.items() if key in known})


@pytest.mark.parametrize(("auto_class", "kind"), ARCHITECTURES, ids=[kind for _, kind in ARCHITECTURES])
def test_first_values_are_distributed_as_transformers_has_them(auto_class, kind):
    """Buffers are equal; means and standard deviations of parameters are, within what samples of their size allow."""
    torch.manual_seed(0)
    config = configuration(kind)
    build = model_class(config, auto_class, {})._from_config
    whole = build(copy.deepcopy(config))
    with torch.device("meta"):
        reference = build(config)
    names = canonical_names(reference)
    results = {}
    for name, _ in reference.named_modules():
        start = f"{name}." if name else ""
        results |= {start + own: value for own, value in initial_values(reference, name, 1).items()}
    for name, buffer in whole.named_buffers():
        assert torch.equal(results[name], buffer), name
    for name, parameter in whole.named_parameters():
        ours, theirs = results[names[name]].double(), parameter.detach().double()
        spread = theirs.std(correction=0)
        assert ours.shape == theirs.shape, name
        assert ours.isfinite().all(), name
        assert (ours.std(correction=0) - spread).abs() <= 6 * spread / ours.numel() ** 0.5 + 1e-9, name
        assert (ours.mean() - theirs.mean()).abs() <= 8 * spread / ours.numel() ** 0.5 + 1e-6, name


def both(model_config, tokenizer, auto_class, heads=None, seed=3, **more):
    request = ModelRequest(model_config, auto_class, heads or {}, block=8, seed=seed, **more)
    whole, skeleton = (build_model(request, tokenizer, on_meta=on_meta) for on_meta in (False, True))
    assert all(tensor.is_meta for tensor in (*skeleton.model.parameters(), *skeleton.model.buffers()))
    assert (skeleton.num_parameters, skeleton.num_trainable) == (whole.num_parameters, whole.num_trainable)
    materialize(skeleton.model, skeleton.weights, device="cpu")
    return whole, skeleton


def assert_same(whole, skeleton):
    ours, theirs = skeleton.model.state_dict(), whole.model.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    for (name, ours), (_, theirs) in zip(skeleton.model.named_buffers(), whole.model.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert len(list(skeleton.model.parameters())) == len(list(whole.model.parameters()))  # tied as the other
    assert [parameter.requires_grad for parameter in skeleton.model.parameters()] == [
        parameter.requires_grad for parameter in whole.model.parameters()
    ]
    assert (skeleton.notes, skeleton.new_modules) == (whole.notes, whole.new_modules)
    assert skeleton.model.training == whole.model.training


def encoder(kind=RobertaForMaskedLM, config=RobertaConfig, vocabulary=300, **more):
    torch.manual_seed(0)
    return kind(config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                       vocab_size=vocabulary, max_position_embeddings=66, **more))  # fmt: skip


SAVED = {
    "experts one by one": (lambda folder: qwen3_moe().save_pretrained(folder), CAUSAL, None),
    "many files": (lambda folder: qwen3_moe().save_pretrained(folder, max_shard_size="40kB"), CAUSAL, None),
    "a body without a head": (lambda folder: gpt2(GPT2Model).save_pretrained(folder), CAUSAL, None),
    "a head that is not tied": (lambda folder: gpt2(tie_word_embeddings=False).save_pretrained(folder), CAUSAL, None),
    "a pickle of tensors": (lambda folder: as_binary(gpt2(), folder), CAUSAL, None),
    "heads that are new": (lambda folder: encoder().save_pretrained(folder), ANSWERS, {"kind": 5}),
    "rows that are new": (lambda folder: gpt2(vocabulary=200).save_pretrained(folder), CAUSAL, None),
    "rows and bias that are new": (lambda folder: encoder(vocabulary=200).save_pretrained(folder), MASKED, None),
    "rows of both ends": (
        lambda folder: gpt2(vocabulary=200, tie_word_embeddings=False).save_pretrained(folder), CAUSAL, None),
    "a head and rows that are new": (
        lambda folder: gpt2(GPT2Model, 200, tie_word_embeddings=False).save_pretrained(folder), CAUSAL, None),
    "BERT's head": (
        lambda folder: encoder(BertForMaskedLM, BertConfig, vocabulary=200).save_pretrained(folder), MASKED, None),
}  # fmt: skip


@pytest.mark.parametrize("case", SAVED)
def test_a_saved_model_is_read_as_transformers_reads_it(case, tokenizer, tmp_path):
    save, auto_class, heads = SAVED[case]
    save(tmp_path / "saved")
    whole, skeleton = both(saved_model(tmp_path / "saved"), tokenizer, auto_class, heads)
    assert_same(whole, skeleton)
    for name, built in (("whole", whole), ("skeleton", skeleton)):
        built.model.save_pretrained(tmp_path / name)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("whole", "skeleton")]
    assert files[0] == files[1]


ADAPTED = {
    "experts one by one": {"target": ["auto", "experts"], "save": ["lm_head"]},
    "a pickle of tensors": {"save": ["wte"]},
    "heads that are new": {},
    "rows and bias that are new": {"rslora": True},
    "rows of both ends": {},
}  # fmt: skip


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_and_the_base_beneath_them_are_the_same(case, half, tokenizer, tmp_path):
    save, auto_class, heads = SAVED[case]
    save(tmp_path)
    config = ModelConfig.model_validate({"from": str(tmp_path), "lora": {"rank": 4, **ADAPTED[case]}})
    whole, skeleton = both(config, tokenizer, auto_class, heads, base_dtype=half)
    assert_same(whole, skeleton)
    adapters = {name: value for name, value in skeleton.model.named_parameters() if ".lora_A." in name}
    assert all(value.any() and value.dtype == torch.float32 for value in adapters.values())


def test_tied_tensors_that_are_saved_apart_stay_apart(tokenizer, tmp_path):
    gpt2(tie_word_embeddings=False).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    whole, skeleton = both(saved_model(tmp_path), tokenizer, CAUSAL)
    assert_same(whole, skeleton)
    assert not torch.equal(skeleton.model.lm_head.weight, skeleton.model.transformer.wte.weight)


def test_a_saved_model_that_does_not_fit_is_refused_alike(tokenizer, tmp_path):
    for name in ("other sizes", "another model", "no file"):
        folder = tmp_path / name
        gpt2().save_pretrained(folder)
        if name == "other sizes":
            gpt2(n_inner=24).config.save_pretrained(folder)
        elif name == "another model":
            shutil.copy(folder / "model.safetensors", tmp_path)
            encoder().save_pretrained(folder)
            shutil.copy(tmp_path / "model.safetensors", folder)
        else:
            (folder / "model.safetensors").rename(folder / "other.safetensors")
        auto_class = MASKED if name == "another model" else CAUSAL
        messages = []
        for on_meta in (False, True):
            with pytest.raises(InputError) as error:
                build_model(ModelRequest(saved_model(folder), auto_class, block=8, seed=1), tokenizer, on_meta=on_meta)
            messages.append([(problem.where, problem.what) for problem in error.value.problems])
        if name == "no file":  # transformers says in many words which files it looked for
            messages = [[(where, "pytorch_model.bin" in what) for where, what in problems] for problems in messages]
        assert messages[0] == messages[1]


def test_a_model_from_scratch_is_the_same_and_so_is_each_module_of_it(tokenizer):
    model_config = ModelConfig(config=SCRATCH)
    whole, skeleton = both(model_config, tokenizer, CAUSAL)
    assert_same(whole, skeleton)
    stage = build_model(ModelRequest(model_config, CAUSAL, block=8, seed=3), tokenizer, on_meta=True)
    stage.model.model.layers = torch.nn.ModuleDict({"2": stage.model.model.layers[2]})
    stage.model.model.embed_tokens = None
    materialize(stage.model, stage.weights, device="cpu")
    assert len(stage.model.state_dict()) == 11
    for name, value in stage.model.state_dict().items():
        assert torch.equal(value, whole.model.state_dict()[name]), name
    other = build_model(ModelRequest(model_config, CAUSAL, block=8, seed=4), tokenizer).model
    first, second = (layer.self_attn.q_proj.weight for layer in whole.model.model.layers[:2])
    assert not torch.equal(first, second)
    assert not torch.equal(first, other.model.layers[0].self_attn.q_proj.weight)


def test_frozen_parameters_stay_frozen_and_what_cannot_be_read_in_parts_says_why(tokenizer, tmp_path):
    model_config = ModelConfig(config=SCRATCH, freeze=["*embed*", "model.layers.0.*"])
    assert_same(*both(model_config, tokenizer, CAUSAL))
    assert must_load_full(model_config) is None
    gpt2().save_pretrained(tmp_path)
    assert must_load_full(ModelConfig.model_validate({"from": str(tmp_path), "lora": {"rank": 2}})) is None
    assert "dora" in must_load_full(ModelConfig.model_validate({"from": "x", "lora": {"rank": 2, "dora": True}}))
    nf4 = {"from": "x", "lora": {"rank": 2}, "quantize": "nf4"}
    assert "quantize" in must_load_full(ModelConfig.model_validate(nf4))


def test_quantized_weights_are_loaded_whole(tokenizer, tmp_path):
    """Read in shards, float8 numbers would come without their scales: 448 where 0.08 was saved."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes))
    as_fp8(model, tmp_path)
    assert "quantized" in must_load_full(saved_model(tmp_path))
    request = ModelRequest(saved_model(tmp_path), CAUSAL, block=8, seed=1)
    with pytest.raises(AssertionError):
        build_model(request, tokenizer, on_meta=True)
    for name, parameter in build_model(request, tokenizer).model.named_parameters():
        expected = model.get_parameter(name)
        assert torch.allclose(parameter, expected, rtol=0.07, atol=1e-4), name  # float8 has 3 bits of mantissa


def test_values_that_no_rule_can_draw_are_refused(tokenizer):
    model_config = ModelConfig(config={**SCRATCH, "initializer_range": -1.0})
    with pytest.raises(InputError, match=r"model\.config"):
        build_model(ModelRequest(model_config, CAUSAL, block=8, seed=1), tokenizer)
