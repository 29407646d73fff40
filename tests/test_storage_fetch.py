"""Fetching over a real http server on the loopback address: cache, retries, refusals."""

import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pytest

from artel.errors import InputError, WorkError
from artel.storage import fetch
from support.servers import QuietHandler, http_server, raw_server


@dataclass
class Site:
    """A server, what it was asked, and its address."""

    address: str
    asked: Counter[str] = field(default_factory=Counter)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            path = unquote(self.path)
            served.asked[path] += 1
            if path == "/missing":
                self.send_error(404)
            elif path == "/broken" or (path == "/flaky" and served.asked[path] < 3):
                self.send_error(503)
            elif path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/page")
                self.end_headers()
            elif path.startswith("/to/"):
                code, _, target = path.removeprefix("/to/").partition("/")
                self.send_response(int(code))
                self.send_header("Location", target)
                self.end_headers()
            elif path == "/cut":
                self.answer(b"half", length=1000)
            elif path == "/endless":
                self.answer(b"x" * 5000, length=None)
            else:
                self.answer("Анна".encode("cp1251"), length=4)

        def answer(self, body: bytes, length: int | None) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=windows-1251")
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

    with http_server(Handler) as address:
        served = Site(address)
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/page", "/moved", "/flaky", "/страница с пробелом?и=да#часть"])
def test_a_page_is_fetched_once_with_its_header(site: Site, tmp_path: Path, path: str) -> None:
    fetched = fetch(site.address + path, tmp_path)
    assert fetched.path.read_bytes().decode("cp1251") == "Анна"
    assert fetched.content_type == "text/html; charset=windows-1251"
    asked = site.asked.total()
    assert fetch(site.address + path, tmp_path) == fetched
    assert site.asked.total() == asked


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_lead_to_http_and_https_alone(site: Site, tmp_path: Path, code: int) -> None:
    """An ftp server on this machine is never asked, nor a file of it read."""
    secret = tmp_path / "secret.txt"
    secret.write_text("not to be read")
    fetched = fetch(f"{site.address}/to/{code}/{site.address}/page", tmp_path / "cache")
    assert fetched.path.read_bytes().decode("cp1251") == "Анна"
    with socket.create_server(("127.0.0.1", 0)) as ftp:
        ftp.setblocking(False)
        host = f"127.0.0.1:{ftp.getsockname()[1]}"
        for target in (f"ftp://{host}/a", f"FTP://{host}/a", f"file://{secret}", "data:,text", f"gopher://{host}/",
                       f"s3://{host}/a", f"jar:{site.address}/page"):  # fmt: skip
            with pytest.raises(InputError, match=rf"answers {code} .*, which leads to .*: artel follows only http and"):
                fetch(f"{site.address}/to/{code}/{target}", tmp_path / "cache")
        with pytest.raises(BlockingIOError):
            ftp.accept()


def test_what_is_not_there_is_asked_for_once_and_not_cached(site: Site, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{site.address}/missing: the server answers 404 Not Found"):
        fetch(site.address + "/missing", tmp_path)
    assert site.asked["/missing"] == 1
    assert [entry.name for entry in tmp_path.rglob("*")] == ["unfinished"]


@pytest.mark.parametrize(("path", "message"), [("/broken", "503"), ("/cut", "cut after 4 of 1,000 bytes")])
def test_a_failing_server_is_tried_three_times(site: Site, tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(WorkError, match=message):
        fetch(site.address + path, tmp_path)
    assert site.asked[path] == 3
    assert [entry.name for entry in tmp_path.rglob("*")] == ["unfinished"]


def test_too_large_a_body_is_refused_also_when_its_length_is_unsaid_or_it_is_cached(site: Site, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="over the limit of 1,000"):
        fetch(site.address + "/endless", tmp_path, max_bytes=1000)
    fetch(site.address + "/page", tmp_path)
    with pytest.raises(InputError, match="over the limit of 3"):
        fetch(site.address + "/page", tmp_path, max_bytes=3)


def test_two_lengths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 9\r\nConnection: close\r\n\r\nsome text"

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.recv(4096)
            connection.sendall(body)

    with raw_server(answer) as address, pytest.raises(WorkError, match="the server says 2 lengths: 2, 9"):
        fetch(f"{address}/a", tmp_path)


def test_addresses_and_networks_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    for url in ("ftp://host/file", "http://", "http://host:port/", "http://[::1/"):
        with pytest.raises(InputError, match="is not an address"):
            fetch(url, tmp_path)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        with pytest.raises(WorkError, match="refuses the connection"):
            fetch(f"http://127.0.0.1:{unused.getsockname()[1]}/", tmp_path)
    with pytest.raises(WorkError, match=r"the name artel\.invalid is not found"):
        fetch("http://artel.invalid/text.html", tmp_path, timeout=5)


def test_a_silent_server_is_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    message = r"no answer within 0\.1 seconds, three times"
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(WorkError, match=message):
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/", tmp_path, timeout=0.1)


@pytest.mark.parametrize("content", [b"[]", b'"x"', b'{"url', b"", b'{"bytes": 3}'])
def test_a_damaged_download_is_fetched_again(site: Site, tmp_path: Path, content: bytes) -> None:
    fetched = fetch(site.address + "/page", tmp_path)
    fetched.path.with_name("headers.json").write_bytes(content)
    assert fetch(site.address + "/page", tmp_path) == fetched
    assert site.asked.total() == 2
    fetched.path.write_bytes(b"to")  # torn
    assert fetch(site.address + "/page", tmp_path) == fetched
    assert fetched.path.read_bytes().decode("cp1251") == "Анна"
