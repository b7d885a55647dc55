"""A web server on this machine that serves bytes with ranges, and cuts connections, redirects and lies on request."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class Page:
    """One response: its bytes and how they are sent."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    etag: str | None = '"one"'
    breaks: list[int] = field(default_factory=list)
    """Bytes after which the connection is cut, one entry per response; complete responses once the list is empty."""


@dataclass
class Server:
    """The pages by path, and every request that arrived: (method, path, headers)."""

    address: str
    pages: dict[str, Page]
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients that hang up are part of the tests
            super().handle_error(request, client_address)


@contextmanager
def serving(pages: dict[str, Page]) -> Iterator[Server]:
    """Serve the pages on 127.0.0.1 while the block runs; a `Page` may be replaced meanwhile."""
    server = Server("", pages)
    http = _Quiet(("127.0.0.1", 0), _handler(server))
    server.address = f"http://127.0.0.1:{http.server_address[1]}"
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@contextmanager
def refusing() -> Iterator[str]:
    """Yield an address of this machine that refuses every connection, and that nothing else is given meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(self._send_body)

        def do_HEAD(self) -> None:
            self._answer(lambda page, body: None)

        def _answer(self, send: Callable[[Page, bytes], None]) -> None:
            path = self.path.partition("?")[0]
            server.requests.append((self.command, self.path, dict(self.headers)))
            page = server.pages.get(path, Page(b"no such file", 404))
            start = self._start(page)
            body = page.body[start:]
            if start > len(page.body):
                self.send_response(416)
                body = b""
            else:
                self.send_response(206 if start else page.status)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(page.body) - 1}/{len(page.body)}")
            for name, value in {"Content-Length": str(len(body)), **page.headers}.items():
                self.send_header(name, value)
            if page.etag:
                self.send_header("ETag", page.etag)
            self.end_headers()
            send(page, body)

        def _start(self, page: Page) -> int:
            asked = self.headers.get("Range")
            if not asked or not page.ranges or self.headers.get("If-Range", page.etag) != page.etag:
                return 0
            return int(asked.removeprefix("bytes=").partition("-")[0])

        def _send_body(self, page: Page, body: bytes) -> None:
            limit = page.breaks.pop(0) if page.breaks else len(body)
            self.wfile.write(body[:limit])
            if limit < len(body):
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def json_page(value: object) -> Page:
    """Return a page of JSON."""
    return Page(json.dumps(value).encode(), headers={"Content-Type": "application/json"}, etag=None)
