"""A read-only web server for this machine only.

    GET, HEAD /          the page
    GET, HEAD /events    server-sent events: the progress of each run, whenever it changes
    anything else        an error: 404 for other paths, 405 for other methods, 400 and 403 for other hosts and sites

It maps no path to a file, so no path can lead out of the runs folder. It listens on 127.0.0.1 only. A page of another
site could still reach it through the browser of the user, under a name of its own that resolves to 127.0.0.1: requests
must therefore name this host. Each request has a thread and its connection is closed after one answer, but a reader of
events is passed on to the watcher, which serves all of them. A client that sends nothing, or does not read, holds its
own thread only, and until a timeout.
"""

import io
import re
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from subquad_lab.report.live.rendering import Renderer
from subquad_lab.report.live.watcher import Watcher
from subquad_lab.system.text import warn

HOST = "127.0.0.1"
REQUEST_SECONDS = 10.0  # to send a request, and to accept each piece of the answer
LINGER_SECONDS, LINGER_PIECES = 1.0, 64
RECONNECT_MILLISECONDS = 2000
MAX_REQUEST_BYTES, PIECE_BYTES = 1 << 16, 1 << 16
MAX_CONNECTIONS = 1000
END_OF_REQUEST = re.compile(rb"\r?\n\r?\n")
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NOTHING_ALLOWED = "default-src 'none'; frame-ancestors 'none'"


class Server(ThreadingMixIn, TCPServer):
    """The server of a runs folder; `serve_forever` answers requests until `shutdown`."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, root: Path, port: int) -> None:
        self.renderer, self.watcher = Renderer(root), Watcher(root)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((HOST, port), Handler)
        self.port: int = self.server_address[1]
        names = {f"{HOST}:{self.port}", f"localhost:{self.port}"}
        self.hosts = names | {HOST, "localhost"} if self.port == 80 else names  # Browsers leave out port 80.
        self.watcher.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it if there are too many."""
        if self._free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # No thread could be started.
                self._free.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request; then pass its connection on to the watcher, or end it."""
        seen = None
        try:
            seen = Handler(request, client_address, self).seen
        except Exception:
            self.handle_error(request, client_address)
        finally:
            if seen is None:
                self._leave(request)
            else:
                self.watcher.add(request, seen, self._leave)

    def _leave(self, request: Any) -> None:
        self.shutdown_request(request)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing about a client that has gone; `Handler.do_GET` reports our own faults."""


class Handler(BaseHTTPRequestHandler):
    """One connection: a request and its answer."""

    server: Server
    server_version, sys_version = "subquad", ""
    is_refused = False
    seen: int | None = None  # version of the events that were sent, if more are to follow

    def setup(self) -> None:
        """Read the whole head of the request within a time limit, however slowly it arrives."""
        super().setup()
        self.connection: socket.socket
        head, end = b"", time.monotonic() + REQUEST_SECONDS
        while not END_OF_REQUEST.search(head) and len(head) <= MAX_REQUEST_BYTES:
            self.connection.settimeout(max(0.001, end - time.monotonic()))
            if not (added := self.connection.recv(PIECE_BYTES)):
                raise ConnectionError("the request ends early")
            head += added
        self.connection.settimeout(REQUEST_SECONDS)
        self.is_too_long = not END_OF_REQUEST.search(head)
        self.rfile = io.BufferedReader(io.BytesIO(head))

    def parse_request(self) -> bool:
        """Parse the request, and refuse it unless it is a GET or HEAD for this host."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host", [])
        refusal = None
        if self.is_too_long:
            refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        elif len(hosts) != 1:
            refusal = HTTPStatus.BAD_REQUEST
        elif hosts[0].strip().lower() not in self.server.hosts or self._is_embedded_elsewhere():
            refusal = HTTPStatus.FORBIDDEN
        elif self.command not in ("GET", "HEAD"):
            refusal = HTTPStatus.METHOD_NOT_ALLOWED
        if refusal is not None:
            self.send_error(refusal)
        return refusal is None

    def _is_embedded_elsewhere(self) -> bool:
        """Return whether a page of another site requests this one as its image, script or the like."""
        site, mode = (self.headers.get(f"Sec-Fetch-{name}", "") for name in ("Site", "Mode"))
        return site in ("cross-site", "same-site") and mode != "navigate"

    def do_GET(self) -> None:
        try:
            if self.path == "/":
                page = self.server.renderer.rendered()
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.html, page.policy)
            elif self.path == "/events":
                self._send_events()
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            warn(f"{type(error).__name__}: {error}")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error as plain text that does not quote the request."""
        status = HTTPStatus(code)
        self.is_refused = True
        self._send(status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode(), NOTHING_ALLOWED)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, policy: str) -> None:
        self.close_connection = True
        allowed = {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        self._send_head(status, {"Content-Type": kind, "Content-Length": str(len(content)), **allowed}, policy)
        if self.command != "HEAD":
            for begin in range(0, len(content), PIECE_BYTES):
                self.wfile.write(content[begin : begin + PIECE_BYTES])

    def _send_head(self, status: HTTPStatus, headers: dict[str, str], policy: str) -> None:
        self.send_response(status)
        for name, value in {**headers, **HEADERS, "Content-Security-Policy": policy}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_events(self) -> None:
        """Send the newest message of each run; the watcher sends what follows."""
        self.close_connection = True
        self._send_head(HTTPStatus.OK, {"Content-Type": "text/event-stream"}, NOTHING_ALLOWED)
        if self.command == "HEAD":
            return
        seen, messages = self.server.watcher.since(0)
        self.wfile.write(f"retry: {RECONNECT_MILLISECONDS}\n\n".encode() + messages)
        self.seen = seen

    def finish(self) -> None:
        """Read what is left of a refused request: closing at once would discard the answer on its way."""
        super().finish()
        if self.is_refused:
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_SECONDS)
            for _ in range(LINGER_PIECES):
                if not self.connection.recv(PIECE_BYTES):
                    break

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: requests are not errors."""
