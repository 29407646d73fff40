"""`artel report --live`: serves the report on 127.0.0.1 and updates it in the browser while the runs train.

One thread polls the sizes and times of files, which also works if another host writes them. Changes are pushed to every
open page as server-sent events.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson

from artel.elapsed import hide_elapsed
from artel.errors import InputError
from artel.messages import logger
from artel.reports.page import Page
from artel.reports.run_data import RunData, RunsReader

_HOST = "127.0.0.1"
_PORT_ERRORS = {
    errno.EADDRINUSE: "is in use by another program",
    errno.EACCES: "may not be used without more permissions",
}
_POLL_SECONDS = 1.0
_READ_SECONDS = 5.0
"""Interval for reading unchanged folders, since a run that has died changes nothing."""
_KEEPALIVE_SECONDS = 15.0
"""Interval of comments sent to open pages. They reveal closed pages."""


def serve(folders: Sequence[str], port: int, language: str) -> None:
    """Serve the report of some runs until Ctrl-C. `port` 0 picks a free one.

    Raise InputError if a folder is not a run's or is damaged, or if the port is taken.
    """
    report = LiveReport(folders, language)
    try:
        server = _Server((_HOST, port), report)
    except OSError as error:
        if error.errno not in _PORT_ERRORS:
            raise
        message = f"{port} {_PORT_ERRORS[error.errno]}"
        raise InputError.at("--port", message, "use another one; --port 0 picks a free one") from None
    try:
        logger.info(
            "the report is at http://%s:%s/ and follows %s; Ctrl-C ends it",
            _HOST,
            server.server_port,
            ", ".join(folders),
        )
        with report, hide_elapsed():
            server.serve_forever()
    except KeyboardInterrupt:
        logger.info("the report is no longer served")
    finally:
        server.server_close()


class LiveReport:
    """Polls the runs in a thread, and stores the newest event for open pages."""

    def __init__(self, folders: Sequence[str], language: str) -> None:
        """Raise InputError if a folder is not a run's or is damaged."""
        self._page = Page(language, live=True)
        self._reader = RunsReader(folders)
        self._folders = [Path(folder) for folder in folders]
        self._runs = self._reader.read()
        self._event = self._page.event(self._runs)
        self._event_number = 1
        self._condition = threading.Condition()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="live report", daemon=True)

    def __enter__(self) -> LiveReport:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join()
        with self._condition:
            self._condition.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._stop_event.is_set()

    def html(self) -> bytes:
        """Return the current page."""
        return self._page.html(self._current_runs()).encode()

    def event_after(self, event_number: int, timeout: float) -> tuple[int, bytes] | None:
        """Wait up to `timeout` seconds for a newer event. Return its number and its data, or None."""
        with self._condition:
            self._condition.wait_for(lambda: self._event_number != event_number or self.is_closed, timeout)
            is_new = self._event_number != event_number and not self.is_closed
            return (self._event_number, self._event) if is_new else None

    def _current_runs(self) -> list[RunData]:
        with self._condition:
            return self._runs

    def _poll(self) -> None:
        old_state: list[Any] = []
        unread_seconds = 0.0
        while not self._stop_event.wait(_POLL_SECONDS):
            unread_seconds += _POLL_SECONDS
            new_state = [_list_file_states(folder) for folder in self._folders]
            if new_state == old_state and unread_seconds < _READ_SECONDS:
                continue
            old_state = new_state
            unread_seconds = 0.0
            self._update()

    def _update(self) -> None:
        try:
            runs = self._reader.read()
            event = self._page.event(runs)
        except InputError as error:  # a damaged line or a removed folder. Keep the page and show the error
            runs, event = self._runs, orjson.dumps({"problem": error.one_line})
        with self._condition:
            if event != self._event:
                self._runs, self._event, self._event_number = runs, event, self._event_number + 1
                self._condition.notify_all()


def _list_file_states(folder: Path) -> list[tuple[str, int, int]]:
    """Return (path, size, mtime) of the files in a run's folder, which change when the run writes."""
    entries = []
    for path in [folder, *folder.glob("*"), *folder.glob("ranks/*"), *folder.glob("profile/*")]:
        try:
            stat = path.stat()
        except OSError:
            continue
        entries.append((str(path), stat.st_size, stat.st_mtime_ns))
    return sorted(entries)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], report: LiveReport) -> None:
        self.report = report
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # DNS rebinding: another site's page must not read the report through a name that resolves to 127.0.0.1.
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in (_HOST, "localhost"):
            self.send_error(403, "only by 127.0.0.1 or localhost")
        elif self.path == "/":
            self._send_content("text/html; charset=utf-8", self.server.report.html())
        elif self.path == "/events":
            self._send_events()
        else:
            self.send_error(404)

    def _send_content(self, content_type: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def _send_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        report = self.server.report
        event_number = 0
        while not report.is_closed:
            event = report.event_after(event_number, _KEEPALIVE_SECONDS)
            if event is None:
                self.wfile.write(b": nothing new\n\n")
            else:
                event_number, content = event
                self.wfile.write(b"event: report\ndata: " + content + b"\n\n")
            self.wfile.flush()
        self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing to the terminal."""
