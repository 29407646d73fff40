"""Fetching bodies over a real http server that cuts, changes, drips or falls silent."""

import email.utils
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from artel.errors import InputError, WorkError
from artel.storage import checksum, fetch, lock
from support.servers import QuietHandler, http_server, raw_server
from support.waiting import wait_until

BODY = random.Random(0).randbytes(3_000_000)
OTHER = random.Random(1).randbytes(3_000_000)
LONG_AGO = "Mon, 02 Jan 2023 00:00:00 GMT"


class Parts:
    """A server of one body that is cut, changes, drips: `manner` of each answer in turn, the last one for the rest."""

    def __init__(self) -> None:
        self.manners, self.ranges, self.body = ["whole"], [], BODY
        self.headers = {"ETag": '"one"'}
        self.stop = threading.Event()
        parts = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                with suppress(ConnectionError):
                    parts.answer(self)

        self.handler = Handler

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        manner = self.manners.pop(0) if len(self.manners) > 1 else self.manners[0]
        asked = request.headers.get("Range")
        self.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and manner != "no ranges" else 0
        validator = self.headers.get("ETag") or self.headers.get("Last-Modified")
        if asked and manner != "no conditions" and request.headers.get("If-Range") != validator:
            start = 0
        if manner in ("412", "416") and asked:
            request.send_error(int(manner))
            return
        request.send_response(206 if start else 200)
        if start:
            shown = 0 if manner == "another part" else start
            request.send_header("Content-Range", f"bytes {shown}-{len(self.body) - 1}/{len(self.body)}")
        for name, value in self.headers.items():
            request.send_header(name, value)
        request.send_header("Content-Type", "text/plain")
        if manner != "unsaid length":
            request.send_header("Content-Length", str(len(self.body) - start))
        request.end_headers()
        rest = self.body[start:]
        if manner == "cut":
            request.wfile.write(rest[:1_000_000])
        elif manner == "drip":
            for place in range(len(rest)):
                request.wfile.write(rest[place : place + 1])
                if self.stop.wait(0.05):
                    return
        elif manner == "stall":
            request.wfile.write(rest[: 40 << 20])
            self.stop.wait(60)
        else:
            request.wfile.write(rest)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    parts = Parts()
    with http_server(parts.handler) as address:
        parts.url = f"{address}/body.txt"
        yield parts
        parts.stop.set()


def left_over(cache: Path) -> list[str]:
    return sorted(file.name for file in (cache / "unfinished").iterdir())


@pytest.mark.parametrize("headers", [{"ETag": '"one"'}, {"Last-Modified": LONG_AGO}])
def test_a_cut_body_goes_on_where_it_was(parts: Parts, tmp_path: Path, headers: dict[str, str]) -> None:
    parts.manners, parts.headers = ["cut", "cut", "whole"], headers
    fetched = fetch(parts.url, tmp_path)
    assert fetched.path.read_bytes() == BODY
    assert fetched.digest == checksum(fetched.path)
    assert fetched.content_type == "text/plain"
    assert parts.ranges == [None, "bytes=1000000-", "bytes=2000000-"]
    assert left_over(tmp_path) == []


def test_a_start_after_three_failures_goes_on_where_they_ended(parts: Parts, tmp_path: Path) -> None:
    parts.manners = ["cut", "503", "503", "503"]
    parts.body = BODY[:1_500_000]
    refused = parts.answer
    parts.answer = lambda request: refused(request) if parts.manners[0] != "503" else request.send_error(503)
    with pytest.raises(WorkError, match=r"503 (.|\n)*the 1,000,000 bytes that came are kept"):
        fetch(parts.url, tmp_path)
    parts.manners, parts.ranges = ["whole"], []
    assert fetch(parts.url, tmp_path).path.read_bytes() == parts.body
    assert parts.ranges == ["bytes=1000000-"]


@pytest.mark.parametrize("manner", ["no ranges", "412", "416", "another part"])
def test_servers_without_ranges_give_all_of_it_anew(parts: Parts, tmp_path: Path, manner: str) -> None:
    parts.manners = ["cut", manner, "whole"]
    assert fetch(parts.url, tmp_path).path.read_bytes() == BODY
    assert parts.ranges[1] == "bytes=1000000-"
    assert parts.ranges[2:] in ([], [None])


@pytest.mark.parametrize("headers", [{}, {"ETag": 'W/"one"'}, {"Last-Modified": "now"}])
def test_without_a_strong_validator_nothing_is_joined(parts: Parts, tmp_path: Path, headers: dict[str, str]) -> None:
    """A time of change is strong only when it lies a minute before the answer (RFC 9110, 8.8.2.2)."""
    now = email.utils.formatdate(usegmt=True)
    parts.manners = ["cut", "whole"]
    parts.headers = {name: value.replace("now", now) for name, value in headers.items()}
    assert fetch(parts.url, tmp_path).path.read_bytes() == BODY
    assert parts.ranges == [None, None]


