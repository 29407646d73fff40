"""az.lib.ru on this machine: a proxy that answers each address with a page of its kind, for commands that fetch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from printed.inputs import story

_PAGE = """<html><head><title>Lib.ru/Классика: {name}</title></head><body>
<center><h2>{name}</h2></center><hr>
<!----------- Собственно произведение --------------->
{paragraphs}
<!--------------------------------------------------->
<hr>Оставить комментарий</body></html>"""


class _Library(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if address.netloc != "az.lib.ru":
            self.send_error(404)
            return
        paragraphs = "\n".join(f"<dd>{paragraph}" for paragraph in story(sum(address.path.encode())))
        page = _PAGE.format(name=address.path, paragraphs=paragraphs).encode("windows-1251")
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=windows-1251")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *values: object) -> None:
        """Nothing: the page that was asked for stands in the run's ledger."""


@contextmanager
def library() -> Iterator[dict[str, str]]:
    """The variables by which a command comes to it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Library)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {"http_proxy": f"http://127.0.0.1:{server.server_address[1]}", "no_proxy": "", "NO_PROXY": ""}
    finally:
        server.shutdown()
        server.server_close()
