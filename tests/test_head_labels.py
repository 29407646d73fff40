"""A head with labels, trained further: each row follows the name of its label, whatever the order of the labels."""

import string

import pytest
import torch
import transformers
from transformers import BertConfig, GPT2Config, RobertaConfig

from artel.config import ModelConfig, load_run
from artel.models.loading.build import build_model
from artel.models.loading.materialize import materialize
from artel.models.loading.request import ModelRequest
from artel.preparing import prepare
from support.labels import one_label, write_rows
from support.runs import write_run
from support.saved_models import word_pieces

TEXTS, TAGS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
MODELS = {
    "bert": (TEXTS, BertConfig, SMALL, ["classifier.weight", "classifier.bias"]),
    "roberta": (TEXTS, RobertaConfig, SMALL, ["classifier.out_proj.weight", "classifier.out_proj.bias"]),
    "gpt2": (TEXTS, GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 0}, ["score.weight"]),
    "tags": (TAGS, BertConfig, SMALL, ["classifier.weight", "classifier.bias"]),
}


def base_of(folder, tokenizer, name, labels):
    """Save a model whose head has a row for each of `labels`, with values of its own."""
    auto_class, kind, sizes, _ = MODELS[name]
    config = kind(vocab_size=tokenizer.vocabulary, id2label=dict(enumerate(labels)), **sizes)
    config.label2id = {label: number for number, label in enumerate(labels)}
    torch.manual_seed(0)
    model = getattr(transformers, auto_class).from_config(config)
    with torch.no_grad():
        for key in MODELS[name][3]:
            model.get_parameter(key).normal_()
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model


def built_of(folder, tokenizer, name, labels, *, on_meta=False, **model):
    config = ModelConfig.model_validate({"from": str(folder), **model})
    head = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
    request = ModelRequest(config, MODELS[name][0], block=16, seed=5, head_config={"num_labels": len(labels), **head})
    built = build_model(request, tokenizer, on_meta=on_meta)
    if on_meta:
        materialize(built.model, built.weights, device="cpu")
    return built


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("base", "labels", "kept", "said"),
    [
        (["c", "a", "b"], ["a", "b", "c"], {0: 1, 1: 2, 2: 0}, "rows kept: a, b, c"),
        (["c", "a"], ["a", "new", "c"], {0: 1, 2: 0}, "rows kept: a, c; newly initialized: new"),
        (["c", "a", "b"], ["b", "c"], {0: 2, 1: 0}, "rows kept: b, c; left out: a"),
        (["x", "y"], ["a", "b"], {}, "newly initialized: a, b; left out: x, y"),
        (["POS", "NEG"], ["neg", "pos"], {0: 1, 1: 0}, "rows kept: neg (there NEG), pos (there POS)"),
        (["A", "a"], ["a", "A"], {0: 1, 1: 0}, "rows kept: a, A"),
        (["LABEL_0", "LABEL_1"], ["1", "0"], {0: 1, 1: 0}, "rows kept: 1 (there LABEL_1), 0 (there LABEL_0)"),
        (["LABEL_0", "LABEL_1"], ["a", "b"], {0: 0, 1: 1}, "if this is not their order, write the labels in it"),
        (["LABEL_0", "LABEL_1"], ["a", "b", "c"], {}, "newly initialized: a, b, c; left out: LABEL_0, LABEL_1"),
    ],
)  # fmt: skip
def test_each_row_follows_the_name_of_its_label(tokenizer, tmp_path, name, base, labels, kept, said, on_meta):
    saved = base_of(tmp_path / "base", tokenizer, name, base)
    built = built_of(tmp_path / "base", tokenizer, name, labels, on_meta=on_meta)
    assert any(said in note for note in built.notes), built.notes
    for key in MODELS[name][3]:
        old, new = saved.get_parameter(key), built.model.get_parameter(key)
        assert len(new) == len(labels)
        for row in range(len(labels)):
            if row in kept:
                assert torch.equal(new[row], old[kept[row]])
            else:
                assert new[row].abs().max() < 0.2, "initialized: a small value, not one of the saved head"


def test_adapters_have_the_same_head(tokenizer, tmp_path):
    saved = base_of(tmp_path / "base", tokenizer, "bert", ["c", "a", "b"])
    for on_meta in (False, True):
        built = built_of(tmp_path / "base", tokenizer, "bert", ["a", "b", "c"], on_meta=on_meta, lora={"rank": 2})
        head = built.model.get_parameter("classifier.modules_to_save.default.weight")
        assert torch.equal(head, saved.classifier.weight[[1, 2, 0]])


def test_a_head_with_the_same_labels_is_loaded_as_it_is(tokenizer, tmp_path):
    saved = base_of(tmp_path / "base", tokenizer, "bert", ["c", "a", "b"])
    built = built_of(tmp_path / "base", tokenizer, "bert", ["c", "a", "b"])
    assert torch.equal(built.model.classifier.weight, saved.classifier.weight)
    assert not built.notes


def write_pretrained(path, folder, objective, source):
    source = {"path": str(path.with_suffix(".jsonl")), **source}
    return write_run(
        path,
        objective=objective,
        model={"from": str(folder), "config": None},
        tokenizer={"from": str(folder), "train": None},
        data={"sources": [source], "block": 32},
    )


def test_labels_of_the_records_have_the_order_of_the_base(tokenizer, tmp_path):
    write_rows(tmp_path / "run.jsonl", one_label(60))
    run = write_pretrained(tmp_path / "run.yaml", tmp_path / "base", "classification", {"format": "labels"})
    base_of(tmp_path / "base", tokenizer, "bert", ["Sport", "law", "food"])
    assert prepare(load_run(str(run))).config.classification.labels == ["sport", "law", "food"]
    base_of(tmp_path / "base", tokenizer, "bert", ["law", "other", "sport"])  # the first store is not used again
    assert prepare(load_run(str(run))).config.classification.labels == ["law", "sport", "food"]


@pytest.mark.parametrize(
    ("base", "labels"),
    [
        (["B-PER", "I-PER", "B-LOC", "I-LOC", "O"], ["B-PER", "I-PER", "B-LOC", "I-LOC", "O"]),
        (["O", "B-PER", "I-PER", "B-LOC", "I-LOC"], ["PER", "LOC"]),
        (["O", "I-PER", "I-LOC"], ["PER", "LOC"]),
        (["O", "B-ORG", "I-ORG"], ["LOC", "PER"]),
    ],
)
def test_tags_of_the_records_have_the_order_of_the_base(tokenizer, tmp_path, base, labels):
    texts = [f"Anna saw {letter} in Moscow" for letter in string.ascii_letters[:20]]
    rows = [{"text": text, "entities": [[0, 4, "PER"], [len(text) - 6, len(text), "LOC"]]} for text in texts]
    write_rows(tmp_path / "run.jsonl", rows)
    base_of(tmp_path / "base", tokenizer, "tags", base)
    word_pieces(tmp_path / "base")
    run = write_pretrained(tmp_path / "run.yaml", tmp_path / "base", "tokens", {"format": "entities"})
    assert prepare(load_run(str(run))).config.tokens.labels == labels
