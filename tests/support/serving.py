"""A served model: within the test's process, and as a server of its own."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from starlette.testclient import TestClient
from transformers import BertConfig, BertForMaskedLM

from artel.config import TokenizerTraining
from artel.generation.generate import Sampling, generate_tokens
from artel.inference import open_model
from artel.inference.serve.app import Limits, make_app
from artel.inference.serve.served import ServedModel
from artel.tokens import train_tokenizer
from support.chat_models import MARKS, llama, saved, trained_tokenizer, user
from support.runs import LIMIT

QUESTION = {"messages": user("Who are you?"), "temperature": 0, "max_tokens": 12}


def tiny_model(folder: Path) -> Path:
    """A tiny model with ChatML's marks and random weights, in a folder by the name of tiny."""
    tokenizer = trained_tokenizer(MARKS)
    return saved(folder / "tiny", llama(tokenizer), tokenizer)


def tiny_encoder(folder: Path) -> Path:
    """A tiny BERT with random weights, which fills masks, in a folder by the name of encoder."""
    tokenizer = train_tokenizer(iter(["the of and to in a is that"] * 20), TokenizerTraining(vocab=270), encoder=True)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=tokenizer.vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, max_position_embeddings=128, pad_token_id=tokenizer.pad_id)  # fmt: skip
    return saved(folder / "encoder", BertForMaskedLM(config).eval(), tokenizer)


@contextmanager
def served_model(folder: Path, *, requests: int | None = 4, context: int | None = None) -> Iterator[ServedModel]:
    served = ServedModel(open_model(str(folder)), "tiny", requests, context)
    try:
        yield served
    finally:
        served.close()


def app_of(*models: ServedModel, limits: Limits | None = None, **options: Any) -> Any:
    """The application of a server that listens on this machine alone, without a key."""
    settings = {"key": None, "loopback": True, "origins": []} | options
    return make_app(list(models), limits or Limits(), **settings)


def client_of(*models: ServedModel, limits: Limits | None = None, **options: Any) -> TestClient:
    """A client of an application in this process, whose errors are not raised but answered."""
    app = app_of(*models, limits=limits, **options)
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


async def ask(app: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    """The answer of an application in this event loop."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.post(path, json=body)


async def ask_and_leave(app: Any, path: str, body: dict[str, Any], leaves: asyncio.Event) -> int:
    """The status that a client is given who goes when `leaves` is set."""
    coming = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        message = next(coming, None)
        if message is None:
            await leaves.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": headers, "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1),
             "server": ("localhost", 80), "root_path": ""}  # fmt: skip
    await app(scope, receive, send)
    return statuses[0]


def answer(client: TestClient, **changes: Any) -> dict[str, Any]:
    """The answer to `QUESTION`."""
    response = client.post("/v1/chat/completions", json=QUESTION | changes)
    assert response.status_code == 200, response.text
    return response.json()


def texts(response: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in response["choices"]]


def error_of(response: Any) -> tuple[int, str | None, str | None]:
    """(status, key, code) of OpenAI's error object."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["param"], error["code"]


def greedy(served: ServedModel, ids: list[int], count: int) -> list[int]:
    """The tokens that `artel generate` writes."""
    sampling = Sampling(new_tokens=count, temperature=0, top_k=0)
    opened = served.opened
    return list(generate_tokens(opened.model, opened.tokenizer, ids, sampling, None, served.text_end.ids))


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen
    url: str
    reader: threading.Thread
    """Ends with the process, when all of its standard error is in `said`."""
    said: list[str] = field(default_factory=list)

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(LIMIT)


@contextmanager
def server_of(folder: Path | str, *arguments: str, **environment: str) -> Iterator[Server]:
    """`artel serve` on a free port, when it listens; `environment`: variables that it is given."""
    command = [sys.executable, "-m", "artel", "serve", str(folder), "--port", "0", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []

    def read() -> None:
        for line in process.stderr:
            said.append(line)
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while (line := lines.get(timeout=LIMIT)) is not None:
            if match := re.search(r"is served at (http://\S+)/v1", line):
                yield Server(process, match[1], reader, said)
                return
        raise AssertionError("".join(said))
    finally:
        process.kill()
        process.wait(LIMIT)
