"""`artel evaluate --corpus` and MTEB's tasks: figures beside other libraries', folders of BEIR, what is refused."""

import json

import numpy as np
import pytest
from datasets import Dataset

from artel.errors import InputError
from artel.inference import open_model
from artel.inference.benchmark_tasks import run_mteb, task_metrics
from artel.inference.retrieval import evaluate_on_corpus, read_beir
from support.messages import logged
from support.objectives import objective_run
from support.runs import artel, refused, succeed

WORDS = "one two three four five six seven eight nine ten".split()
DOCUMENTS = {f"d{number}": f"the answer to {number} is {WORDS[number % 10]}" for number in range(30)}
QUERIES = {f"q{number}": f"What is {WORDS[number]}?" for number in range(6)}
JUDGED = {f"q{number}": {f"d{number}": 2, f"d{number + 10}": 1, f"d{number + 20}": 0} for number in range(5)}
"""q5 has no judgement; of q0 to q4 two documents answer each, one of them better."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny runs of two steps."""
    folder = tmp_path_factory.mktemp("models")
    runs = {}
    for name in ("embedding", "rerank"):
        runs[name] = objective_run(folder / f"{name}.yaml", name, train={"steps": 2, "batch": 8})
        succeed("train", runs[name], cwd=folder)
    return {name: folder / name for name in runs}


