"""A server with the two requests of S3 that read an object, as slow as it is told: a wait before every answer, and a
bound on the bytes per second of all answers. It counts requests and bytes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TYPE_CHECKING

from configs.files.s3_objects import s3_client

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BUCKET = "benchmark"
PIECE_BYTES = 256 * 1024


class ThrottledServer(ThreadingHTTPServer):
    """Serves the files of a directory as the objects of BUCKET."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, root: Path, wait_seconds: float, bytes_per_second: float, counts: Counts) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.root, self.wait_seconds, self.bytes_per_second, self.counts = root, wait_seconds, bytes_per_second, counts
        self._one_at_a_time, self._free_at = threading.Lock(), 0.0

    def wait_for(self, num_bytes: int) -> None:
        """Until the line has room for them."""
        with self._one_at_a_time:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self.bytes_per_second
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


class Counts:
    """Of what was served, in memory that processes share."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests: Synchronized[int] = context.Value("q", 0)
        self._bytes: Synchronized[int] = context.Value("q", 0)

    def add(self, num_bytes: int) -> None:
        """One request was answered."""
        for counter, more in ((self._requests, 1), (self._bytes, num_bytes)):
            with counter.get_lock():
                counter.value += more

    def take(self) -> tuple[int, int]:
        """Requests and bytes since the last call."""
        taken = self._requests.value, self._bytes.value
        self._requests.value = self._bytes.value = 0
        return taken


class Answer(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: ThrottledServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        time.sleep(self.server.wait_seconds)
        self.server.counts.add(0)
        self._begin(200, self._path().stat().st_size)

    def do_GET(self) -> None:
        time.sleep(self.server.wait_seconds)
        size = self._path().stat().st_size
        first, last = 0, size - 1
        if given := self.headers.get("Range"):
            begin, _, end = given.removeprefix("bytes=").partition("-")
            first, last = int(begin), int(end or last)
        self._begin(206 if given else 200, last + 1 - first, f"bytes {first}-{last}/{size}")
        with open(self._path(), "rb") as file:
            file.seek(first)
            for begin in range(first, last + 1, PIECE_BYTES):
                data = file.read(min(PIECE_BYTES, last + 1 - begin))
                self.server.wait_for(len(data))
                self.wfile.write(data)
        self.server.counts.add(last + 1 - first)

    def _path(self) -> Path:
        return self.server.root / self.path.partition("?")[0].removeprefix(f"/{BUCKET}/")

    def _begin(self, status: int, length: int, content_range: str = "") -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"benchmark"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def serve(root: Path, wait_seconds: float, bytes_per_second: float, counts: Counts, port: Connection) -> None:
    """Answer until the process is ended; the port is sent first."""
    server = ThrottledServer(root, wait_seconds, bytes_per_second, counts)
    port.send(server.server_port)
    server.serve_forever()


@contextmanager
def throttled_s3(root: Path, wait_seconds: float, bytes_per_second: float) -> Iterator[Counts]:
    """A server process; its address is in the environment while the block runs."""
    context, counts = multiprocessing.get_context("spawn"), Counts()
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(root, wait_seconds, bytes_per_second, counts, there), daemon=True)
    process.start()
    settings = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{here.recv()}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    s3_client.cache_clear()  # a client keeps the address that it was made with
    try:
        yield counts
    finally:
        s3_client.cache_clear()
        process.terminate()
        process.join()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
