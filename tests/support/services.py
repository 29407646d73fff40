"""Fixtures of services on the loopback: a real S3 server (moto), and one that answers what is asked of the hub."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest

from support.servers import FILES, Relay
from support.waiting import LIMIT, wait_until


@pytest.fixture(scope="module")
def s3_server():
    """The address of a real S3 server (moto) on the loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def answers():
        assert process.poll() is None
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=LIMIT):
            return True

    try:
        wait_until(answers)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(LIMIT)


@pytest.fixture
def bucket(s3_server, monkeypatch, tmp_path):
    """boto3's client, with an empty bucket called texts; the environment leads to it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/moto-api/reset", method="POST"), timeout=LIMIT).close()
    client = boto3.client("s3")
    client.create_bucket(Bucket="texts")
    return client


# The hub


@pytest.fixture
def hub():
    """The address of a server that answers what the hub is asked for the data set me/texts; me/secret is gated."""

    def entry(path: str) -> dict:
        blob = hashlib.sha1(FILES[path]).hexdigest()
        return {"type": "file", "path": path, "size": len(FILES[path]), "oid": blob}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            # The hub's own parquet files of a data set are a branch, which here has the files of main.
            path = urllib.parse.unquote(self.path.split("?")[0]).replace("refs/convert/parquet", "main")
            tree, resolve = "/api/datasets/me/texts/tree/main", "/datasets/me/texts/resolve/main/"
            if path.startswith("/api/datasets/me/secret"):
                self.answer(403, b"{}", **{"X-Error-Code": "GatedRepo", "X-Error-Message": "ask for access"})
            elif path in ("/api/datasets/me/texts", "/api/datasets/me/texts/revision/main"):
                self.answer(200, b'{"id": "me/texts", "sha": "0", "siblings": []}')
            elif path.startswith(tree):
                folder = path[len(tree) :].strip("/")
                inside = [entry(name) for name in FILES if str(Path(name).parent).removeprefix(".") == folder]
                folders = [{"type": "directory", "path": "data", "oid": "0", "size": 0}] if not folder else []
                if "recursive=true" in self.path.lower():
                    inside = [entry(name) for name in FILES if name.startswith(folder)]
                if inside:
                    self.answer(200, json.dumps(inside + folders).encode())
                else:
                    self.answer(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
            elif path.startswith(resolve) and path[len(resolve) :] in FILES:
                body, asked = FILES[path[len(resolve) :]], self.headers.get("Range", "")
                if asked:
                    first, last = asked.removeprefix("bytes=").split("-")
                    self.answer(206, body[int(first) : int(last) + 1])
                else:
                    self.answer(200, body)
            else:
                self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})

        def answer(self, code: int, body: bytes, **headers: str) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def relay(bucket, s3_server, monkeypatch):
    """A relay before the S3 server, which the environment leads to."""
    relay = Relay(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", relay.address)
    yield relay
    relay.close()
