"""A server that answers as the Hugging Face Hub does."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def model_hub(
    files: Mapping[str, bytes], answer: Callable[[str], object], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """huggingface_hub asks it; `answer` gives the JSON of a path of the API, None for one that it does not know. Yields
    the names of the files that were asked for, as they are."""
    asked: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name, answered = self.path.partition(f"/resolve/{COMMIT}/")[2], answer(self.path)
            if answered is not None:
                self._send(json.dumps(answered).encode())
            elif name in files:
                if self.command == "GET":
                    asked.append(name)
                self._send(files[name])
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def _send(self, body):
            self.send_response(200)
            digest = hashlib.sha256(body).hexdigest()
            for key, value in {"Content-Length": len(body), "ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache_dir))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield asked
    server.shutdown()
