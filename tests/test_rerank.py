"""Rerankers: what is drawn beside a document, losses by hand, orders, folders that other libraries open."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

import artel
from artel.config import RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.objectives.rerank import Rerank, ndcg, ranking_metrics, ranks
from artel.objectives.rerank_samples import NegativeSampler
from artel.objectives.statistics import spearman
from artel.text import Document, Match, Record, Rejected
from artel.tokens import TokenStore, evaluation_rows, micro_batches, train_tokenizer
from support.objectives import objective_run, written
from support.preferences import stored_documents
from support.serving import client_of, served_model

QUERY, DOCUMENTS = "Where is number 3?", ["No 4 is there.", "The number 3 is here, ", "The number 8 is here, " * 30]
MATCHES = [
    Match("one?", ("the first is one",), ("the second is two", "nothing here")),
    Match("two?", ("the second is two",)),
    Match("three?", ("the third is three", "three it is")),
    Match("four?", ("the fourth is four, as one would think of it",)),
]


@pytest.fixture(scope="module")
def tokenizer():
    text = " ".join(" ".join(match.texts) for match in MATCHES)
    return train_tokenizer(iter([text] * 40), TokenizerTraining(vocab=280), encoder=True)


def ranking(tokenizer, block=64, **more):
    run = {"objective": "rerank", "data": {"block": block}, "rerank": more}
    return Rerank(RunConfig.model_validate(run), tokenizer)


def made_of(objective, match, origin="a:1"):
    (made,) = objective.samples([Document(Record(match.query, origin, "a", match), "train")])
    return made


def model_of(tokenizer):
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(
        vocab_size=tokenizer.vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_labels=1,
        intermediate_size=64, pad_token_id=tokenizer.pad_id, initializer_range=0.3)).eval()  # fmt: skip


def batch_of(objective, part, epoch=0):
    """All samples of an epoch as one micro-batch, with a row of padding."""
    dataset = objective.dataset(part)
    (rows,) = micro_batches(dataset, np.arange(len(dataset)), np.full(len(dataset), epoch), rank=0, world_size=1,
                            batch_size=len(dataset) + 1, max_rows=len(dataset) + 1)  # fmt: skip
    return objective.batch(rows), rows


def test_a_record_has_a_sample_for_each_document_that_matches(tokenizer):
    objective = ranking(tokenizer)
    assert [len(made_of(objective, match).samples) for match in MATCHES] == [1, 1, 2, 1]
    cut = made_of(ranking(tokenizer, block=32), Match("one?", ("the first is one " * 20,), ("two " * 60, "no")))
    assert cut.counts == {"truncated": 2}
    assert made_of(objective, Match("one?", ("the first is one",), ("", "no"))).counts == {"negatives_left_out": 1}
    for match, reason in (
        (Match("one?"), "no_positive"),
        (Match("", ("one",)), "empty"),
        (Match("one?", ("",)), "empty"),
        (Match("one? " * 40, ("one",)), "query_too_long"),
        (Match("one?", ("one",), score=3.0), "bad_score"),
    ):
        made = made_of(objective, match, "a.jsonl:7")
        assert isinstance(made, Rejected)
        assert (made.origin, made.reason) == ("a.jsonl:7", reason)
    listwise = ranking(tokenizer, loss="listwise")
    made = made_of(listwise, Match("one?", ("one",), score=0.5), "a.jsonl:7")
    assert (made.origin, made.reason) == ("a.jsonl:7", "score")


def test_what_is_drawn_depends_on_seed_epoch_and_sample_alone(tokenizer, tmp_path):
    objective = ranking(tokenizer)
    part = stored_documents(objective, tmp_path / "store", MATCHES)
    drawing, again = NegativeSampler(part, 1), NegativeSampler(part, 1)
    texts = [tokenizer.decode(ids).strip() for ids in drawing.draw(2, 0, 4)]
    backwards = [again.draw(sample, epoch, 4) for epoch in (3, 0) for sample in (4, 2)]
    assert [tokenizer.decode(ids).strip() for ids in backwards[3]] == texts
    # Neither document that matches "three?", and no document twice; there are three others.
    assert sorted(texts) == sorted(match.positives[0] for match in MATCHES if match.query != "three?")
    by_epoch, by_seed = (
        {tuple(tuple(ids.tolist()) for ids in drawn) for drawn in draws}
        for draws in ((drawing.draw(2, epoch, 2) for epoch in range(20)),
                      (NegativeSampler(part, seed).draw(2, 0, 2) for seed in range(20)))
    )  # fmt: skip
    assert len(by_epoch) > 3
    assert by_seed >= by_epoch


def test_a_split_without_samples_has_nothing_to_draw(tokenizer, tmp_path):
    """As of a run with data.validation: 0."""
    objective = ranking(tokenizer)
    stored_documents(objective, tmp_path / "store", MATCHES)
    assert len(objective.dataset(TokenStore(tmp_path / "store").validation)) == 0


def test_what_a_record_names_itself_is_not_drawn_for_it(tokenizer, tmp_path):
    """Negatives that were mined are documents of the same corpus."""
    part = stored_documents(ranking(tokenizer), tmp_path / "store", MATCHES)
    drawing = NegativeSampler(part, 1)
    _, other, *_ = all_drawn = drawing.draw(2, 0, 4)
    drawn = drawing.draw(2, 0, 4, [other])
    assert [ids.tolist() for ids in drawn] == [ids.tolist() for ids in all_drawn if ids is not other]


def pairs_in(objective, part, rows, columns):
    """The (query, document) texts of each row, without padding."""
    decode = objective.tokenizer.decode
    return [
        [(decode(query).strip(), decode(document).strip()) for document in documents]
        for row in range(part.samples)
        for query, *documents in [objective._read_documents(rows, row, columns)]
    ]


def test_a_batch_of_padding_has_the_shape_of_the_others(tokenizer, tmp_path):
    """Each rank of a validation runs as many rows, also one that has no sample left: else the others wait for it."""
    objective = ranking(tokenizer, negatives=1)
    samples = objective.dataset(stored_documents(objective, tmp_path / "store", MATCHES))
    full, none = (objective.batch(evaluation_rows(samples, np.arange(count), 2)).tensors["present"] for count in (2, 0))
    assert full.shape == none.shape == (2, 20)
    assert full.any()
    assert not none.any()


@pytest.mark.parametrize("loss", ["pointwise", "listwise"])
def test_losses_by_hand(tokenizer, tmp_path, loss):
    """Each query with each of its documents alone, as transformers' tokenizer pairs them."""
    objective, model = ranking(tokenizer, loss=loss, negatives=2), model_of(tokenizer)
    part = stored_documents(objective, tmp_path / "store", MATCHES)
    batch, rows = batch_of(objective, part, epoch=3)
    with torch.no_grad():
        sums = objective.loss(model, batch)
    all_pairs = pairs_in(objective, part, rows, 3)
    assert [len(pairs) for pairs in all_pairs] == [3] * 5
    assert all_pairs[0][1:] == [("one?", "the second is two"), ("one?", "nothing here")]
    losses = []
    for pairs in all_pairs:
        scores = torch.tensor([logit(model, tokenizer, *pair) for pair in pairs])
        if loss == "listwise":
            losses.append(-scores.log_softmax(0)[0])
        else:
            losses += [-torch.nn.functional.logsigmoid(scores[0]), *-torch.nn.functional.logsigmoid(-scores[1:])]
    assert batch.targets == len(losses)
    assert sums.tolist() == pytest.approx([float(sum(losses)), len(losses)], rel=1e-5)


