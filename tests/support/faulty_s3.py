"""An S3 server that fails: a proxy before a real one, which answers 500 or 503, resets connections, loses answers and
cuts bodies."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

KINDS = ("500", "503", "reset", "lost", "cut")
"""reset: before the server sees the request. lost: the server has done it, its answer never arrives. cut: half of the
answer's body."""
REFUSALS = {"ExpiredToken": 400, "RequestTimeTooSkewed": 403, "PermanentRedirect": 301}
"""More kinds: the server refuses the client, with this status."""
HOP_HEADERS = ("connection", "transfer-encoding", "content-length", "expect")
REFUSAL_HEADERS = {"Content-Type": "application/xml", "x-amz-bucket-region": "eu-west-1"}
Plan = Callable[[str, str], str]
"""The fault of a request by its method and path; an empty one is none."""


def one_in(every: int, seed: int) -> Plan:
    """A fault of any kind at one request in `every`."""
    draw, one_at_a_time = random.Random(seed), threading.Lock()

    def plan(method: str, path: str) -> str:
        with one_at_a_time:
            return draw.choice(KINDS) if draw.random() < 1 / every else ""

    return plan


class FaultyServer(ThreadingHTTPServer):
    """A proxy before `server_url`; `faults` are those that it has made so far."""

    daemon_threads = True

    def __init__(self, server_url: str, plan: Plan) -> None:
        super().__init__(("127.0.0.1", 0), Proxy)
        self.upstream, self.plan = urlsplit(server_url), plan
        self.faults: list[str] = []

    def handle_error(self, request: object, address: object) -> None:
        """Connections that were reset on purpose."""


class Proxy(BaseHTTPRequestHandler):
    """Answers one connection, as the server's plan says."""

    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def pass_on(self) -> None:
        body = self.read_body()
        fault = self.server.plan(self.command, self.path)
        if fault:
            self.server.faults.append(f"{fault} {self.command} {self.path}")
        if fault in ("500", "503"):
            return self.answer(int(fault), {}, b"")
        if fault in REFUSALS:
            return self.answer(REFUSALS[fault], REFUSAL_HEADERS, f"<Error><Code>{fault}</Code></Error>".encode())
        if fault == "reset":
            return self.reset()
        upstream = self.server.upstream
        connection = http.client.HTTPConnection(upstream.hostname, upstream.port, timeout=60)
        connection.request(self.command, self.path, body, self.forwarded())
        answer = connection.getresponse()
        content, headers = answer.read(), dict(answer.getheaders())
        connection.close()
        if fault == "lost":
            return self.reset()
        return self.answer(answer.status, headers, content, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def forwarded(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}

    def answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        length = headers.get("Content-Length", str(len(content))) if self.command == "HEAD" else str(len(content))
        for name, value in {**headers, "Content-Length": length}.items():
            if name.lower() not in HOP_HEADERS[:2]:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.reset()

    def reset(self) -> None:
        """Close with RST, as a server does that is killed."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def faulty(server_url: str, plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """URL of a proxy before the server, and the faults it has made so far."""
    proxy = FaultyServer(server_url, plan)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", proxy.faults
    finally:
        proxy.shutdown()
        proxy.server_close()
