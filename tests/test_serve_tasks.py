"""What /v1/classify, /v1/rerank and /v1/entities take and refuse, of models as they are before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from artel.config import load_run
from artel.inference import open_untrained
from artel.inference.serve.served import ServedModel
from support.labels import ROWS, label_run
from support.objectives import objective_run
from support.serving import client_of, error_of


@contextmanager
def untrained(run: Path) -> Iterator[TestClient]:
    served = ServedModel(open_untrained(load_run(str(run))), "tiny", 4, None)
    try:
        with client_of(served) as client:
            yield client
    finally:
        served.close()


def refusal(client: TestClient, path: str, **body) -> str:
    response = client.post(path, json=body)
    assert response.status_code in (400, 422), response.text
    error = response.json()["error"]
    assert error["message"].startswith(error["param"])
    return error["message"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    with untrained(objective_run(tmp_path_factory.mktemp("rerank") / "run.yaml", "rerank")) as client:
        yield client


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [("single", "", "input"), ("single", ["goal", " \n"], "input.1"), ("pairs", [["goal", "win"], ["goal", ""]],
     "input.1.1")],
)  # fmt: skip
def test_an_empty_text_to_label_is_refused_with_its_place(tmp_path, name, text, place):
    with untrained(label_run(tmp_path / "run.yaml", ROWS[name](40))) as client:
        response = client.post("/v1/classify", json={"input": text})
    assert error_of(response) == (400, "input", None)
    assert response.json()["error"]["message"] == f"{place} is empty"


def test_a_model_of_single_texts_takes_no_pairs(tmp_path):
    with untrained(label_run(tmp_path / "run.yaml", ROWS["single"](40))) as client:
        said = refusal(client, "/v1/classify", input=[["ball", "judge"]])
        assert client.post("/v1/classify", json={"input": ["ball", "judge"]}).status_code == 200
    assert said == "input.0 is a pair of texts, but the model was trained on single texts"


def test_documents_may_be_objects_with_a_text(reranker):
    texts = ["No 4 is there.", "The number 3 is here, ", ""]
    for sent in (texts, [{"text": text} for text in texts], [texts[0], {"text": texts[1]}, texts[2]]):
        response = reranker.post("/v1/rerank", json={"query": "Where is 3?", "documents": sent})
        assert response.status_code == 200, response.text
        results = response.json()["results"]
        assert sorted((one["index"], one["document"]["text"]) for one in results) == [*enumerate(texts)]
    plain = reranker.post("/v1/rerank", json={"query": "Where?", "documents": texts, "return_documents": False})
    assert all(one.keys() == {"index", "relevance_score"} for one in plain.json()["results"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query": " "}, "query is empty"),
        ({"documents": ["", {"text": " "}]}, "documents are all empty"),
        ({"documents": []}, "documents: has too few entries; give 1 or more"),
        ({"documents": [3]}, "documents.0: must be a string; documents.0: must be an object"),
        ({"documents": ["a", {"txt": "b"}]}, "documents.1.text: is missing; documents.1.txt: is unknown here"),
        ({"top_n": 0}, "top_n: is too small; write 1 or more"),
    ],
)
def test_what_cannot_be_ranked_is_said_in_plain_words(reranker, changes, said):
    assert refusal(reranker, "/v1/rerank", **{"query": "Where?", "documents": ["Here."]} | changes) == said
