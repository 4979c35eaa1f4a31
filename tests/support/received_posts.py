"""A local server that keeps what is posted to it, as a team's webhook."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def receiving_posts() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Its URL, and the posts as (path, JSON); the answer is 200, or 500 below /broken."""
    received: list[tuple[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(500 if self.path.startswith("/broken") else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
