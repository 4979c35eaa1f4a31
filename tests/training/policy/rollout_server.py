"""A server of SGLang's protocol around our in-process engine, in a thread; it can die, come back and answer wrongly."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from model.formats.hf_checkpoint import load_model
from model.generation.generation import InProcessEngine, Sampling

Spoil = Callable[[list[dict[str, Any]]], Any]
STARTED = "started"
"""Version of the weights of a server that was given none."""


class RolloutServer:
    """Begins with the weights of a directory. `spoil` changes what it answers; `num_asked` counts prompts."""

    def __init__(self, hf_dir: Path, port: int = 0, spoil: Spoil = lambda answers: answers) -> None:
        self.spoil, self.num_asked, self.versions = spoil, 0, [STARTED]
        self.engine = InProcessEngine(load_model(hf_dir), weights_version=STARTED, batch_sequences=16)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(owner.answers(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answers(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/update_weights_from_disk":
            version = body["weight_version"]
            model = load_model(Path(body["model_path"]))
            self.engine = InProcessEngine(model, weights_version=version, batch_sequences=16)
            self.versions.append(version)
            return {"success": True, "message": ""}
        assert path == "/generate" and body["return_logprob"], path
        self.num_asked += len(body["input_ids"])
        return self.spoil(
            [self._answer(*asked) for asked in zip(body["input_ids"], body["sampling_params"], strict=True)]
        )

    def _answer(self, prompt: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(
            asked["max_new_tokens"],
            asked["temperature"],
            asked["top_p"],
            tuple(asked["stop_token_ids"]),
            asked["sampling_seed"],
        )
        made = self.engine.generate([prompt], sampling, self.engine.weights_version)
        (token_ids,), (values,) = made.token_ids, made.sampled_log_probabilities
        scored = [[value, token_id, None] for value, token_id in zip(values, token_ids, strict=True)]
        about = {"output_token_logprobs": scored, "weight_version": self.engine.weights_version}
        return {"output_ids": token_ids, "meta_info": about}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
