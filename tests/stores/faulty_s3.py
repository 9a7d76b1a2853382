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
# request arrives, but its answer does not. cut: half of the answer's body arrives. shorten: like cut, and the answer
# declares the length of that half. empty: the request arrives, but its answer has no body. keep: the server deletes no
# files, and reports this in a successful answer. keep_forbidden: like keep, with an error that no retry resolves.
Fault = Literal["busy", "forbidden", "refuse", "lose", "cut", "shorten", "empty", "keep", "keep_forbidden"]

_ERRORS = {"busy": (503, "SlowDown", "Please reduce your request rate."), "forbidden": (403, "AccessDenied", "No.")}
_KEPT = {"keep": ("InternalError", "We encountered an internal error."), "keep_forbidden": ("AccessDenied", "No.")}


@dataclass
class FaultyS3:
    """A running relay.

    Attributes:
        endpoint: its URL.
        choose: returns the fault of a request by its method and path; None forwards the request.
        seen: all requests, as "METHOD fault or 'passed'".
    """

    endpoint: str = ""
    choose: Callable[[str, str], Fault | None] = lambda method, path: None
    seen: list[str] = field(default_factory=list)

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

    def always(self, fault: Fault) -> None:
        """Let every later request fail."""
        self.seen.clear()
        self.choose = lambda method, path: fault


@contextmanager
def faulty_s3(endpoint: str) -> Iterator[FaultyS3]:
    """Run a relay in front of the server at ``endpoint``, on a separate thread."""
    relay = FaultyS3()

    class Handler(_Handler):
        target = urlsplit(endpoint).netloc
        faulty = relay

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="faulty-s3")
    thread.start()
    relay.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield relay
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # clients of S3 wait for its "100 Continue"
    timeout = 20
    target: str
    faulty: FaultyS3

    def _relay(self) -> None:
        self.close_connection = True  # one request per connection, so that cutting one harms no other
        assert "chunked" not in self.headers.get("Transfer-Encoding", "")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.faulty.choose(self.command, self.path)
        self.faulty.seen.append(f"{self.command} {fault or 'passed'}")
        if fault in _ERRORS:
            self._answer_error(*_ERRORS[fault])
            return
        if fault in _KEPT:
            self._answer_kept(body, *_KEPT[fault])
            return
        if fault != "refuse":
            status, headers, content = self._passed_on(body)
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

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay  # noqa: N815

    def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.target, timeout=20)
        try:
            connection.request(self.command, self.path, body, {k: v for k, v in self.headers.items() if k != "Expect"})
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer_error(self, status: int, code: str, message: str) -> None:
        self._answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>")

    def _answer_kept(self, body: bytes, code: str, message: str) -> None:
        why = f"<Code>{code}</Code><Message>{message}</Message>"
        errors = "".join(
            f"<Error><Key>{key}</Key>{why}</Error>" for key in re.findall(r"<Key>(.*?)</Key>", body.decode())
        )
        self._answer(200, f"<?xml version='1.0'?><DeleteResult>{errors}</DeleteResult>")

    def _answer(self, status: int, text: str) -> None:
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
