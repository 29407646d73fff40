"""Names in texts: spans come back from windows, the figures are seqeval's, folders open with transformers' pipeline."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from seqeval.metrics import f1_score
from transformers import AutoModelForTokenClassification, AutoTokenizer

import artel
from artel.config import RunConfig, TokenizerTraining
from artel.inference import open_model
from artel.objectives.tokens.word_windows import NO_WORD
from artel.text import Ledger, read_documents
from artel.tokens import evaluation_rows, load_tokenizer, train_tokenizer
from artel.tokens.batches import single_row
from support.entities import document, foreign, objective
from support.reading import rows_of
from support.runs import artel as command
from support.runs import metrics, write_run
from support.saved_models import word_pieces
from support.serving import client_of, served_model

BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # fmt: skip
NAMES = {"objective": "tokens", "model": {"config": BERT}, "tokenizer": {"train": {"vocab": 380}},
         "data": {"sources": [{"format": "dummy", "kind": "entities", "documents": 400}], "block": 64}}  # fmt: skip


ROOT = Path(__file__).resolve().parents[1]


class Listed(list):
    """Samples that are no store's."""

    read = list.__getitem__


def test_each_row_of_a_micro_batch_is_what_it_is_alone(tmp_path):
    """Rows of unequal length in four groups, and one of padding."""
    names = {"labels": ["PER", "LOC"]}
    made = objective(load_tokenizer(str(foreign(tmp_path, ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))), 512, **names)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    documents = [
        document(f"{'Anna was here. ' * (number % 5)}Boris went to Oslo", (0, 4, "PER")) for number in range(13)
    ]
    samples = Listed(sample for each in made.samples(documents) for sample in each.samples)
    batch = made.batch(evaluation_rows(samples, np.arange(13), 14))
    assert len(batch.groups) == 4
    assert batch.targets == sum(np.count_nonzero(sample.flags) for sample in samples)
    with torch.no_grad():
        sums, tags = made.evaluate_batch(model, batch)
        alone = [made.evaluate_batch(model, made.batch(single_row(sample))) for sample in samples]
        logits = model(input_ids=torch.from_numpy(samples[3].ids)[None]).logits[0]
    assert torch.allclose(sums, torch.stack([each for each, _ in alone]).sum(dim=0), rtol=1e-5)
    assert torch.equal(tags[:13], torch.cat([each for _, each in alone]))
    words = samples[3].flags != NO_WORD
    assert torch.equal(tags[3, : len(words)][words], logits.argmax(dim=1)[words].float())


