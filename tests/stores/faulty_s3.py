"""A proxy in front of an S3 server that injects faults."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

# busy: 503 SlowDown. forbidden: 403. refuse: the connection is closed before the request is forwarded. lose: the
# request arrives, but its response does not. cut: half of the response's body arrives. shorten: like cut, and the
# response declares the length of that half. empty: the request arrives, but its response has no body. keep: the server
# deletes no files, and reports this in a successful response. keep_forbidden: like keep, with an error that no retry
# resolves. stall: the response never comes.
Fault = Literal["stall", "busy", "forbidden", "refuse", "lose", "cut", "shorten", "empty", "keep", "keep_forbidden"]

_ERRORS = {"busy": (503, "SlowDown", "Please reduce your request rate."), "forbidden": (403, "AccessDenied", "No.")}
_DELETE_ERRORS = {
    "keep": ("InternalError", "We encountered an internal error."),
    "keep_forbidden": ("AccessDenied", "No."),
}


@dataclass
class FaultyS3:
    """A running proxy and its faults.

    Attributes:
        endpoint: its URL.
        choose: returns the fault of a request by its method and path; None forwards the request.
        ends: set when the proxy ends, and with it the stalled requests.
        seen: all requests, each as "METHOD fault", or "METHOD passed" without a fault.
    """

    endpoint: str = ""
    choose: Callable[[str, str], Fault | None] = lambda method, path: None
    seen: list[str] = field(default_factory=list)
    ends: threading.Event = field(default_factory=threading.Event)

    def first(self, count: int, fault: Fault, *methods: str) -> None:
        """Let the next ``count`` requests with these methods fail."""
        left = [count]

        def choose(method: str, path: str) -> Fault | None:
            if method not in methods or left[0] == 0:
                return None
            left[0] -= 1
            return fault

        self.seen.clear()
        self.choose = choose

    def lose_completions(self, count: int) -> None:
        """Lose the responses to the next ``count`` requests that complete an upload in parts."""
        self.first(count, "lose", "POST")
        lose = self.choose
        self.choose = lambda method, path: lose(method, path) if "uploadId=" in path else None

    def always(self, fault: Fault) -> None:
        """Let every later request fail."""
        self.seen.clear()
        self.choose = lambda method, path: fault


@contextmanager
def faulty_s3(endpoint: str) -> Iterator[FaultyS3]:
    """Run a proxy in front of the server at ``endpoint``, on a separate thread."""
    proxy = FaultyS3()

    class Handler(_Handler):
        target = urlsplit(endpoint).netloc
        faulty_s3 = proxy

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="faulty-s3")
    thread.start()
    proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield proxy
    finally:
        proxy.ends.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # clients of S3 wait for its "100 Continue"
    timeout = 20
    target: str
    faulty_s3: FaultyS3

    def _forward_or_fail(self) -> None:
        self.close_connection = True  # one request per connection, so that a cut connection affects no other request
        assert "chunked" not in self.headers.get("Transfer-Encoding", "")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.faulty_s3.choose(self.command, self.path)
        self.faulty_s3.seen.append(f"{self.command} {fault or 'passed'}")
        if fault == "stall":
            self.faulty_s3.ends.wait(300)
            return
        if fault in _ERRORS:
            self._respond_with_error(*_ERRORS[fault])
            return
        if fault in _DELETE_ERRORS:
            self._respond_without_deleting(body, *_DELETE_ERRORS[fault])
            return
        if fault != "refuse":
            status, headers, content = self._forwarded(body)
            if fault in {None, "cut", "shorten", "empty"}:
                sent = content if fault is None else content[: 0 if fault == "empty" else len(content) // 2]
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() == "content-length" and fault in {"shorten", "empty"}:
                        self.send_header(name, str(len(sent)))
                    elif name.lower() not in {"connection", "transfer-encoding"}:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(sent)
        if fault is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward_or_fail  # noqa: N815

    def _forwarded(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.target, timeout=20)
        try:
            connection.request(self.command, self.path, body, {k: v for k, v in self.headers.items() if k != "Expect"})
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _respond_with_error(self, status: int, code: str, message: str) -> None:
        self._respond(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>")

    def _respond_without_deleting(self, body: bytes, code: str, message: str) -> None:
        details = f"<Code>{code}</Code><Message>{message}</Message>"
        errors = "".join(
            f"<Error><Key>{key}</Key>{details}</Error>" for key in re.findall(r"<Key>(.*?)</Key>", body.decode())
        )
        self._respond(200, f"<?xml version='1.0'?><DeleteResult>{errors}</DeleteResult>")

    def _respond(self, status: int, text: str) -> None:
        content = text.encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        return
