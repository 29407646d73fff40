"""The language part of models that take images: trained as a text model, saved inside the whole, the rest untouched."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import artel as api
from artel.config import ModelConfig, TokenizerTraining, parse_run
from artel.errors import InputError, WorkError
from artel.generation.generate import Sampling, generate_text
from artel.inference import export, open_model
from artel.models.document_mask import check_documents
from artel.models.loading.build import build_model
from artel.models.loading.check import check_model, check_pretrained
from artel.models.loading.language_part import get_multimodal
from artel.models.loading.request import ModelRequest
from artel.models.loading.save import save_model
from artel.models.quantization import set_compute_precision
from artel.planning.plan.batches import plan_data
from artel.planning.plan.length import disk_bytes
from artel.planning.plan.models import ModelOutline
from artel.tokens import train_tokenizer
from support import WORKERS
from support.multimodal import FAMILIES, PROCESSOR_FILES, differing, save_multimodal, tensors_of
from support.objectives import conversations, preferences
from support.runs import largest_difference, losses, merged, succeed, torchrun, write_run

ROOT = Path(__file__).resolve().parents[1]
CASES = WORKERS / "train_cases.py"
CAUSAL = "AutoModelForCausalLM"
IMAGES = ("vision", "visual", "multi_modal", "embed_vision")


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """A folder for each family; Gemma's is in shards, of which some hold the vision tower alone."""
    place = tmp_path_factory.mktemp("models")
    small = {"gemma3": {"max_shard_size": "30KB"}}
    return {name: save_multimodal(place / name, name, tokenizer, **small.get(name, {})) for name in FAMILIES}


def run_file(place, folder, **changes):
    """Three steps of a few rows, with a checkpoint after the second."""
    run = {
        "run": str(place / "run"),
        "data": {"sources": [{"format": "dummy", "documents": 60}], "validation": 0, "block": 32,
                 "store": str(folder.parent / "stores")},
        "model": {"from": str(folder)},
        "train": {"steps": 3, "batch": 8, "micro_batch": 8, "learning_rate": 1e-2, "warmup": 0, "compile": "off",
                  "precision": "fp32", "threads": 1, "activation_checkpointing": "none"},
        "checkpoint": {"every": 2, "keep": 5},
        "prepare": {"workers": 1},
        "track": ["jsonl"],
    }  # fmt: skip
    return merged(run, changes)


def trained(run):
    """The model of a run's last step, in memory."""
    models = []
    api.train(run, callbacks=[lambda run: models.append(run.strategy.model)])
    return models[-1].eval()


