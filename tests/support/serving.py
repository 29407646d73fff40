"""A served model: within the test's process, and as a server of its own."""

from __future__ import annotations

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

from starlette.testclient import TestClient

from artel.inference import open_model
from artel.inference.serve.app import Limits, make_app
from artel.inference.serve.served import ServedModel
from artel.models.generate import Sampling, write_tokens
from support.chat_models import MARKS, llama, saved, trained_tokenizer, user
from support.runs import LIMIT

QUESTION = {"messages": user("Who are you?"), "temperature": 0, "max_tokens": 12}


def tiny_model(folder: Path) -> Path:
    """A tiny model with ChatML's marks and random weights, in a folder by the name of tiny."""
    tokenizer = trained_tokenizer(MARKS)
    return saved(folder / "tiny", llama(tokenizer), tokenizer)


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
    return list(write_tokens(opened.model, opened.tokenizer, ids, sampling, None, served.text_end.ids))


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen
    url: str
    said: list[str] = field(default_factory=list)

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(LIMIT)


@contextmanager
def server_of(folder: Path | str, *arguments: str) -> Iterator[Server]:
    """`artel serve` on a free port, when it listens."""
    command = [sys.executable, "-m", "artel", "serve", str(folder), "--port", "0", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []

    def read() -> None:
        for line in process.stderr:
            said.append(line)
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        while (line := lines.get(timeout=LIMIT)) is not None:
            if match := re.search(r"is served at (http://\S+)/v1", line):
                yield Server(process, match[1], said)
                return
        raise AssertionError("".join(said))
    finally:
        process.kill()
        process.wait(LIMIT)