def beir(folder, documents=DOCUMENTS, queries=QUERIES, judged=JUDGED, split="test"):
    """A folder in BEIR's format."""
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": name, "title": "", "text": text} for name, text in documents.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"_id": name, "text": text} for name, text in queries.items()]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"{query}\t{document}\t{score}\n" for query, of in judged.items() for document, score in of.items()]
    (folder / f"qrels/{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


def local_task(kind="retrieval"):
    """A task of MTEB whose data are here: the folder above, or pairs with a score."""
    from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    about = {"name": "OfNumbers", "dataset": {"path": "here", "revision": "1"}, "description": "made up",
             "type": "Retrieval", "category": "t2t", "eval_splits": ["test"], "eval_langs": ["eng-Latn"],
             "main_score": "ndcg_at_10",
             "reference": None, "date": None, "domains": None, "task_subtypes": None, "license": None,
             "annotations_creators": None, "dialect": None, "sample_creation": None,
             "bibtex_citation": None}  # fmt: skip

    class OfNumbers(AbsTaskRetrieval):
        metadata = TaskMetadata(**about)

        def load_data(self, *args, **kwargs):
            split = {
                "corpus": Dataset.from_list([{"id": n, "title": "", "text": t} for n, t in DOCUMENTS.items()]),
                "queries": Dataset.from_list([{"id": n, "text": QUERIES[n]} for n in JUDGED]),
                "relevant_docs": JUDGED,
                "top_ranked": None if kind == "retrieval" else {n: list(DOCUMENTS) for n in JUDGED},
            }
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    class OfPairs(AbsTaskSTS):
        metadata = TaskMetadata(**about | {"name": "OfPairs", "type": "STS", "main_score": "cosine_spearman"})

        def load_data(self, *args, **kwargs):
            texts = list(DOCUMENTS.values())
            rows = [{"sentence1": texts[n], "sentence2": texts[-1 - n], "score": float(n % 5)} for n in range(30)]
            self.dataset, self.data_loaded = {"test": Dataset.from_list(rows)}, True

    return OfPairs() if kind == "pairs" else OfNumbers()


@pytest.mark.slow
def test_figures_on_a_folder_of_beir_are_mtebs(models, tmp_path):
    """nDCG of graded judgements, recall and MRR; of the same model, by its own vectors."""
    opened = open_model(str(models["embedding"]))
    found = evaluate_on_corpus(opened, str(beir(tmp_path / "numbers")), None)
    assert (found.documents, found.samples) == (30, 5)
    theirs = task_metrics(opened, local_task())
    (scores,) = theirs["splits"]["test"]
    assert 0 < theirs["ndcg_at_10"] == scores["ndcg_at_10"] < 1
    for figure in ("recall_at_1", "recall_at_5", "recall_at_10", "mrr_at_10", "ndcg_at_10"):
        assert found.metrics[figure] == pytest.approx(scores[figure], abs=2e-5), figure


@pytest.mark.slow
def test_a_reranker_and_pairs_with_a_score_have_figures_of_mteb(models):
    reranker, embedding = (open_model(str(models[name])) for name in ("rerank", "embedding"))
    reranked = task_metrics(reranker, local_task("reranking"))
    pairs = [(QUERIES[query], text) for query in JUDGED for text in DOCUMENTS.values()]
    scores = np.array([each["score"] for each in reranker.decoding.run_task(reranker.model, "rerank", pairs)])
    best = [list(DOCUMENTS)[place] for place in scores.reshape(len(JUDGED), -1).argmax(axis=1)]
    right = [JUDGED[query].get(document, 0) > 0 for query, document in zip(JUDGED, best, strict=True)]
    assert reranked["splits"]["test"][0]["mrr_at_1"] == pytest.approx(np.mean(right))
    assert -1 <= task_metrics(embedding, local_task("pairs"))["cosine_spearman"] <= 1


def test_the_command_finds_documents_among_the_texts_of_a_file(models, tmp_path):
    """As sentence-transformers counts them, over documents of the matches and of the file."""
    texts = list(DOCUMENTS.values())
    matches = [{"query": QUERIES[f"q{n}"], "pos": [texts[n]], "neg": [texts[n + 1]]} for n in range(5)]
    (tmp_path / "matches.jsonl").write_text("".join(json.dumps(match) + "\n" for match in matches))
    (tmp_path / "texts.txt").write_text("\n".join(texts[10:]))
    done = succeed(
        "evaluate", models["embedding"], "--data", "matches.jsonl", "--corpus", "texts.txt", "--json", cwd=tmp_path
    )
    (result,) = json.loads(done.stdout)["models"]
    assert (result["documents"], result["samples"]) == (26, 5)
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    documents = dict(list(DOCUMENTS.items())[:6] + list(DOCUMENTS.items())[10:])
    relevant = {f"q{n}": {f"d{n}"} for n in range(5)}
    queries = {name: QUERIES[name] for name in relevant}
    asked = InformationRetrievalEvaluator(queries, documents, relevant, precision_recall_at_k=[1, 5, 10], name="x")
    theirs = asked(SentenceTransformer(str(models["embedding"] / "model"), device="cpu"))
    for mine, name in (("recall_at_5", "recall@5"), ("mrr_at_10", "mrr@10"), ("ndcg_at_10", "ndcg@10")):
        assert result["metrics"][mine] == pytest.approx(theirs[f"x_cosine_{name}"], abs=1e-5)


def test_documents_that_are_judged_and_missing_are_never_found_and_told(tmp_path):
    said = logged()
    empty = beir(tmp_path / "empty", documents=DOCUMENTS | {"without": " "}, judged={"q0": {"d0": 1}})
    assert len(read_beir(empty).documents) == 30
    assert "1 documents without words are skipped" in said.pop()
    judged = {"q0": {"d0": 1, "gone": 1}, "q1": {"d1": 0}}
    corpus = read_beir(beir(tmp_path / "numbers", judged=judged, split="dev"))
    assert corpus.judged == [{0: 1.0, 30: 1.0}]
    assert corpus.queries == ["What is one?"]
    assert "1 relevant documents are not in corpus.jsonl" in said[0]


def test_bad_lines_of_a_folder_are_named_all_at_once(tmp_path):
    folder = beir(tmp_path / "numbers")
    bad = [("corpus.jsonl", "{"), ("corpus.jsonl", '{"_id": 7, "text": "a"}'),
           ("queries.jsonl", '{"_id": 3, "text": "a"}'), ("qrels/test.tsv", "q9\td1\t1"),
           ("qrels/test.tsv", "q1 d1 1")]  # fmt: skip
    for name, line in bad:
        with (folder / name).open("a") as stream:
            stream.write(line + "\n")
    with pytest.raises(InputError) as caught:
        read_beir(folder)
    places = [problem.where.removeprefix(f"{folder}/") for problem in caught.value.problems]
    assert places == ["corpus.jsonl:31", "corpus.jsonl:32", "queries.jsonl:7", "qrels/test.tsv:17", "qrels/test.tsv:18"]
    assert "there is no query 'q9'" in str(caught.value)


@pytest.mark.parametrize(("words", "says"), [
    ([], "has texts, but no queries"),
    (["--data", "x.jsonl"], "has its own queries"),
])  # fmt: skip
def test_what_does_not_go_with_a_corpus(models, tmp_path, words, says):
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    corpus = "texts.txt" if not words else str(beir(tmp_path / "numbers"))
    assert says in refused("evaluate", models["embedding"], "--corpus", corpus, *words, cwd=tmp_path).stderr


def test_a_folder_that_is_no_corpus_and_a_model_without_vectors(models, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no corpus.jsonl, queries.jsonl, qrels/test.tsv"):
        read_beir(tmp_path / "empty")
    with pytest.raises(InputError, match="does not embed texts"):
        evaluate_on_corpus(open_model(str(models["rerank"])), str(tmp_path / "empty"), None)


def test_tasks_that_mteb_does_not_know_or_that_are_not_here(models, monkeypatch):
    opened = open_model(str(models["embedding"]))
    with pytest.raises(InputError) as caught:
        run_mteb(opened, ["NFCorpsu", "Nothing at all", "CIFAR10"])
    said = str(caught.value)
    assert "MTEB has no task NFCorpsu" in said
    assert "Did you mean: 'NFCorpus'" in said
    assert "MTEB has no task Nothing at all" in said
    assert "CIFAR10 is about image" in said
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="the data of NFCorpus cannot be read"):
        run_mteb(opened, ["NFCorpus"])
    done = artel("evaluate", models["embedding"], "--tasks", "NFCorpus", "--limit", "3")
    assert "MTEB's tasks are run in full" in done.stderr
