"""An S3 server that fails: a proxy before a real one, which answers 500 or 503, resets connections, loses answers and
cuts bodies. It keeps every request with its client's address: the log of the server."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from configs.files.s3_objects import s3_client

KINDS = ("500", "503", "reset", "lost", "cut")
"""reset: before the server sees the request. lost: the server has done it, its answer never arrives. cut: half of the
answer's body."""
REFUSALS = {"ExpiredToken": 400, "RequestTimeTooSkewed": 403, "PermanentRedirect": 301}
"""More kinds: the server refuses the client, with this status."""
HOP_HEADERS = ("connection", "transfer-encoding", "content-length", "expect")
REFUSAL_HEADERS = {"Content-Type": "application/xml", "x-amz-bucket-region": "eu-west-1"}


@dataclass(frozen=True)
class Request:
    """What the server was asked, and by whom."""

    client: str
    """Address of the machine."""
    method: str
    path: str
    num_bytes: int
    """Size of its body."""


Plan = Callable[[Request], str]
"""The fault of a request; an empty one is none. The request waits for the answer."""


def one_in(every: int, seed: int) -> Plan:
    """A fault of any kind at one request in `every`."""
    draw, one_at_a_time = random.Random(seed), threading.Lock()

    def plan(request: Request) -> str:
        with one_at_a_time:
            return draw.choice(KINDS) if draw.random() < 1 / every else ""

    return plan


class FaultyServer(ThreadingHTTPServer):
    """A proxy before `server_url`; `requests` and `faults` are those that it has seen and made so far."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, server_url: str, plan: Plan, host: str) -> None:
        super().__init__((host, 0), Proxy)
        self.url = f"http://{host}:{self.server_port}"
        self.upstream, self.plan = urlsplit(server_url), plan
        self.requests: list[Request] = []
        self.faults: list[str] = []

    def handle_error(self, request: object, address: object) -> None:
        """Connections that were reset on purpose."""


class Proxy(BaseHTTPRequestHandler):
    """Answers one connection, as the server's plan says."""

    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def pass_on(self) -> None:
        body = self.read_body()
        request = Request(self.client_address[0], self.command, self.path, len(body))
        self.server.requests.append(request)
        fault = self.server.plan(request)
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
        try:
            connection.request(self.command, self.path, body, self.forwarded())
            answer = connection.getresponse()
            content, headers = answer.read(), dict(answer.getheaders())
        except (OSError, http.client.HTTPException) as error:
            self.server.faults.append(f"broken {self.command} {self.path}: {error!r}")
            return self.answer(503, {}, b"")
        finally:
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
def faulty(server_url: str, plan: Plan, host: str = "127.0.0.1") -> Iterator[FaultyServer]:
    """A proxy before the server, which listens on `host`."""
    proxy = FaultyServer(server_url, plan, host)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()


@contextmanager
def served_by(server_url: str, plan: Plan) -> Iterator[FaultyServer]:
    """The same, for requests that this process makes with its client (configs/files/s3_objects.py)."""
    with faulty(server_url, plan) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        s3_client.cache_clear()
        yield server
    s3_client.cache_clear()


def no_fault(request: Request) -> str:
    """A plan."""
    return ""