@pytest.mark.parametrize("manner", ["whole", "no conditions"])
def test_a_body_that_changed_meanwhile_is_fetched_anew(parts: Parts, tmp_path: Path, manner: str) -> None:
    parts.manners = ["cut", manner, "whole"]
    answer = parts.answer

    def changing(request: BaseHTTPRequestHandler) -> None:
        if len(parts.ranges) == 1:
            parts.body, parts.headers = OTHER, {"ETag": '"two"'}
        answer(request)

    parts.answer = changing
    assert fetch(parts.url, tmp_path).path.read_bytes() == OTHER
    assert parts.ranges[1] == "bytes=1000000-"


@pytest.mark.ci
@pytest.mark.processes
def test_a_killed_process_has_its_bytes_kept(parts: Parts, tmp_path: Path) -> None:
    parts.body, parts.manners = BODY * 16, ["stall", "whole"]  # 48 MB; 42 of them come
    code = "import sys; from artel.storage import fetch; fetch(sys.argv[1], sys.argv[2])"
    process = subprocess.Popen([sys.executable, "-c", code, parts.url, str(tmp_path)])
    wait_until(lambda: list(tmp_path.glob("unfinished/*.json")))
    process.kill()
    process.wait()
    assert [entry.name for entry in tmp_path.iterdir()] == ["unfinished"]
    (body,) = tmp_path.glob("unfinished/*.body")
    marked = json.loads(body.with_suffix(".json").read_bytes())["bytes"]
    assert marked >= 32 << 20
    with body.open("ab") as file:
        file.write(b"what a power failure may leave after what was synced")
    fetched = fetch(parts.url, tmp_path)
    assert fetched.path.read_bytes() == parts.body
    assert fetched.digest == checksum(fetched.path)
    assert parts.ranges == [None, f"bytes={marked}-"]
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_a_damaged_part_is_not_gone_on_with(parts: Parts, tmp_path: Path) -> None:
    parts.manners = ["cut", "drip"]
    with pytest.raises(WorkError):
        fetch(parts.url, tmp_path, timeout=0.2)
    (body,) = tmp_path.glob("unfinished/*.body")
    with body.open("r+b") as file:
        file.write(b"?")
    parts.manners, parts.ranges = ["whole"], []
    assert fetch(parts.url, tmp_path).path.read_bytes() == BODY
    assert parts.ranges == [None]


@pytest.mark.slow
def test_a_server_that_drips_is_given_up(parts: Parts, tmp_path: Path) -> None:
    parts.manners = ["drip"]
    with pytest.raises(WorkError, match=r"only \d+ bytes came in .* seconds, three times"):
        fetch(parts.url, tmp_path, timeout=0.5)


@pytest.mark.slow
def test_headers_that_drip_are_given_up_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    done = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not done.wait(0.05):
                connection.sendall(b"x")

    with raw_server(drip) as address, pytest.raises(WorkError, match=r"only \d+ bytes came in"):
        fetch(f"{address}/", tmp_path, timeout=0.2)
    done.set()


@pytest.mark.slow
def test_silence_after_a_few_bytes_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    begun, held = b"HTTP/1.1 200 OK\r\nX: ", []

    def begin_and_stop(connection: socket.socket) -> None:
        held.append(connection)
        connection.sendall(begun)

    message = rf"only {len(begun)} bytes came in .* seconds, three times"
    with raw_server(begin_and_stop) as address, pytest.raises(WorkError, match=message):
        fetch(f"{address}/", tmp_path, timeout=0.5)


def test_a_body_of_unsaid_length_and_one_without_bytes(parts: Parts, tmp_path: Path) -> None:
    parts.manners = ["unsaid length"]
    assert fetch(parts.url, tmp_path).path.read_bytes() == BODY
    parts.manners, parts.body = ["whole"], b""
    empty = fetch(f"{parts.url}?empty", tmp_path)
    assert (empty.path.read_bytes(), empty.digest) == (b"", "99aa06d3014798d86001c324468d497f")


def test_what_is_refused_for_its_size_is_not_kept(parts: Parts, tmp_path: Path) -> None:
    for parts.manners in (["whole"], ["unsaid length"]):
        with pytest.raises(InputError, match="over the limit of 2,000,000"):
            fetch(parts.url, tmp_path, max_bytes=2_000_000)
        assert left_over(tmp_path) == []


def test_two_that_want_the_same_fetch_it_once(parts: Parts, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        fetched = list(pool.map(lambda _: fetch(parts.url, tmp_path), range(4)))
    assert len(set(fetched)) == 1
    assert fetched[0].path.read_bytes() == BODY
    assert parts.ranges == [None]


def test_parts_that_nobody_wants_for_a_week_are_removed(parts: Parts, tmp_path: Path) -> None:
    folder = tmp_path / "unfinished"
    (folder / "pulled.folder").mkdir(parents=True)
    for name in ("old.body", "old.json", "old.lock", "new.body", "held.body", "pulled.folder/x"):
        (folder / name).write_text("x")
    week_ago = time.time() - 8 * 24 * 3600
    for name in ("old.body", "old.json", "old.lock", "held.body", "pulled.folder"):
        os.utime(folder / name, (week_ago, week_ago))
    with lock(folder / "held.lock"):
        os.utime(folder / "held.lock", (week_ago, week_ago))
        fetch(parts.url, tmp_path)
    assert left_over(tmp_path) == ["held.body", "held.lock", "new.body"]