def logit(model, tokenizer, query, document):
    with torch.no_grad():
        return model(**tokenizer.hf(query, document, return_tensors="pt")).logits.item()


def test_scores_of_records_are_learned_as_probabilities(tokenizer, tmp_path):
    objective, model = ranking(tokenizer), model_of(tokenizer)
    scored = [Match("one?", ("the first is one",), score=0.9), Match("two?", ("nothing here",), score=0.0)]
    part = stored_documents(objective, tmp_path / "store", scored)
    batch, _ = batch_of(objective, part)
    with torch.no_grad():
        sums, outputs = objective.evaluate_batch(model, batch)
    logits = torch.tensor([logit(model, tokenizer, match.query, match.positives[0]) for match in scored])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor([0.9, 0.0]), reduction="sum")
    assert batch.tensors["present"].shape == (3, 1)
    assert sums.tolist() == pytest.approx([expected.item(), 2.0], rel=1e-5)
    figures = objective.metrics({"loss": 1.0, "targets": 2.0}, outputs[:2].double().numpy(), part)
    assert set(figures) == {"loss", "correlation"}
    assert figures["correlation"] == pytest.approx(1.0 if logits[0] > logits[1] else -1.0)


def test_a_query_has_all_its_documents_in_one_order(tokenizer, tmp_path):
    objective = ranking(tokenizer)
    part = stored_documents(objective, tmp_path / "store", MATCHES)
    outputs = np.array([
        [2.0, 1.0, 0.0],  # one?: first
        [0.0, 1.0, np.nan],  # two?: second of two
        [0.0, 1.0, 2.0],  # three?: its documents are third and second among these two others,
        [1.5, 9.0, 9.0],  # and the others of its second document stand in no order
        [1.0, 1.0, 1.0],  # four?: what is equal stands before it
    ])  # fmt: skip
    figures = objective.metrics({"loss": 1.0, "targets": 1.0}, outputs, part)
    log = np.log2
    gains = [1.0, 1 / log(3), (1 / log(3) + 1 / log(5)) / (1 + 1 / log(3)), 1 / log(4)]
    assert figures["mrr"] == pytest.approx(np.mean([1, 1 / 2, 1 / 2, 1 / 3]))
    assert figures["ndcg"] == pytest.approx(np.mean(gains))
    assert figures["accuracy"] == 0.25
    assert figures.keys() <= objective.metric_directions.keys()
    (table,) = objective.details(outputs, part)["tables"].values()
    assert sum(row["queries"] for row in table) == 4


