"""Labels of texts, several labels, numbers, pairs: what records decide, the split, bad rows, and models in use."""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from sklearn.metrics import f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    pipeline,
)

import artel
from artel.config import TokenizerTraining, load_run
from artel.errors import InputError
from artel.planning.plan.batches import plan_data
from artel.preparing import is_prepared, prepare
from artel.reports.page import Language
from artel.tokens import train_tokenizer
from support.labels import DECODER, ROWS, label_run, one_label, several_labels, write_rows
from support.messages import logged
from support.runs import metrics as metric_lines
from support.serving import client_of, served_model

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ["ball team goal win", "soup bread", "the court and the judge " * 30]


def prepared(path, rows, **changes):
    return prepare(load_run(str(label_run(path, rows, **changes))))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Gives the folder of a run of such rows, which is trained once."""

    @cache
    def folder(name):
        return artel.train(label_run(tmp_path_factory.mktemp(name) / "run.yaml", ROWS[name]())).folder

    return folder


@pytest.mark.parametrize(
    ("name", "kind", "labels"),
    [("single", "single", ["food", "law", "sport"]), ("multi", "multi", ["food", "law", "sport"]),
     ("number", "number", []), ("pairs", "single", ["other", "same"])],
)  # fmt: skip
def test_the_records_decide_kind_and_labels(tmp_path, name, kind, labels):
    decided = prepared(tmp_path / "run.yaml", ROWS[name]()).config.classification
    assert (decided.kind, decided.labels) == (kind, labels)


@pytest.mark.parametrize("content", [b"[]", b'"x"', b'{"kin', b"", b"{}", b'{"kind": 3, "labels": "x"}'])
def test_what_the_records_decided_is_read_again_where_it_is_damaged(tmp_path, content):
    run = load_run(str(label_run(tmp_path / "run.yaml", ROWS["single"](40), data={"store": str(tmp_path / "stores")})))
    decided = prepare(run).config.classification
    (file,) = (tmp_path / "stores").glob("*.settled.json")
    file.write_bytes(content)
    assert prepare(run).config.classification == decided


def test_a_plan_groups_rows_as_the_device_that_it_is_made_for(tmp_path):
    """Not as this machine: rows for a GPU would be sixteen times as many groups, which plans trace one by one."""
    run = load_run(str(label_run(tmp_path / "run.yaml", ROWS["single"](40), data={"block": 64})))
    assert not is_prepared(run)
    prepare(run)
    assert is_prepared(run)
    data = plan_data(run)
    counts = {device: len(data.with_layout_for(lambda: None, device).batch(256).groups) for device in ("cpu", "cuda")}
    assert counts == {"cpu": 16, "cuda": 1}


def test_whole_numbers_are_labels_in_their_order(tmp_path):
    rows = [{"text": row["text"], "label": number % 12} for number, row in enumerate(one_label(60))]
    decided = prepared(tmp_path / "run.yaml", rows).config.classification
    assert (decided.kind, decided.labels) == ("single", [str(number) for number in range(12)])
    as_floats = [row | {"label": f"{row['label'] % 2}.0"} for row in rows]  # a column of pandas with gaps
    assert prepared(tmp_path / "floats.yaml", as_floats).config.classification.labels == ["0.0", "1.0"]
    odd = [row | {"label": "²³"[row["label"] % 2]} for row in rows]
    assert prepared(tmp_path / "odd.yaml", odd).config.classification.labels == ["²", "³"]
    as_number = prepared(tmp_path / "number.yaml", rows, classification={"kind": "number"})
    assert as_number.config.classification.kind == "number"
    sample = as_number.open().train.sample(0)
    assert np.int64(sample.numbers[1]).view(np.float64) in range(12)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [([{"text": f"a {number}", "label": "x"} for number in range(9)], {}, "all 9 texts have the label 'x'"),
     ([{"text": f"a {number}", "label": f"id-{number}"} for number in range(99)], {},
      "99 different labels: id-0, id-1"),
     (one_label(40), {"checkpoint": {"best": "rmse"}}, "'rmse' is not a metric of this task"),
     (ROWS["number"](40), {"classification": {"balanced_sampling": True}}, "these texts have numbers"),
     (one_label(40), {"classification": {"kind": "number", "loss": "focal"}}, "kind: number has none"),
     (one_label(40), {"classification": {"loss": "focal", "smoothing": 0.1}}, "remove one of them"),
     (one_label(40), {"classification": {"labels": [True, False]}}, "write labels in quotes"),
     (one_label(40), {"data": {"block": 6}}, "leaves no room"),
     (one_label(40), {"classification": {"labels": ["x"]}}, "fewer than two labels"),
     (ROWS["number"](40), {"classification": {"kind": "number", "labels": ["a", "b"]}}, "set kind: single or multi"),
     (one_label(40), {"classification": {"kind": "multi", "labels": []}}, "labels: is empty"),
     (one_label(40), {"data": {"validation": {"fraction": 0.2, "by": "chapter"}}}, "by: chapter needs plain text")],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused_before_training(tmp_path, rows, changes, message):
    run = label_run(tmp_path / "run.yaml", rows, **changes)
    with pytest.raises(InputError, match=message):
        artel.train(run)
    assert not (tmp_path / "run" / "checkpoints").exists()


def splits(prepared_run, rows):
    """{split: texts} by the origins of the store."""
    store = prepared_run.open()
    return {
        split: [rows[int(origin.rpartition(":")[2]) - 1]["text"] for origin, _ in getattr(store, split).iter_samples()]
        for split in ("train", "validation")
    }


def test_validation_is_held_out_of_each_label(tmp_path):
    rows = [*one_label(200), {"text": "alone", "label": "odd"}]
    made = prepared(tmp_path / "run.yaml", rows)
    by_split = splits(made, rows)
    label_of = {row["text"]: row["label"] for row in rows}
    counts = {split: dict.fromkeys(("food", "law", "odd", "sport"), 0) for split in by_split}
    for split, texts in by_split.items():
        for text in texts:
            counts[split][label_of[text]] += 1
    assert counts == {"train": {"food": 24, "law": 8, "odd": 1, "sport": 128},
                      "validation": {"food": 6, "law": 2, "odd": 0, "sport": 32}}  # fmt: skip
    ledger = made.ledger()
    assert ledger["split"]["by"] == "label"
    assert ledger["split"]["labels"]["law"] == {"train": 8, "validation": 2}
    assert any("of 1 labels no text is held out" in note and "'odd'" in note for note in made.notes())
    assert ledger["parts"]["validation"]["documents"] == 40
    # It depends on the texts and their labels alone: neither on their order and files, nor on the other labels.
    other = [row for row in reversed(rows) if row["label"] != "sport"]
    again = splits(prepared(tmp_path / "again.yaml", other), other)
    assert set(again["validation"]) == {text for text in by_split["validation"] if label_of[text] != "sport"}
    plain = prepared(tmp_path / "plain.yaml", rows, data={"validation": {"fraction": 0.2, "by": "document"}})
    assert "split" not in plain.ledger()
    assert set(splits(plain, rows)["validation"]) != set(by_split["validation"])


def test_a_text_with_several_rows_stays_on_one_side(tmp_path):
    rows = [{"text": f"premise {number % 40}", "then": f"then {number}", "label": "abc"[number % 3]}
            for number in range(120)]  # fmt: skip
    by_split = splits(prepared(tmp_path / "run.yaml", rows), rows)
    assert by_split["validation"]
    assert not set(by_split["validation"]) & set(by_split["train"])


def test_labels_are_those_of_training_texts(tmp_path):
    """One that stands in a validation file alone is no class: its row is listed."""
    held_out = write_rows(tmp_path / "held-out.jsonl", [{"text": f"once {n}", "label": "law"} for n in range(12)])
    with held_out.open("a") as file:
        file.write('{"text": "a poem", "label": "Pushkin"}\n')
    data = {"validation": str(held_out), "max_bad": 0.1}
    made = prepared(tmp_path / "run.yaml", one_label(40), data=data)
    assert made.config.classification.labels == ["food", "law", "sport"]
    (line,) = map(json.loads, (tmp_path / "run" / "rejected.jsonl").read_text().splitlines())
    assert (line["origin"], line["reason"]) == (f"{held_out}:13", "unknown_label")
    assert line["detail"].startswith("the label 'Pushkin' occurs in no training text; the run's are (food, law, sport)")


def test_swapped_columns_are_asked_about_in_a_few_words(tmp_path):
    rows = [{"text": f"w{number}", "label": f"a long paragraph {number} " * 30} for number in range(99)]
    with pytest.raises(InputError) as error:
        prepared(tmp_path / "run.yaml", rows)
    (problem,) = error.value.problems
    assert problem.fix == "labels are longer than texts: are `field` and `label` of the source swapped?"
    assert "a long paragraph 0 a long paragraph 0 a…," in problem.what
    assert len(problem.what) < 200


@pytest.mark.parametrize("content", ["body,author\na,b\n", '{"body": "a", "label": "b"}\n'], ids=["csv", "jsonl"])
def test_a_column_of_another_name_can_be_named_on_the_command_line(tmp_path, content):
    """`artel evaluate RUN --data FILE` has no source in which to name it."""
    file = tmp_path / f"rows.{'csv' if content.startswith('body') else 'jsonl'}"
    file.write_text(content)
    data = {"sources": [{"path": str(file), "format": "labels"}]}
    with pytest.raises(InputError, match=r"field: NAME, or data\.sources\.0\.field=NAME on the command line"):
        prepared(tmp_path / "run.yaml", one_label(1), data=data)
    data["sources"].insert(0, {"path": str(write_rows(tmp_path / "good.jsonl", one_label(200))), "format": "labels"})
    with pytest.raises(InputError, match=r"field: NAME, or data\.sources\.1\.field=NAME on the command line"):
        prepared(tmp_path / "run.yaml", one_label(1), data=data | {"max_bad": 0.0})


@pytest.mark.parametrize(
    ("labels", "notes"),
    [
        (["0", "1", "2", "-1"], ["'-1' is used as a label, but often marks missing labels"]),  # SNLI: no gold label
        (["-1", "0", "1"], []),  # a mood
        (["entailment", "neutral", "-"], ["'-' is used as a label, but often marks missing labels"]),
        (
            ["Good", "good", "bad", "BAD"],
            ["'BAD' and 'bad', 'Good' and 'good' differ only in case and are used as different labels"],
        ),
    ],
)
def test_labels_that_look_like_none_or_like_another_are_told(tmp_path, labels, notes):
    rows = [{**row, "label": labels[number % len(labels)]} for number, row in enumerate(one_label(40))]
    found = prepared(tmp_path / "run.yaml", rows, data={"validation": 0}).notes()
    assert [note.split(":")[0].split(";")[0] for note in found] == notes


def test_what_makes_figures_worth_little_is_told(tmp_path):
    """A validation of a few texts, and a share of texts that is too long."""
    rows = one_label(40) + [{"text": f"{number} " + "long " * 500, "label": "law"} for number in range(25)]
    section, data = {"too_long": "drop"}, {"block": 200, "validation": 0.1}
    notes = prepared(tmp_path / "run.yaml", rows, classification=section, data=data).notes()
    dropped = "25 of 65 documents are dropped, since they have more than 200 tokens"
    few = "validation has 5 documents, too few for meaningful metrics: write a larger data.validation"
    assert set(notes) == {few, f"{dropped}: set a larger data.block, or use shorter texts"}
    assert Language("ru").phrase(next(note for note in notes if note == few)).endswith("увеличьте data.validation")
    enough = {"block": 200, "validation": 0.2}
    assert prepared(tmp_path / "enough.yaml", one_label(90), classification=section, data=enough).notes() == []


def test_bad_rows_are_told_by_line_and_the_ledger_adds_up(tmp_path):
    rows = [*one_label(100), {"text": "a riddle", "label": "unheard"}, {"text": " ", "label": "law"},
            {"text": "two", "label": ["law", "food"]}, {"text": "word " * 400, "label": "law"},
            {"text": "none", "label": []}]  # fmt: skip
    labels = ["sport", "food", "law"]
    section = {"kind": "single", "labels": labels, "too_long": "drop"}
    data = {"max_bad": 0.1, "block": 200}
    made = prepared(tmp_path / "run.yaml", rows, classification=section, data=data)
    ledger = made.ledger()
    assert ledger["documents"] == {"read": 105, "kept": 100, "dropped": {
        "empty": 1, "longer_than_block": 1, "no_label": 1, "several_labels": 1, "unknown_label": 1}}  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert {(line["origin"].rpartition(":")[2], line["reason"]) for line in lines} == {
        ("101", "unknown_label"), ("102", "empty"), ("103", "several_labels"), ("105", "no_label")}  # fmt: skip
    (unknown,) = (line["detail"] for line in lines if line["reason"] == "unknown_label")
    assert unknown.startswith("the label 'unheard' is not a label of this run (sport, food, law); fix it")
    section["too_long"] = "truncate"
    cut = prepared(tmp_path / "cut.yaml", rows, classification=section, data=data)
    assert cut.ledger()["changed"] == {"trailing_space_removed": 1, "truncated": 1}
    assert max(len(cut.open().train.sample(number).ids) for number in range(cut.open().train.samples)) == 200
    with pytest.raises(InputError, match="4 of 105 records"):
        prepared(tmp_path / "strict.yaml", rows, classification=section)


def by_transformers(folder, inputs, **options):
    """What a pipeline of transformers says of each input: {label: score}."""
    classify = pipeline("text-classification", model=str(folder), top_k=None, **options)
    found = classify(inputs, truncation=True, max_length=48)
    return [{entry["label"]: entry["score"] for entry in entries} for entries in found]


def outputs(answer):
    """{label: probability}, and of a number what transformers calls it."""
    return answer.get("probabilities", {"LABEL_0": answer.get("number")})


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_transformers_opens_the_folder_and_says_the_same(trained, name):
    folder = trained(name)
    inputs = TEXTS if name != "pairs" else [[text, "judge case"] for text in TEXTS]
    asked = inputs if name != "pairs" else [{"text": first, "text_pair": second} for first, second in inputs]
    expected = by_transformers(folder / "model", asked)
    model = artel.open(folder)
    answers = model.classify(inputs)
    for answer, scores in zip(answers, expected, strict=True):
        assert outputs(answer) == pytest.approx(scores, abs=1e-5)
    assert ["truncated" in answer for answer in answers] == [False, False, True]
    assert outputs(model.classify([inputs[0]])[0]) == pytest.approx(outputs(answers[0]))
    # The same folder without its run is a model like any other's.
    foreign = artel.open(folder / "model")
    assert foreign.objective == "classification"
    for answer, same in zip(foreign.classify(inputs[:2]), answers, strict=False):
        assert answer.keys() == same.keys()
        assert outputs(answer) == pytest.approx(outputs(same), abs=1e-6)


@pytest.mark.parametrize("name", ROWS)
def test_the_figures_of_a_run_are_those_of_evaluate_and_of_transformers(name, tmp_path):
    folder = artel.train(label_run(tmp_path / "run.yaml", ROWS[name](), train={"steps": 40})).folder
    expected = json.loads((folder / "result.json").read_text())["validation"]
    assert artel.open(folder).evaluate().metrics == pytest.approx(expected, abs=1e-5)
    rows = ROWS[name]()
    store = prepare(load_run(str(folder / "config.yaml"))).open()
    held = [rows[int(origin.rpartition(":")[2]) - 1] for origin, _ in store.validation.iter_samples()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    pair = [row["then"] for row in held] if name == "pairs" else None
    inputs = tokenizer([row["text"] for row in held], pair, padding=True, truncation=True, max_length=48,
                       return_tensors="pt")  # fmt: skip
    numbers = model.config.label2id
    if name == "number":
        labels = torch.tensor([float(row["label"]) for row in held])
    elif name == "multi":
        labels = torch.tensor([[float(label in row["label"]) for label in numbers] for row in held])
    else:
        labels = torch.tensor([numbers[row["label"]] for row in held])
    with torch.no_grad():
        output = model(**inputs, labels=labels)
    assert float(output.loss) == pytest.approx(expected["loss"], abs=1e-5)
    if name in ("single", "pairs"):
        assert float((output.logits.argmax(dim=1) == labels).float().mean()) == pytest.approx(expected["accuracy"])
        assert expected["accuracy"] > 0.5
    if name == "multi":
        thresholds = orjson.loads((folder / "model" / "thresholds.json").read_bytes())
        chosen = output.logits.sigmoid() > torch.tensor([thresholds[label] for label in numbers])
        assert f1_score(labels, chosen, average="macro") == pytest.approx(expected["tuned_macro_f1"])
        assert expected["tuned_macro_f1"] >= expected["macro_f1"]


@pytest.mark.slow
def test_thresholds_decide_which_labels_a_text_has(trained, tmp_path):
    folder = shutil.copytree(trained("multi"), tmp_path / "run", symlinks=True)
    file = folder / "model" / "thresholds.json"
    answers = artel.open(folder).classify(TEXTS[:2])
    thresholds = orjson.loads(file.read_bytes())
    for answer in answers:
        above = {label for label, probability in answer["probabilities"].items() if probability > thresholds[label]}
        assert set(answer["labels"]) == above
    file.write_bytes(orjson.dumps({"food": 0, "law": 1, "sport": 1.0}))
    assert [answer["labels"] for answer in artel.open(folder).classify(TEXTS[:2])] == [["food"], ["food"]]
    file.write_text("[]")
    with pytest.raises(InputError, match="does not contain valid thresholds"):
        artel.open(folder)
    file.unlink()  # as in a foreign folder: half of a probability
    (answer,) = artel.open(folder).classify(TEXTS[:1])
    assert set(answer["labels"]) == {label for label, share in answer["probabilities"].items() if share > 0.5}
    said = logged()
    rows = write_rows(Path("rows.jsonl"), several_labels(40))
    result = artel.open(folder / "model").evaluate(str(rows))
    assert any("no thresholds (thresholds.json)" in line for line in said)
    assert "tuned_macro_f1" not in result.metrics  # thresholds are never chosen on what is judged
    assert list(result.details["tables"]) == ["labels, at 0.5"]


def test_the_model_of_an_early_stop_has_the_thresholds_of_its_own_validation():
    run = label_run(
        Path("run.yaml").absolute(), several_labels(), train={"steps": 200, "learning_rate": 0.05},
        validate={"every": 5, "patience": 2}, checkpoint={"every": 5, "best": "tuned_macro_f1"},
    )  # fmt: skip
    folder = artel.train(run).folder
    result = json.loads((folder / "result.json").read_text())
    assert result["model_step"] < result["steps"] < 200
    figures = artel.open(folder).evaluate().metrics
    best = max(line["validation"]["tuned_macro_f1"] for line in metric_lines(folder) if "validation" in line)
    assert figures["tuned_macro_f1"] == pytest.approx(best)


def test_models_that_write_learn_labels_too(tmp_path):
    folder = artel.train(label_run(tmp_path / "run.yaml", ROWS["single"](), model=DECODER)).folder
    (answer, *_) = artel.open(folder).classify(TEXTS)
    (expected, *_) = by_transformers(folder / "model", TEXTS)
    assert answer["probabilities"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_model_is_evaluated_on_other_rows_and_refuses_labels_it_does_not_know(trained):
    model = artel.open(trained("single"))
    write_rows(Path("test.jsonl"), [{"text": text, "label": "law"} for text in TEXTS])
    result = model.evaluate("test.jsonl")
    assert result.documents == 3
    assert result.details["matrices"]
    write_rows(Path("test.jsonl"), [{"text": text, "label": "war"} for text in TEXTS])
    with pytest.raises(InputError, match="'war' is not a label of this run"):
        model.evaluate("test.jsonl")


def test_a_model_of_others_reads_as_much_as_it_has_positions(tmp_path):
    tokenizer = train_tokenizer(
        iter(["words of one kind and another"] * 50), TokenizerTraining(vocab=270), encoder=True
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=tokenizer.vocabulary, max_position_embeddings=24, num_labels=3, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    assert artel.open(tmp_path).classify("words of one kind " * 50)["truncated"]


@pytest.mark.parametrize("page", ["docs/classification.md", "docs/ru/classification.md"])
def test_the_python_of_the_page(trained, page):
    Path("runs").mkdir()
    Path("runs/classify-ru").symlink_to(trained("pairs"))
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    *lines, last = block.strip().splitlines()
    names: dict = {}
    exec("\n".join(lines), names)
    assert {answer["label"] for answer in eval(last, names)} <= {"same", "other"}


def test_a_server_labels_texts_and_pairs(trained):
    folder = trained("pairs")
    expected = artel.open(folder).classify([["ball", "judge"], "soup"])
    with served_model(folder) as served, client_of(served) as client:
        answer = client.post("/v1/classify", json={"input": [["ball", "judge"]]}).json()
        assert answer["data"][0]["probabilities"] == pytest.approx(expected[0]["probabilities"])
        answer = client.post("/v1/classify", json={"input": "soup"}).json()
        assert (answer["object"], answer["data"][0]["label"]) == ("list", expected[1]["label"])
        assert client.post("/v1/classify", json={"input": " "}).status_code == 400