def logits(model):
    ids = torch.randint(3, 200, (2, 31), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def whole_model(folder):
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def planned_bytes(run):
    """What `artel plan` says that the finished model of a run takes on the disk."""
    config = parse_run(run, {}, {})
    data = plan_data(config)
    outline = ModelOutline.from_config(config, data.objective, data.tokenizer)
    return disk_bytes(config, outline.build("fp32"), get_multimodal(outline.full_model), data, None)["model"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_opens_with_the_logits_that_were_trained(family, folders, tmp_path):
    folder, run = folders[family], run_file(tmp_path, folders[family])
    model = trained(run)
    made = tmp_path / "run" / "model"
    assert not [name for name, _ in model.named_parameters() if any(part in name for part in IMAGES)]
    theirs = whole_model(made)
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=1e-5)
    changed = differing(folder, made)
    assert changed
    assert not [name for name in changed if any(part in name for part in IMAGES)]
    assert planned_bytes(run) == sum(tensor.nbytes for tensor in tensors_of(made).values())
    before, after = ({file.name for file in each.glob("*.safetensors")} for each in (folder, made))
    assert before == after
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            assert (made / name).read_bytes() == (folder / name).read_bytes()
    if family in ("llava", "gemma3"):
        assert type(AutoProcessor.from_pretrained(made)) is type(AutoProcessor.from_pretrained(folder))
    if family == "qwen3_vl":
        succeed("push", tmp_path / "run", "me/tiny", "--dry-run", tmp_path / "pushed")
        card = (tmp_path / "pushed" / "README.md").read_text()
        assert "AutoModelForImageTextToText.from_pretrained(name)" in card
    opened = open_model(str(tmp_path / "run"))
    torch.testing.assert_close(logits(opened.model.eval()), logits(model), atol=1e-6, rtol=1e-5)
    assert list(generate_text(opened.model, opened.tokenizer, "words and", Sampling(new_tokens=4, top_k=200), 32))
    check_documents(opened.model, causal=True)
    # Killed in its third step, it ends with the same files.
    weights = tensors_of(made)
    for path in (made, tmp_path / "run" / "checkpoints" / "step-000000003"):
        shutil.rmtree(path)
    (tmp_path / "run" / "result.json").unlink()
    trained(run)
    again = tensors_of(made)
    assert all(weights[name].equal(again[name]) for name in weights)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_adapters_fit_the_whole_alone_and_merged(family, folders, tmp_path):
    """The vision tower of Gemma 3 has layers of the same names as its language part: it gets no adapter."""
    folder = folders[family]
    model = trained(run_file(tmp_path, folder, model={"lora": {"rank": 4}}))
    expected = logits(model)
    adapter = tmp_path / "run" / "model"
    theirs = PeftModel.from_pretrained(whole_model(folder).float(), adapter).eval()
    torch.testing.assert_close(logits(theirs), expected, atol=1e-5, rtol=1e-5)
    adapted = [name for name, _ in theirs.named_parameters() if "lora_" in name]
    assert adapted
    assert not [name for name in adapted if any(part in name for part in IMAGES)]
    torch.testing.assert_close(logits(open_model(str(tmp_path / "run")).model.eval()), expected, atol=1e-5, rtol=1e-5)
    export(str(tmp_path / "run"), tmp_path / "merged", merge=True)
    changed = differing(folder, tmp_path / "merged")
    assert changed
    assert not [name for name in changed if not name.endswith("proj.weight") or any(part in name for part in IMAGES)]
    merged_whole = whole_model(tmp_path / "merged")
    assert merged_whole.dtype == torch.bfloat16  # the base's
    torch.testing.assert_close(logits(merged_whole.float()), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_adapters_over_quantized_weights(quantize, folders, tmp_path):
    """And merged they are in the whole, unquantized."""
    folder = folders["gemma3"]
    model = trained(run_file(tmp_path, folder, model={"lora": {"rank": 4}, "quantize": quantize}))
    assert any("bitsandbytes" in type(module).__module__ for module in model.modules())
    opened = open_model(str(tmp_path / "run")).model.eval()
    set_compute_precision(opened, "fp32")
    torch.testing.assert_close(logits(opened), logits(model), atol=1e-5, rtol=1e-5)
    export(str(tmp_path / "run"), tmp_path / "merged", merge=True)
    theirs = PeftModel.from_pretrained(whole_model(folder).float(), tmp_path / "run" / "model").eval()
    merged_whole = whole_model(tmp_path / "merged").float()
    torch.testing.assert_close(logits(merged_whole), logits(theirs), atol=2e-2, rtol=2e-2)


@pytest.mark.slow
def test_what_is_frozen_and_what_did_not_change_keeps_its_bits(folders, tmp_path):
    """And a folder that was saved is the beginning of another run."""
    folder = folders["mistral3"]
    freeze = {"freeze": ["model.embed_tokens*", "model.layers.0.*"]}
    trained(run_file(tmp_path, folder, model=freeze))
    made = tmp_path / "run" / "model"
    changed = differing(folder, made)
    assert changed
    assert not [name for name in changed if "embed_tokens" in name or "layers.0." in name]
    second = run_file(tmp_path, made, run=str(tmp_path / "second"), model=freeze)
    trained(second)
    assert differing(made, tmp_path / "second" / "model") == changed
    export(str(made), tmp_path / "copy")
    assert not differing(made, tmp_path / "copy")


def test_embeddings_that_grow_and_that_are_tied_no_longer(folders, tmp_path):
    folder = folders["qwen3_vl"]
    larger = train_tokenizer(iter(["words and words, again. " * 50]), TokenizerTraining(vocab=271, special=["<a>"]))
    model = build_model(ModelRequest(ModelConfig.model_validate({"from": str(folder)}), CAUSAL, block=8), larger).model
    assert model.config.tie_word_embeddings
    rows = model.get_input_embeddings().weight.shape[0]
    assert rows == larger.vocabulary
    save_model(model, larger, tmp_path / "grown")
    assert whole_model(tmp_path / "grown").get_input_embeddings().weight.shape[0] == rows
    torch.testing.assert_close(logits(whole_model(tmp_path / "grown")), logits(model.eval()), atol=1e-5, rtol=1e-5)
    adapted = ModelConfig.model_validate({"from": str(folder), "lora": {"rank": 4}})
    model = build_model(ModelRequest(adapted, CAUSAL, block=8), larger).model
    save_model(model, larger, tmp_path / "adapter")
    opened = open_model(str(tmp_path / "adapter")).model
    torch.testing.assert_close(logits(opened), logits(model.eval()), atol=1e-5, rtol=1e-5)
    lora = {"rank": 4, "save": ["embed_tokens"]}
    expected = logits(trained(run_file(tmp_path, folder, model={"lora": lora})))
    export(str(tmp_path / "run"), tmp_path / "merged", merge=True)
    assert "lm_head.weight" in tensors_of(tmp_path / "merged")
    torch.testing.assert_close(logits(whole_model(tmp_path / "merged").float()), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page", ["docs/multimodal.md", "docs/ru/multimodal.md"])
def test_the_python_of_the_page(page, folders, tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    exec(block.replace("whole", str(folders["llava"])), names := {})
    assert type(names["processor"]).__name__ == "LlavaProcessor"


def refused(call, *words):
    with pytest.raises((InputError, WorkError)) as caught:
        call()
    said = str(caught.value)
    assert all(word in said for word in words), said


def test_what_cannot_be_trained_is_refused_by_name(folders, tmp_path):
    def from_folder(values):
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folders["gemma3"], folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        return ModelConfig.model_validate({"from": str(folder)})

    quantized = from_folder({"quantization_config": {"quant_method": "fp8"}})
    refused(lambda: check_model(quantized, CAUSAL), "takes images", "quantized")
    config = from_folder({})
    index = tmp_path / "model" / "model.safetensors.index.json"
    first = next(file for file in sorted((tmp_path / "model").glob("*.safetensors")))
    lacking = load_file(first).keys()
    first.unlink()
    values = json.loads(index.read_text())
    values["weight_map"] = {name: place for name, place in values["weight_map"].items() if name not in lacking}
    index.write_text(json.dumps(values))
    refused(lambda: check_pretrained(config, CAUSAL), "has no weights for")
    for kind in ("florence2", "blip"):
        (tmp_path / kind).mkdir()
        shutil.copy(folders["llava"] / "model.safetensors", tmp_path / kind)
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
        config = ModelConfig.model_validate({"from": str(tmp_path / kind)})
        refused(lambda config=config: check_model(config, CAUSAL), f"{kind} takes images")


def test_the_folder_it_came_from_is_needed_to_the_end(folders, tmp_path):
    folder = shutil.copytree(folders["llava"], tmp_path / "original")
    run = run_file(tmp_path, folder, data={"store": str(tmp_path / "stores")})

    def take_away(run):
        if run.step == 3:
            shutil.rmtree(folder)

    refused(lambda: api.train(run, callbacks=[take_away]), "original", "restore it")
    refused(lambda: trained(run), "original")
    shutil.copytree(folders["llava"], folder)
    api.train(run)
    assert differing(folder, tmp_path / "run" / "model")


CUTS = {"one": (1, {}), "ddp": (2, {"data": "ddp"}), "fsdp": (2, {"data": "fsdp"}), "tensor": (2, {"tensor": 2}),
        "pipeline": (2, {"pipeline": 2})}  # fmt: skip
CASES_OF = {
    "causal": ("gemma3", {}, CUTS),
    "chat": ("mistral3", {"objective": "chat", "data": {"block": 96}}, ("one", "ddp", "fsdp")),
    "preference": ("qwen3_vl", {"objective": "preference", "data": {"block": 96}}, ("one", "fsdp")),
    "experts": ("qwen3_5_moe", {}, ("one", "fsdp")),
}


@pytest.mark.processes
def test_every_objective_however_the_model_is_split(folders, tmp_path):
    """Losses are those of one process, and the other parts of the whole stay untouched."""
    source = {"chat": conversations, "preference": preferences}
    files: dict[str, list] = {cut: [] for cut in CUTS}
    for name, (family, changes, cuts) in CASES_OF.items():
        for cut in cuts:
            data = changes.get("data", {}) | ({"sources": [source[name](tmp_path)]} if name in source else {})
            run = run_file(tmp_path, folders[family], run=str(tmp_path / f"{cut}-{name}"), parallel=CUTS[cut][1],
                           train={"micro_batch": 4})  # fmt: skip
            files[cut].append(write_run(tmp_path / f"{cut}-{name}.yaml", base=merged(run, changes | {"data": data})))
    for processes in (1, 2):
        several = [file for cut, of_cut in files.items() if CUTS[cut][0] == processes for file in of_cut]
        done = torchrun(processes, CASES, *several)
        assert done.returncode == 0, done.stderr[-3000:]
    for name, (family, _, cuts) in CASES_OF.items():
        one = losses(tmp_path / f"one-{name}")
        assert sorted(one) == [3]
        for cut in cuts:
            assert largest_difference(one, losses(tmp_path / f"{cut}-{name}")) < 1e-4, (name, cut)
            changed = differing(folders[family], tmp_path / f"{cut}-{name}" / "model")
            assert changed == differing(folders[family], tmp_path / f"one-{name}" / "model")
            assert changed
            assert not [name for name in changed if any(part in name for part in IMAGES)]
