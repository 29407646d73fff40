"""artel export --to onnx: a graph that says what the model says, for any batch and length."""

import json

import numpy as np
import pytest
import torch
import transformers

from artel.config import TokenizerTraining
from artel.errors import InputError
from artel.inference import export
from artel.objectives.embedding.sentence_transformers import read_folder
from artel.tokens import train_tokenizer

ENCODERS = {
    "RobertaForMaskedLM": ("logits",),
    "ModernBertForSequenceClassification": ("logits",),
    "RobertaForQuestionAnswering": ("start_logits", "end_logits"),
}


@pytest.fixture(scope="module")
def tokenizer():
    training = TokenizerTraining(vocab=270)
    return train_tokenizer(iter(["words and words, again and again. " * 50]), training, encoder=True)


def saved(folder, tokenizer, architecture):
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ids = {"vocab_size": tokenizer.vocabulary, "pad_token_id": tokenizer.pad_id}
    model = kind(kind.config_class(**sizes, **ids, max_position_embeddings=66)).eval()
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model


@pytest.mark.long
@pytest.mark.parametrize("architecture", ENCODERS)
def test_the_graph_says_what_the_model_says(tmp_path, tokenizer, architecture):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = saved(tmp_path / "model", tokenizer, architecture)
    done = export(str(tmp_path / "model"), tmp_path / "out", to="onnx")
    assert done.kind == "onnx"
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tuple(output.name for output in session.get_outputs()) == ENCODERS[architecture]
    takes = {given.name for given in session.get_inputs()}
    for texts in (["a"], ["words and words", "again"], ["and again"] * 5 + ["words, " * 12]):
        inputs = {name: row for name, row in opened(texts, padding=True, return_tensors="pt").items() if name in takes}
        with torch.no_grad():
            expected = model(**inputs)
        computed = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        for name, array in zip(ENCODERS[architecture], computed, strict=True):
            np.testing.assert_allclose(array, expected[name].numpy(), atol=2e-5)


def test_a_model_that_writes_is_refused_before_it_is_loaded(tmp_path, tokenizer):
    pytest.importorskip("onnxruntime")
    config = transformers.GPT2Config(vocab_size=tokenizer.vocabulary, n_layer=1, n_embd=16, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    with pytest.raises(InputError, match="generates token by token"):
        export(str(tmp_path / "model"), tmp_path / "out", to="onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("to", [None, "onnx"])
def test_what_other_libraries_read_goes_along(tmp_path, tokenizer, to):
    """Pooling of sentence-transformers lies in a folder of its own."""
    pytest.importorskip("onnxruntime")
    source, out = tmp_path / "model", tmp_path / "out"
    saved(source, tokenizer, "BertModel")
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"},
               {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]  # fmt: skip
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    (source / "thresholds.json").write_text('{"a": 0.5}')
    export(str(source), out, to=to)
    assert read_folder(str(out))["embedding"]["pooling"] == "cls"
    assert (out / "thresholds.json").read_text() == '{"a": 0.5}'
    assert (out / "model.safetensors").exists() is (to is None)