def test_figures_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    chance = np.random.default_rng(0)
    for _ in range(20):
        scores, matches = chance.normal(size=30), chance.random(30) < 0.2
        matches[3] = True
        found = ranks(scores, matches)
        assert ndcg(found) == pytest.approx(metrics.ndcg_score([matches], [scores], k=10))
        average_rank = metrics.label_ranking_average_precision_score([matches], [scores])
        assert ranking_metrics([found[:1]])["mrr"] >= average_rank / len(found)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 2.0])) == pytest.approx(0.8660254)
    assert spearman(np.ones(3), np.arange(3.0)) == 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a short run."""
    run = objective_run(tmp_path_factory.mktemp("rerank") / "run.yaml", "rerank", train={"steps": 3, "batch": 8})
    return artel.train(run).folder


@pytest.mark.slow
def test_the_folder_gives_other_libraries_the_same_scores(folder, command):
    model = artel.open(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    plain = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        inputs = [tokenizer(QUERY, each, truncation=True, max_length=48, return_tensors="pt") for each in DOCUMENTS]
        expected = [plain(**one).logits.sigmoid().item() for one in inputs]
    assert model.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-5)
    ranked = model.rerank(QUERY, DOCUMENTS)
    assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
    assert {one.index: one.score for one in ranked} == pytest.approx(dict(enumerate(expected)), abs=1e-5)
    assert model.rerank(QUERY, DOCUMENTS, top_n=1) == ranked[:1]
    assert model.rerank(QUERY, []) == []
    assert [one.document for one in model.rerank(QUERY, DOCUMENTS[0])] == DOCUMENTS[:1]
    Path("notes.txt").write_text("\n\n".join(DOCUMENTS))
    _, out, _ = command("generate", folder, "--prompt", QUERY, "--context", "notes.txt", "--json")
    hits = json.loads(out)["hits"]
    assert [(hit["line"], hit["text"]) for hit in hits] == [(1 + 2 * one.index, one.document.strip()) for one in ranked]
    assert [hit["score"] for hit in hits] == pytest.approx([one.score for one in ranked], abs=1e-4)
    with pytest.raises(InputError, match="is a conversation"):
        model.score([{"role": "user", "content": QUERY}], DOCUMENTS)
    with pytest.raises(artel.InputError, match=r"has .* tokens, more than"):
        model.rerank(QUERY * 20, DOCUMENTS)
    with served_model(folder) as served, client_of(served) as client:
        answer = client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()
        assert [result["index"] for result in answer["results"]] == [one.index for one in ranked[:2]]
        assert answer["results"][0]["relevance_score"] == pytest.approx(ranked[0].score, abs=1e-6)
        scores = client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
        assert [one["score"] for one in scores] == pytest.approx(expected, abs=1e-5)
    evaluated = model.evaluate().metrics
    assert {"loss", "mrr", "ndcg", "accuracy"} == evaluated.keys()


def test_sentence_transformers_opens_the_folder(folder):
    from sentence_transformers import CrossEncoder  # takes seconds

    encoder = CrossEncoder(str(folder / "model"), max_length=48, device="cpu")
    scores = encoder.predict([(QUERY, document) for document in DOCUMENTS])
    assert artel.open(folder).score(QUERY, DOCUMENTS) == pytest.approx(scores.tolist(), abs=1e-5)


def test_a_store_without_anything_else_to_draw_is_refused(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "rerank")
    rows = [{"query": f"Where is it in {number}?", "positive": "It is here."} for number in range(40)]
    source = written(tmp_path / "same.jsonl", rows, "matches")
    with pytest.raises(artel.InputError, match="no other documents to draw them from"):
        artel.train(run, {"data.sources": [source], "tokenizer.train.vocab": 270})


@pytest.mark.slow
def test_bad_rows_are_listed_by_their_lines(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "rerank")
    good = [{"query": f"Where is {number}?", "positive": f"It is at {number}, or was there."} for number in range(60)]
    bad = [{"query": "What?", "document": "This.", "score": 4}, {"query": "Where? " * 50, "positive": "Here."}]
    source = written(tmp_path / "rows.jsonl", [*good, *bad], "matches")
    artel.prepare(run, {"data.sources": [source], "data.max_bad": 0.1})
    listed = [json.loads(line) for line in (run.with_suffix("") / "rejected.jsonl").read_text().splitlines()]
    assert {(Path(one["origin"]).name, one["reason"]) for one in listed} == {
        ("rows.jsonl:61", "bad_score"), ("rows.jsonl:62", "query_too_long")}  # fmt: skip
