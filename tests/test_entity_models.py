"""Taggers that artel did not train: their pipeline's spans, the order of their tags, labels that they do not have."""

import json

import pytest
import torch
from transformers import AutoModelForTokenClassification, RobertaConfig, RobertaForTokenClassification, pipeline

import artel
from artel.tokens import load_tokenizer
from support.entities import foreign, objective
from support.reading import rows_of
from support.runs import artel as command


def test_a_model_of_others_gives_what_their_pipeline_gives(tmp_path):
    folder = foreign(tmp_path / "ner", ["B-PER", "I-PER", "O", "B-LOC", "I-LOC"])
    text = "Wolfgang Amadeus Mozart-Schikaneder visited (and left) Vienna, Prague and unputdownable Salzburg." * 3
    expected = pipeline("token-classification", folder, aggregation_strategy="first")(text)
    found = artel.open(folder).entities(text)
    assert len(found) > 5
    assert [(each.start, each.end, each.label) for each in found] == [
        (each["start"], each["end"], each["entity_group"]) for each in expected]  # fmt: skip
    assert [each.score for each in found] == pytest.approx([each["score"] for each in expected], abs=1e-5)


def test_the_pipeline_takes_a_mark_for_a_part_of_the_word_with_a_byte_level_tokenizer(roberta, tmp_path):
    """A model that knows one name: its layer adds nothing to the embeddings, of which the head's rows are two."""
    text = "Anna went to Moscow."
    name, other = torch.tensor([1.0, -1.0] * 16), torch.tensor([1.0] * 16 + [-1.0] * 16)
    model = RobertaForTokenClassification(RobertaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=roberta.vocabulary,
        id2label={0: "O", 1: "B-LOC"}, label2id={"O": 0, "B-LOC": 1}, initializer_range=0.0, pad_token_id=1,
    ))  # fmt: skip
    with torch.no_grad():
        model.roberta.embeddings.word_embeddings.weight[:] = other
        model.roberta.embeddings.word_embeddings.weight[roberta.hf.encode(" Moscow", add_special_tokens=False)] = name
        model.classifier.weight[:] = torch.stack([other, name])
    model.save_pretrained(tmp_path)
    roberta.hf.save_pretrained(tmp_path)
    (glued,) = pipeline("token-classification", str(tmp_path), aggregation_strategy="first")(text)
    assert text[glued["start"] : glued["end"]].strip() == "Moscow."
    (found,) = artel.open(tmp_path).entities(text)
    assert (found.text, found.end) == ("Moscow", glued["end"] - 1)


def test_a_model_of_others_is_evaluated_in_the_order_of_its_tags(tmp_path):
    folder = foreign(tmp_path / "ner", ["L-PER", "B-PER", "O", "U-PER", "I-PER"])
    rows = rows_of(tmp_path, [{"text": "Anna Berg met Boris", "label": [[0, 9, "PER"], [14, 19, "PER"]]}])
    result = artel.open(folder).evaluate(rows, {"data.sources.0.format": "entities"})
    assert result.details["tables"]["labels"][0]["support"] == 2


def test_labels_that_a_model_does_not_have_are_told_once(tmp_path):
    folder = foreign(tmp_path / "ner", ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
    spans = [[0, 4, "Person"], [9, 13, "Org"]]
    rows = rows_of(tmp_path, [{"text": f"Anna met Mash {number}", "label": spans} for number in range(30)])
    with pytest.raises(artel.InputError) as refused:
        artel.open(folder).evaluate(rows, {"data.sources.0.format": "entities"})
    (problem,) = refused.value.problems
    assert problem.where == str(rows)
    assert problem.what == "this model has the labels PER, LOC, but the data have Org, Person"


def test_a_run_file_is_evaluated_by_the_labels_of_the_model_in_their_order(tmp_path):
    folder = foreign(tmp_path / "ner", ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
    spans = [[0, 4, "PER"], [9, 13, "LOC"]]
    rows = rows_of(tmp_path, [{"text": f"Anna left Oslo {number}", "label": spans} for number in range(30)])
    of_file = artel.open(folder).evaluate(rows, {"data.sources.0.format": "entities"})
    for labels in ("[LOC, PER]", "auto"):
        run = tmp_path / "run.yaml"
        run.write_text(
            f"objective: tokens\ntokens: {{labels: {labels}}}\nmodel: {{from: {folder}}}\n"
            f"data: {{sources: [{{path: {rows}, format: entities}}], validation: {rows}, block: 512, "
            "dedup: {exact: false}}\n"
        )
        assert artel.open(folder).evaluate(str(run)).metrics == pytest.approx(of_file.metrics)


def test_a_model_with_other_tags_than_the_run_is_refused(tmp_path):
    model = AutoModelForTokenClassification.from_pretrained(foreign(tmp_path, ["O", "B-PER", "I-PER"]))
    tokenizer = load_tokenizer(str(tmp_path))
    objective(tokenizer, labels=["PER"]).check(model)
    for other in ({"labels": ["LOC"]}, {"labels": ["PER"], "scheme": "bilou"}):
        with pytest.raises(artel.InputError, match="the model has the tags O, B-PER, I-PER, but the run O, B-"):
            objective(tokenizer, **other).check(model)


@pytest.mark.slow
def test_a_text_without_names_is_no_echo(tmp_path):
    """A head that gives every token the tag O."""
    folder = foreign(tmp_path / "ner", ["O", "B-PER", "I-PER"])
    model = AutoModelForTokenClassification.from_pretrained(folder)
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([1.0, 0, 0])
    model.save_pretrained(folder)
    plain = command("generate", folder, "--prompt", "It rains.")
    assert plain.stdout == "It rains.\n"
    assert "no names found" in plain.stderr
    as_json = command("generate", folder, "--prompt", "It rains.", "--json")
    assert json.loads(as_json.stdout)["entities"] == []
    assert "no names" not in as_json.stderr


def test_a_head_without_outside_gives_each_word_a_tag(tmp_path):
    folder = foreign(tmp_path / "pos", ["NOUN", "VERB", "ADP"])
    found = artel.open(folder).entities("Anna went to Moscow")
    assert [each.text for each in found] == ["Anna", "went", "to", "Moscow"]
    assert {each.label for each in found} <= {"NOUN", "VERB", "ADP"}