@pytest.mark.slow
def test_what_was_not_accepted_stands_in_the_ledger_and_in_the_list(tmp_path):
    rows = [{"text": f"Anna {number} met Boris in New York", "label": [[0, 4, "PER"]]} for number in range(300)]
    rows[7]["label"].append([5, 6, "NUMBER"])
    rows[8]["label"] = [[0, 8, "PER"], [0, 4, "PER"]]
    run = write_run(tmp_path / "run.yaml", {}, **NAMES | {
        "data": {"sources": [{"path": str(rows_of(tmp_path, rows)), "format": "entities"}], "block": 32},
        "tokens": {"labels": ["PER"]}, "tokenizer": {"train": {"vocab": 300}}})  # fmt: skip
    prepared = artel.prepare(run)
    ledger = prepared.ledger()
    assert ledger["documents"]["read"] == 300
    assert ledger["documents"]["kept"] + sum(ledger["documents"]["dropped"].values()) == 300
    assert ledger["changed"]["overlapping_left_out"] == 1
    listed = [json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert [(row["origin"].rpartition("/")[2], row["reason"]) for row in listed] == [("a.jsonl:8", "unknown_label")]


@pytest.mark.parametrize(
    ("text", "spans", "said"),
    [
        ("text {}", [], "no record has a marked span"),
        ("Мама {} дома", [[0, 4, "O"]], "a label is 'O'"),
        ("Мама {}", [[0, 4, "S"], [5, 7, "N"]], "every word of every record is marked"),
    ],
)
def test_labels_that_are_none_and_tags_of_words_are_told_apart(tmp_path, text, spans, said):
    file = rows_of(tmp_path, [{"text": text.format(number), "label": spans} for number in range(10, 30)])
    data = {"sources": [{"path": str(file), "format": "entities"}]}
    with pytest.raises(artel.InputError, match=said):
        artel.prepare(write_run(tmp_path / "run.yaml", {}, **NAMES | {"data": data}))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"tokens": {"scheme": "words"}}, "tokens.scheme"),
        ({"checkpoint": {"best": "perplexity"}}, "checkpoint.best"),
        ({"data": {"block": 8}}, "data.block"),
        ({"tokens": {"labels": []}}, "tokens.labels"),
        ({"tokens": {"labels": ["A", "A"]}}, "tokens.labels"),
        ({"data": {"sources": [{"format": "dummy"}]}}, "data.sources.0"),
        ({"parallel": {"context": 2}}, "parallel.context"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_is_read(tmp_path, changes, key):
    run = write_run(tmp_path / "run.yaml", NAMES, **changes)
    with pytest.raises(artel.InputError) as error:
        artel.train(run)
    assert len(error.value.problems) == 1, error.value
    assert key in error.value.problems[0].where


# a trained model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has learned names well enough for them to be found, in BIO."""
    run = write_run(tmp_path_factory.mktemp("names") / "names.yaml", NAMES, checkpoint={"best": "f1"},
                    train={"steps": 150, "batch": 16, "learning_rate": 3e-3})  # fmt: skip
    artel.train(run)
    return run.with_suffix("")


def validation(run):
    """(text, spans) of the documents that the run is judged by."""
    store = artel.prepare(run).open()
    return [(source["text"], [tuple(span) for span in source["spans"]]) for source in store.validation.references()]


def words_by_transformers(folder, text):
    """(start, end, tag) of each word, by transformers alone: the tag of its first token."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForTokenClassification.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
    places = inputs.pop("offset_mapping")[0].tolist()
    with torch.no_grad():
        tags = model(**inputs).logits[0].argmax(dim=-1).tolist()
    words = []
    for (start, end), tag in zip(places, tags, strict=True):
        start += len(text[start:end]) - len(text[start:end].lstrip())
        if start == end:
            continue
        if words and words[-1][1] == start and text[start - 1].isalnum() and text[start].isalnum():
            words[-1][1] = end
        else:
            words.append([start, end, model.config.id2label[tag]])
    return words


@pytest.mark.long
def test_the_figures_are_seqevals_on_what_transformers_alone_finds(trained):
    evaluated = artel.open(trained).evaluate()
    gold, guessed = [], []
    for text, spans in validation(trained):
        words = words_by_transformers(trained / "model", text)
        tags = ["O"] * len(words)
        for start, end, label in spans:
            inside = [at for at, (first, last, _) in enumerate(words) if first < end and last > start]
            tags[inside[0] : inside[-1] + 1] = [f"B-{label}", *[f"I-{label}"] * (len(inside) - 1)]
        gold.append(tags)
        guessed.append([tag for *_, tag in words])
    assert evaluated.metrics["f1"] == pytest.approx(f1_score(gold, guessed))
    assert evaluated.metrics["f1"] > 0.6
    right = sum(a == b for one, other in zip(gold, guessed, strict=True) for a, b in zip(one, other, strict=True))
    assert evaluated.metrics["accuracy"] == pytest.approx(right / sum(map(len, gold)))
    assert metrics(trained)[-1]["validation"]["f1"] == pytest.approx(evaluated.metrics["f1"])
    rows = {row["label"]: row for row in evaluated.details["tables"]["labels"]}
    assert rows.keys() == {"LOC", "ORG", "PER"}
    assert sum(row["support"] for row in rows.values()) == sum(len(spans) for _, spans in validation(trained))
    assert (
        json.loads((trained / "validation.json").read_text())["tables"]["labels"]
        == evaluated.details["tables"]["labels"]
    )


def test_the_folder_gives_the_same_logits_in_transformers(trained):
    opened, model = open_model(str(trained)), AutoModelForTokenClassification.from_pretrained(trained / "model")
    assert model.config.id2label == dict(enumerate(["O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER"]))
    inputs = AutoTokenizer.from_pretrained(trained / "model")("Anna Berg lives in New York.", return_tensors="pt")
    with torch.no_grad():
        expected, actual = (each.eval()(**inputs).logits for each in (model, opened.model))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_names_are_found_in_a_text_of_any_length_and_of_many_at_once(trained):
    model = artel.open(trained)
    texts = [text for text, _ in validation(trained)]
    alone = [model.entities(text) for text in texts]
    together = model.entities(texts)
    assert [[(each.start, each.end, each.label) for each in one] for one in together] == [
        [(each.start, each.end, each.label) for each in one] for one in alone]  # fmt: skip
    long = " ".join(texts)
    found = model.entities(long)
    assert all(long[each.start : each.end] == each.text for each in found)
    spans, at = set(), 0
    for text, gold in validation(trained):
        spans |= {(at + start, at + end, label) for start, end, label in gold}
        at += len(text) + 1
    right = len(spans & {(each.start, each.end, each.label) for each in found})
    assert 2 * right / (len(spans) + len(found)) > 0.6


@pytest.mark.parametrize("page", ["docs/entities.md", "docs/ru/entities.md"])
def test_the_python_of_the_page_prints_what_the_command_finds(page, trained, capsys):
    """The printed name of the run stands for a run that is there."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    exec(block.replace("runs/ner-ru", str(trained)).replace("Анна Каренина приехала в Москву.", "Anna is in Oslo."), {})
    found = artel.open(trained).entities("Anna is in Oslo.")
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == [each.label for each in found]


@pytest.mark.long
def test_the_commands_show_names(trained):
    text = "Anna Berg lives in New York."
    (prompt,) = [json.loads(command("generate", trained, "--prompt", text, "--json").stdout)]
    expected = artel.open(trained).entities(text)
    assert [(each["start"], each["end"], each["label"], each["text"]) for each in prompt["entities"]] == [
        (each.start, each.end, each.label, each.text) for each in expected]  # fmt: skip
    marked = text
    for each in reversed(expected):
        marked = f"{marked[: each.start]}[{each.text}]({each.label}){marked[each.end :]}"
    assert command("generate", trained, "--prompt", text).stdout.strip() == marked
    shown = command("data", "show", trained, "--count", "1").stdout
    (source, *_) = read_documents(RunConfig.model_validate(NAMES).data, Ledger())
    start, end, label = source.record.fields.spans[0]
    assert f"{source.record.text[start:end]}→{label}⟧" in shown
    assert json.loads(command("evaluate", trained, "--json").stdout)["models"][0]["details"]


def test_the_server_answers_with_spans(trained):
    with served_model(trained) as served, client_of(served) as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert "/v1/entities" in model["endpoints"]
        texts = ["Anna Berg lives in New York.", ""]
        data = client.post("/v1/entities", json={"input": texts}).json()["data"]
        assert [row["index"] for row in data] == [0, 1]
        expected = artel.open(trained).entities(texts)
        assert [[(each["start"], each["end"], each["label"]) for each in row["entities"]] for row in data] == [
            [(each.start, each.end, each.label) for each in found] for found in expected]  # fmt: skip
        assert client.post("/v1/classify", json={"input": "x"}).status_code == 400


def test_a_card_takes_the_pipeline_only_where_that_finds_the_words(roberta, tmp_path):
    """A small byte-level vocabulary has spaces as tokens of their own, which the pipeline takes for words."""
    names = {"labels": ["PER", "LOC"]}
    small = train_tokenizer(iter(["a small text of few words"] * 50), TokenizerTraining(vocab=270), encoder=True)
    word_pieces(tmp_path)
    for tokenizer, has_pipeline in ((small, False), (roberta, True), (load_tokenizer(str(tmp_path)), True)):
        assert ("pipeline(" in objective(tokenizer, **names).model_card_code()) is has_pipeline


# other schemes


@pytest.mark.long
def test_bilou(tmp_path):
    run = write_run(tmp_path / "bilou.yaml", NAMES, tokens={"scheme": "bilou"},
                    train={"steps": 120, "batch": 16, "learning_rate": 3e-3})  # fmt: skip
    trained = artel.train(run)
    assert artel.open(trained.folder).evaluate().metrics["f1"] > 0.5


@pytest.mark.slow
def test_parts_of_speech(tmp_path):
    """A tag for each word, also of words that artel takes apart."""
    rows = [{"tokens": ["The", kind, verb, "well-known", number, "."],
             "upos": ["DET", "NOUN", "VERB", "ADJ", "NUM", "PUNCT"]}
            for kind in ("miller", "baker", "sailor", "singer") for verb in ("sees", "hears", "meets", "calls")
            for number in ("two", "three", "four", "five", "six")]  # fmt: skip
    source = {"path": str(rows_of(tmp_path, rows)), "format": "entities", "kind": "words"}
    run = write_run(tmp_path / "pos.yaml", NAMES | {"data": {"sources": [source], "block": 32, "validation": 0.2},
                    "tokenizer": {"train": {"vocab": 310}}},
                    train={"steps": 60, "batch": 16, "learning_rate": 3e-3},
                    checkpoint={"best": "accuracy"})  # fmt: skip
    trained = artel.train(run)
    model = artel.open(trained.folder)
    result = model.evaluate()
    assert result.metrics["accuracy"] > 0.9
    assert {row["label"]: row["support"] for row in result.details["tables"]["labels"]}.keys() == {*rows[0]["upos"]}
    found = model.entities("The miller sees well-known six .")
    assert [str(each) for each in found] == [
        "The (DET)", "miller (NOUN)", "sees (VERB)", "well-known (ADJ)", "six (NUM)", ". (PUNCT)"]  # fmt: skip
