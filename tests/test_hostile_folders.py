"""Model and tokenizer folders that are damaged or hostile: used, or refused in words, by every verb that opens one."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from artel.cli.generate import _read_text_or_file
from artel.config import ModelConfig, TokenizerTraining
from artel.errors import InputError
from artel.generation.generate import Sampling
from artel.inference import ChatSession, ChatSettings, export, open_model
from artel.models.loading.build import build_model
from artel.models.loading.check import check_model, check_pretrained
from artel.models.loading.request import ModelRequest
from artel.tokens import load_tokenizer, train_tokenizer
from support.runs import artel

CAUSAL = "AutoModelForCausalLM"
CONFIG, GENERATION, TOKENS, SAYS = "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
WEIGHTS, ADAPTER = "model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "whole"
    tokenizer = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
    end = tokenizer.end_id
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
    config = GPT2Config(vocab_size=tokenizer.vocabulary, eos_token_id=end, bos_token_id=end, **sizes)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def keys(file, **values):
    """Keys of a JSON file set to other values."""
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))


def instead(file, content):
    return lambda folder: (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


def weight(name, tensor):
    def change(folder):
        save_file({**load_file(folder / WEIGHTS), name: tensor}, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def vocabulary(**tokens):
    def change(folder):
        values = json.loads((folder / TOKENS).read_text())
        values["model"]["vocab"] |= tokens
        (folder / TOKENS).write_text(json.dumps(values))

    return change


def index(weight_map):
    def change(folder):
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def adapter(weights="adapter_model.safetensors", **values):
    def change(folder):
        (folder / CONFIG).unlink()
        (folder / WEIGHTS).rename(folder / weights)
        base = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 4, "target_modules": ["c_attn"]}
        (folder / ADAPTER).write_text(json.dumps(base | values))

    return change


# What is done to a folder, and what is said by all who open it; None: some may use it.
FOLDERS = {
    "weights cut off": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000]),
        "header",
    ),
    "weights of nothing": (instead(WEIGHTS, b""), "header"),
    "a header of exabytes": (instead(WEIGHTS, b"\xff" * 16), "header"),
    "an index to nowhere": (index({"a": "nowhere.safetensors"}), "not a file next to it"),
    "an index that lies": (index({"nothing": "part.safetensors"}), None),
    "another shape": (weight("transformer.wte.weight", torch.zeros(3, 3)), "wte"),
    "complex numbers": (weight("transformer.ln_f.weight", torch.zeros(32, dtype=torch.complex64)), None),
    "no layers": (keys(CONFIG, n_layer=0), "n_layer is 0"),
    "fewer than no layers": (keys(CONFIG, n_layer=-1), "n_layer is -1"),
    "a billion layers": (keys(CONFIG, n_layer=10**9), "n_layer is 1000000000"),
    "layers in words": (keys(CONFIG, n_layer="two"), "n_layer"),
    "heads below none": (keys(CONFIG, n_head=-2), "n_head is -2"),
    "a width of terabytes": (keys(CONFIG, n_embd=10**12), "n_embd is 1000000000000"),
    "weights packed in no known way": (
        keys(CONFIG, quantization_config={"quant_method": "evil"}),
        "quantized by 'evil'",
    ),
    "another model's type": (keys(CONFIG, model_type="llama"), "different models"),
    "no model's type": (keys(CONFIG, model_type="nothing"), None),
    "a class that is a number": (keys(CONFIG, architectures=5), "not a list of names"),
    "classes that are numbers": (keys(CONFIG, architectures=[5]), "not a list of names"),
    "a deep configuration": (instead(CONFIG, "[" * 100_000), None),
    "ends in words": (keys(GENERATION, eos_token_id="x"), None),
    "ends in an object": (keys(GENERATION, eos_token_id={"a": 1}), None),
    "sampling in words": (keys(GENERATION, temperature="x", top_k=-5), None),
    "a tokenizer cut off": (instead(TOKENS, '{"version"'), None),
    "an id beyond all rows": (vocabulary(zzz=5000), None),
    "an id below none": (vocabulary(zzz=-1), None),
    "one id twice": (vocabulary(zzz=5), None),
    "an added token that clashes": (keys(SAYS, added_tokens_decoder={"5": {"content": "<x>", "special": True}}), None),
    "an end that is a number": (keys(SAYS, eos_token=5), None),
    "an unknown end": (keys(SAYS, eos_token="<nothing>"), None),
    "a template that is a number": (keys(SAYS, chat_template=5), None),
    "a template of half a character": (keys(SAYS, chat_template="\ud800"), None),
    "a template that is not there": (keys(SAYS, chat_template={"tools": "x"}), None),
    "a template that takes all memory": (instead("chat_template.jinja", "{{ 'a' * 10**10 }}"), None),
    "a template in no encoding": (instead("chat_template.jinja", b"\xff\xff"), None),
    "an adapter of a pickle": (adapter("adapter_model.bin"), "a pickle"),
    "an adapter of no rank": (adapter(r=-4), None),
    "an adapter of a rank in words": (adapter(r="x"), None),
    "an adapter of nothing": (adapter(target_modules=["nothing"]), None),
}


def uses(folder, out):
    def generate():
        opened = open_model(str(folder))
        return list(opened.decoding.reply(opened.model, "words and", "", Sampling(2)).pieces)

    def chat():
        return list(ChatSession(open_model(str(folder)), ChatSettings(new_tokens=2), "").answer("words"))

    def train():
        model_config = ModelConfig.model_validate({"from": str(folder)})
        check_model(model_config, CAUSAL)
        check_pretrained(model_config, CAUSAL)
        build_model(ModelRequest(model_config, CAUSAL, block=8, seed=0), load_tokenizer(str(folder)))

    def write():
        export(str(folder), out, merge=(folder / ADAPTER).exists())

    return generate, chat, train, write


@pytest.mark.parametrize("name", FOLDERS)
def test_a_damaged_folder_is_used_or_refused_in_words(name, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "base")
    folder = shutil.copytree(whole, tmp_path / "model")
    change, says = FOLDERS[name]
    change(folder)
    said = []
    for use in uses(folder, tmp_path / "out"):
        try:
            use()
        except InputError as error:
            said.append(str(error))
    if says is not None:
        assert len(said) >= 3, said
        assert all(says in text or "adapter" in name for text in said), said


def test_a_pattern_that_goes_back_and_forth(whole, tmp_path, capfd):
    folder = shutil.copytree(whole, tmp_path / "model")
    values = json.loads((folder / TOKENS).read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, values["pre_tokenizer"]]}
    (folder / TOKENS).write_text(json.dumps(values))
    tokenizer = load_tokenizer(str(folder))
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
        with pytest.raises(InputError, match="cannot split a text: Onig: Regex search error: retry-limit"):
            list(encode(["a" * 30 + "!"]))
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.processes
def test_prompts_that_are_no_text(whole, tmp_path):
    (tmp_path / "context.txt").write_bytes(b"\xff\xfe words")
    with pytest.raises(InputError, match=r"context\.txt is not UTF-8"):
        _read_text_or_file(str(tmp_path / "context.txt"))
    for options in (["--prompt", "words \udcff"], ["--prompt", "-"]):
        done = artel("generate", whole, *options, "--max-new-tokens", "1", input="\udcff words")
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert "artel: --prompt: is not UTF-8" in done.stderr
