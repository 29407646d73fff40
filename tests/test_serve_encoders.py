"""What the server answers of encoders: masks, embeddings, answers to questions."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModel, AutoTokenizer

import artel
from support.chat_models import user
from support.objectives import objective_run
from support.serving import app_of, client_of, served_model, tiny_encoder

TEXTS = ["The ship is here.", "Ahoy", "He said that the whale was white, and that it was there."]


@contextmanager
def trained(name: str) -> Iterator[tuple[Path, TestClient]]:
    """The folder of a model after one step of an objective, and a client of it."""
    run = objective_run(Path("run.yaml").absolute(), name, train={"steps": 1, "batch": 8})
    folder = artel.train(run).folder
    with served_model(folder) as served, client_of(served) as client:
        yield folder / "model", client


@pytest.mark.slow
def test_masks_are_filled_and_embeddings_are_means_of_length_one():
    with trained("masked") as (folder, client):
        (model,) = client.get("/v1/models").json()["data"]
        text = f"The ship {model['mask_token']} here."
        filled = client.post("/v1/fill-mask", json={"input": [text, text], "top_k": 3}).json()
        expected = artel.open(folder).fill(text)
        assert [entry["text"] for entry in filled["data"]] == [expected.text] * 2
        candidates = filled["data"][0]["masks"][0]
        assert len(candidates) == 3
        assert candidates[0]["score"] >= candidates[2]["score"] > 0
        for wrong in ("no mask", text * 200):
            response = client.post("/v1/fill-mask", json={"input": wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
        assert client.post("/v1/chat/completions", json={"messages": user("x")}).status_code == 400

        response = client.post("/v1/embeddings", json={"input": TEXTS}).json()
        vectors = np.array([entry["embedding"] for entry in response["data"]])
        np.testing.assert_allclose(vectors, [embedded(folder, text) for text in TEXTS], atol=1e-5)
        ids = AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
        assert response["usage"]["prompt_tokens"] == sum(map(len, ids))
        same = client.post("/v1/embeddings", json={"input": ids, "encoding_format": "base64"}).json()
        packed = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in same["data"]]
        np.testing.assert_allclose(packed, vectors, atol=1e-6)
        response = client.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 16})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "dimensions")
        for wrong in ("long " * 2000, [10**6]):
            response = client.post("/v1/embeddings", json={"input": wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


def embedded(folder: Path, text: str) -> np.ndarray:
    """By transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    return (mean / mean.norm()).numpy()


@pytest.mark.slow
def test_a_model_of_commas_offers_no_masks():
    with trained("restoring") as (_, client):
        (model,) = client.get("/v1/models").json()["data"]
        assert model["endpoints"] == ["/v1/embeddings"]
        assert client.post("/v1/fill-mask", json={"input": "He said that"}).status_code == 400


@pytest.mark.slow
def test_questions_are_answered_from_a_document():
    with trained("span_qa") as (folder, client):
        question, context = "where is Anna ?", "Anna is in the forest . " * 20
        answer = client.post("/v1/answers", json={"question": question, "context": context}).json()
        expected = artel.open(folder.parent).answer(question, context)
        assert answer["answer"] == expected.text
        if expected.text:
            assert context[answer["start"] : answer["end"]] == expected.text
        assert answer["kind"] in expected.classes
        assert client.post("/v1/fill-mask", json={"input": "x"}).status_code == 400


@pytest.mark.slow
def test_vectors_that_were_learned_with_prompts_and_lengths():
    with trained("embedding") as (folder, client):
        (model,) = client.get("/v1/models").json()["data"]
        assert model["endpoints"] == ["/v1/embeddings"]
        texts = TEXTS[:2]  # the third is longer than the model reads
        body = {"input": texts, "input_type": "query", "dimensions": 16}
        response = client.post("/v1/embeddings", json=body).json()
        vectors = np.array([entry["embedding"] for entry in response["data"]])
        np.testing.assert_allclose(vectors, artel.open(folder).embed(texts, kind="query", dimensions=16), atol=1e-6)
        ids = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
        assert response["usage"]["prompt_tokens"] == sum(map(len, ids))
        same = client.post("/v1/embeddings", json={"input": ids, "encoding_format": "base64"}).json()
        packed = np.array([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in same["data"]])
        np.testing.assert_allclose(packed, artel.open(folder).embed(texts), atol=1e-6)
        for wrong, param in [({"dimensions": 99}, "dimensions"), ({"input": TEXTS}, "input")]:
            response = client.post("/v1/embeddings", json={"input": texts, **wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def by_async_client(app, **asked):
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="-", http_client=http, max_retries=0) as client,
    ):
        return await client.embeddings.create(model="tiny", input=TEXTS, **asked)


@pytest.mark.parametrize("asked", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_openais_client_gets_embeddings(tmp_path, asked):
    """It asks for base64, and makes numbers of it, where its user says nothing."""
    folder = tiny_encoder(tmp_path)
    with served_model(folder) as served, client_of(served) as http:
        client = openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http, max_retries=0)
        whole = client.embeddings.create(model="tiny", input=TEXTS, **asked)
        responses = [whole, asyncio.run(by_async_client(app_of(served), **asked))]
    expected = [embedded(folder, text) for text in TEXTS]
    for response in responses:
        vectors = [entry.embedding for entry in response.data]
        if asked == {"encoding_format": "base64"}:
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        assert response.usage.prompt_tokens == response.usage.total_tokens > 0
