"""Pairs of answers, an objective that prefers one of each, and a store of them."""

import pytest
import torch

from artel.config import RunConfig
from artel.objectives import DocumentSamples
from artel.objectives.preference import PreferenceOptimization
from artel.text import Document, Message, Preference, Record
from artel.tokens import StoreWriter, TokenStore
from support.templates import LLAMA_3

MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CONTROL = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
PAIRS = [
    ("Say hello.", "Hello, how are you?", "No."),
    ("Count.", "One, two, three.", "Seven, seven, seven, seven!"),
    ("Who are you?", "I am a model.", "I will not say that to you."),
]


def preferring(tokenizer, tmp_path, loss, **more):
    (tmp_path / "template.jinja").write_text(LLAMA_3)
    run = {
        "objective": "preference",
        "data": {"block": 512},
        "chat": {"template": str(tmp_path / "template.jinja")},
        "preference": {"loss": loss, **more},
    }
    return PreferenceOptimization(RunConfig.model_validate(run), tokenizer)


def stored(objective, folder, pairs=PAIRS):
    """A store part of the pairs as the objective makes them."""
    writer = StoreWriter(folder, objective.tokenizer.vocabulary)
    for question, chosen, rejected in pairs:
        answers = [Message("assistant", text) if text else None for text in (chosen, rejected)]
        fields = Preference((Message("user", question),), *answers)
        (made,) = objective.samples([Document(Record(question, "a:1", "a", fields), "train")])
        assert isinstance(made, DocumentSamples), made
        writer.add("train", made.samples, 1, "a:1")
    writer.close({"key": "k", "tokenizer": "t", "vocabulary": objective.tokenizer.vocabulary})
    return TokenStore(folder).train


def stored_documents(objective, folder, records):
    """A store part of these fields of records as the objective makes them."""
    writer = StoreWriter(folder, objective.tokenizer.vocabulary)
    for fields in records:
        (made,) = objective.samples([Document(Record("", "a:1", "a", fields), "train")])
        assert isinstance(made, DocumentSamples), made
        writer.add("train", made.samples, 1, "a:1")
    writer.close({"key": "k", "tokenizer": "t", "vocabulary": objective.tokenizer.vocabulary})
    return TokenStore(folder).train


def assert_same_as_trl(trainer, rows, model, loss):
    """Fail unless `loss()`, (sum, pairs), and its gradients are those of trl's trainer of `model` on these rows."""
    expected = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    sums = loss()
    mean = sums[0] / sums[1]
    mean.backward()
    assert sums[1] == len(PAIRS)
    assert mean.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6), name
