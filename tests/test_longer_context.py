"""`model.rope` and `model.attention`: longer positions or a window, as transformers opens them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.errors import InputError
from artel.inference import open_model
from artel.models.attention_switch import use_artel_attention
from artel.models.document_mask import check_documents
from artel.models.loading.build import build_model
from artel.models.loading.check import check_model
from artel.models.loading.materialize import materialize
from artel.models.loading.model_config import change_context
from artel.models.loading.request import ModelRequest
from artel.models.loading.save import save_model
from artel.models.loading.structure import position_limit
from support.runs import refused, succeed, write_run

POSITIONS = 32
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": POSITIONS, "bos_token_id": 0,
         "eos_token_id": 0, "initializer_range": 0.3}  # fmt: skip
ENCODER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
           "vocab_size": 300, "max_position_embeddings": POSITIONS, "pad_token_id": 0, "bos_token_id": 0,
           "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0, "initializer_range": 0.3}  # fmt: skip
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 300, "n_positions": POSITIONS}
MODELS = {
    "llama": SIZES,
    "qwen3": SIZES,
    "mistral": SIZES | {"sliding_window": None},
    "gemma3_text": SIZES | {"pad_token_id": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "modernbert": ENCODER,
    "gpt2": GPT2,
    "qwen3_next": SIZES | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                           "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "gptj": {"n_layer": 2, "n_embd": 32, "n_head": 2, "rotary_dim": 8, "vocab_size": 300, "n_positions": POSITIONS},
}  # fmt: skip
MASKED = ("modernbert",)


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """Folders of tiny models, each made when it is asked for first."""
    place, done = tmp_path_factory.mktemp("models"), {}

    def folder(kind):
        if kind not in done:
            torch.manual_seed(0)
            model = auto(kind).from_config(CONFIG_MAPPING[kind](**MODELS[kind]))
            model.save_pretrained(place / kind)
            tokenizer.save(place / kind)
            done[kind] = place / kind
        return done[kind]

    return folder


def auto(kind):
    return AutoModelForMaskedLM if kind in MASKED else AutoModelForCausalLM


def request(folder, block=96, **model):
    return ModelRequest(
        ModelConfig.model_validate({"from": str(folder), **model}), auto(folder.name).__name__, block=block
    )


def ids(length=96):
    return torch.randint(3, 260, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "modernbert"])
@pytest.mark.parametrize(
    "rope",
    [
        {"type": "yarn", "factor": 4},
        {"type": "linear", "factor": 3},
        {"type": "llama3", "factor": 4},
        {"type": "default", "factor": 4, "theta": 1e8},
    ],
    ids=lambda rope: rope["type"],
)
def test_a_longer_context_is_saved_as_it_is_computed(folders, tokenizer, tmp_path, kind, rope):
    folder = folders(kind)
    model = build_model(request(folder, rope=rope), tokenizer).model.eval()
    assert position_limit(model) == POSITIONS * rope["factor"]
    saved = tmp_path / kind
    save_model(model, tokenizer, saved)
    theirs = auto(kind).from_pretrained(saved).eval()
    plain = auto(kind).from_pretrained(folder).eval()
    parameters = theirs.config.rope_parameters
    assert parameters.get("full_attention", parameters)["rope_type"] == rope["type"]
    with torch.no_grad():
        logits = model(input_ids=ids()).logits
        assert torch.equal(theirs(input_ids=ids()).logits, logits)
        assert (plain(input_ids=ids()).logits - logits).abs().max() > 1e-4
    sharded = build_model(request(folder, rope=rope), tokenizer, on_meta=True)
    materialize(sharded.model, sharded.weights, device="cpu")
    with torch.no_grad():
        assert torch.equal(sharded.model(input_ids=ids()).logits, logits)
    again = {"type": rope["type"], "factor": 8} | ({"theta": 1e9} if "theta" in rope else {})
    longer = build_model(request(saved, rope=again), tokenizer).model
    expected = 8 * POSITIONS if rope["type"] != "default" else 8 * 4 * POSITIONS
    assert position_limit(longer) == expected


def test_what_cannot_be_extended_is_refused_by_name(folders, tokenizer, tmp_path):
    def refusal(folder, **model):
        with pytest.raises(InputError) as caught:
            check_model(ModelConfig.model_validate({"from": str(folder), **model}), auto(folder.name).__name__)
        return str(caught.value)

    yarn = {"type": "yarn", "factor": 4}
    assert "gpt2 has no rotary positions" in refusal(folders("gpt2"), rope=yarn)
    assert "gptj has no rotary positions" in refusal(folders("gptj"), rope=yarn)
    assert "gpt2 has no sliding-window attention" in refusal(folders("gpt2"), attention={"window": 4})
    assert "qwen3_next has no sliding-window attention" in refusal(folders("qwen3_next"), attention={"window": 4})
    model = build_model(request(folders("llama"), rope=yarn), tokenizer).model
    save_model(model, tokenizer, tmp_path / "llama")
    told = refusal(tmp_path / "llama", rope={"type": "linear", "factor": 8})
    assert "this llama is already extended, by yarn to 4 times 32 positions" in told
    assert "a factor above 4" in refusal(tmp_path / "llama", rope=yarn)
    for wrong, words in (
        ({"type": "dynamic", "factor": 2}, "dynamic depends on the longest row of a batch"),
        ({"type": "default", "factor": 2}, "default only changes theta"),
    ):
        with pytest.raises(ValueError, match=words):
            ModelConfig.model_validate({"from": "x", "rope": wrong})
    with pytest.raises(InputError, match="gemma3 takes images"):
        change_context(CONFIG_MAPPING["gemma3"](), ModelConfig.model_validate({"from": "x", "rope": yarn}))
    with pytest.raises(ValueError, match="rope changes a pretrained model"):
        ModelConfig.model_validate({"config": {"model_type": "llama"}, "rope": yarn})


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "gemma3_text"])
def test_a_window_is_obeyed_with_documents_too(folders, tokenizer, tmp_path, kind):
    model = build_model(request(folders(kind), block=32, attention={"window": 4}), tokenizer).model.eval()
    use_artel_attention(model)
    check_documents(model, causal=True)  # each document's logits are those alone
    save_model(model, tokenizer, tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    one, other = ids(32), ids(32)
    other[:, 0] += 1
    with torch.no_grad():
        logits = model(input_ids=one).logits
        changed = (model(input_ids=other).logits - logits).abs().amax(dim=(0, 2))
        assert torch.allclose(theirs(input_ids=one).logits, logits, atol=1e-5)
    reach = 1 + 2 * 3  # each of two layers sees three tokens before its own
    assert (changed[:reach] > 0).all()
    assert (changed[reach:] == 0).all() if kind != "gemma3_text" else (changed[reach:] > 0).all()


@pytest.mark.slow
def test_adapters_keep_the_context_they_were_trained_with(folders, tmp_path):
    model = {"config": None, "from": str(folders("llama")), "lora": {"rank": 4}, "rope": {"type": "yarn", "factor": 4}}
    train = {"steps": 2, "batch": 4, "learning_rate": 1e-2}
    run = write_run(tmp_path / "run.yaml", model=model, train=train, tokenizer={"train": None}, data={"block": 96})
    succeed("train", run)
    adapter = tmp_path / "run" / "model"
    assert json.loads((adapter / "base_config.json").read_text())["max_position_embeddings"] == 128
    succeed("export", tmp_path / "run", tmp_path / "merged", "--merge")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.rope_parameters["rope_type"] == "yarn"
    with torch.no_grad():
        expected = merged(input_ids=ids()).logits
        assert torch.allclose(open_model(str(adapter)).model(input_ids=ids()).logits, expected, atol=1e-3)
    assert load_file(adapter / "adapter_model.safetensors")
    run = write_run(
        tmp_path / "short.yaml", model=model | {"rope": None}, tokenizer={"train": None}, data={"block": 96}
    )
    assert "96 tokens are more than the model's 32 positions" in refused("train", run).stderr
