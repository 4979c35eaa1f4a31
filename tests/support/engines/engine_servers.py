"""Servers around our in-process engine that speak as SGLang and vLLM do, each in a thread: they can die, come back and
answer wrongly. Also a program `vllm` for PATH:

    vllm --version
    vllm serve DIRECTORY --host HOST --port PORT ...
"""

from __future__ import annotations

import base64
import io
import json
import math
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.architecture.routes import recorded_routes
from model.formats.hf_checkpoint import load_model
from model.generation.generation import InProcessEngine, Sampling
from tests.conftest import ROOT

Spoil = Callable[[Any], Any]
STARTED = "started"
"""Version of the weights of a server that was given none."""
VLLM_VERSION = "0.32.0+cpu"


class Server(ThreadingHTTPServer):
    """Every prompt is a connection of its own, all at once: a full queue of them would be reset, as by a server that is
    away."""

    request_queue_size = 512


class RefusedError(ValueError):
    """What a server does not answer, with status 400."""


class EngineServer(ABC):
    """Begins with the weights of a directory. `spoil` changes what it answers to prompts; `num_asked` counts them."""

    is_broken = False
    """Whether it answers as with weights that are not finite."""
    no_number: float
    """The log-probability that it reports then."""
    turned_by = 0
    """How far from the experts that it uses those are that it names."""

    def __init__(self, hf_dir: Path, port: int = 0, spoil: Spoil = lambda answer: answer) -> None:
        self.spoil, self.num_asked, self.versions = spoil, 0, [STARTED]
        self.lock = threading.Lock()
        self.load(hf_dir, STARTED)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/health" else 404)
                self.end_headers()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = 200
                with owner.lock:
                    try:
                        answer = json.dumps(owner.answer(self.path, body)).encode()
                    except RefusedError as error:
                        status, answer = 400, json.dumps({"error": {"message": str(error)}}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.http = Server(("127.0.0.1", port), Handler)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def load(self, hf_dir: Path, version: str) -> None:
        self.engine = InProcessEngine(load_model(hf_dir), weights_version=version, batch_sequences=16)

    def continue_prompt(self, prompt: list[int], sampling: Sampling) -> tuple[list[int], list[float]]:
        self.num_asked += 1
        if self.is_broken:
            return [0] * sampling.max_new_tokens, [self.no_number] * sampling.max_new_tokens
        made = self.engine.generate([prompt], sampling, self.engine.weights_version)
        return made.token_ids[0], made.sampled_log_probabilities[0]

    def routes(self, row: list[int]) -> NDArray[np.int64]:
        """What is said of the experts that a row's tokens went to, (T, layers, K): zeros in layers without experts."""
        model, layers = self.engine.model, self.engine.model.trunk_layers
        with torch.no_grad(), recorded_routes(layers) as recorded:
            model.hidden_states(torch.tensor([row]))
        chosen = (torch.stack(recorded, 1) + self.turned_by) % model.recipe.n_routed_experts
        none = torch.zeros(len(row), len(layers) - len(recorded), chosen.shape[-1], dtype=chosen.dtype)
        return torch.cat((none, chosen), 1).numpy()

    def scores(self, row: list[int]) -> list[tuple[float, float, int]]:
        """Of every token after the first its log-probability, and that of the most likely token with its id."""
        with torch.no_grad():
            scores_TV = self.engine.model(torch.tensor([row])).logits_BTV[0].float().log_softmax(-1)
            scores_TV = scores_TV * math.nan if self.is_broken else scores_TV
        best_values, best_ids = (each.tolist() for each in scores_TV[:-1].max(-1))
        own = scores_TV[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
        return list(zip(own, best_values, best_ids, strict=True))

    @abstractmethod
    def answer(self, path: str, body: dict[str, Any]) -> Any: ...


class SglangServer(EngineServer):
    no_number = math.nan

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/update_weights_from_disk":
            self.load(Path(body["model_path"]), body["weight_version"])
            self.versions.append(body["weight_version"])
            return {"success": True, "message": ""}
        assert path == "/generate" and body["return_logprob"], path
        answers = [self._continued(*asked) for asked in zip(body["input_ids"], body["sampling_params"], strict=True)]
        for prompt, answer in zip(
            body["input_ids"], answers if body.get("return_routed_experts") else [], strict=False
        ):
            experts = self.routes([*prompt, *answer["output_ids"][:-1]]).astype(np.int32)
            answer["meta_info"]["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        if "logprob_start_len" in body:
            assert (body["logprob_start_len"], body["top_logprobs_num"]) == (0, 1), body
            for row, answer in zip(body["input_ids"], answers, strict=True):
                scores = self.scores(row)
                answer["meta_info"] |= {
                    "input_token_logprobs": [
                        [value, token_id, None]
                        for value, token_id in zip([None, *(own for own, _, _ in scores)], row, strict=True)
                    ],
                    "input_top_logprobs": [None, *([[best, best_id, None]] for _, best, best_id in scores)],
                }
        return self.spoil(answers)

    def _continued(self, prompt: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(
            asked["max_new_tokens"],
            asked["temperature"],
            asked["top_p"],
            tuple(asked["stop_token_ids"]),
            asked["sampling_seed"],
        )
        token_ids, values = self.continue_prompt(prompt, sampling)
        scored = [[value, token_id, None] for value, token_id in zip(values, token_ids, strict=True)]
        about = {"output_token_logprobs": scored, "weight_version": self.engine.weights_version}
        return {"output_ids": token_ids, "meta_info": about}


class VllmServer(EngineServer):
    """`stale` is True from new weights on until the keys and values of old ones are dropped; `names_experts` as with
    `--enable-return-routed-experts`."""

    stale, names_experts, no_number = False, False, -9999.0

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/completions":
            return {"choices": [{"prompt_logprobs": self._scores(row)} for row in body["prompt"]]}
        if path == "/collective_rpc":
            assert body["method"] == "read_weights", body
            self.load(Path(body["kwargs"]["weights_path"]), self.engine.weights_version)
            self.stale = True
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            self.stale = False
            return {"success": True}
        if path == "/update_weight_version":
            assert not self.stale, "old keys and values under a new name"
            self.engine.weights_version = body["new_version"]
            self.versions.append(body["new_version"])
            return {"success": True, "new_version": body["new_version"]}
        assert path == "/inference/v1/generate", path
        return self.spoil(self._continued(body["token_ids"], body["sampling_params"]))

    def _continued(self, prompt: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["logprobs"] == 0, asked
        sampling = Sampling(
            asked["max_tokens"], asked["temperature"], asked["top_p"], tuple(asked["stop_token_ids"]), asked["seed"]
        )
        token_ids, values = self.continue_prompt(prompt, sampling)
        content = [{"token_id": id_, "logprob": value} for id_, value in zip(token_ids, values, strict=True)]
        span = {"version": self.engine.weights_version, "start": 0, "end": len(token_ids)}
        choice = {"index": 0, "finish_reason": "length" if len(token_ids) == asked["max_tokens"] else "stop"}
        if self.names_experts:
            file = io.BytesIO()
            np.save(file, self.routes([*prompt, *token_ids[:-1]]).astype(np.uint8))
            choice["routed_experts"] = base64.b64encode(file.getbuffer()).decode()
        choice |= {"token_ids": token_ids, "logprobs": {"content": content}, "weight_versions": [span]}
        if self.is_broken and "prompt_logprobs" in asked:
            raise RefusedError("Out of range float values are not JSON compliant")
        reported = self._scores(prompt) if "prompt_logprobs" in asked else None
        return {"request_id": "r", "choices": [choice], "prompt_logprobs": reported}

    def _scores(self, row: list[int]) -> list[Any]:
        """Of each token but the first its log-probability and the most likely token's, by their ids."""
        return [
            None,
            *(
                {str(best_id): {"logprob": best}} | {str(token_id): {"logprob": own}}
                for token_id, (own, best, best_id) in zip(row[1:], self.scores(row), strict=True)
            ),
        ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_vllm_program(directory: Path) -> Path:
    """The program `vllm` in a folder for PATH."""
    program = directory / "vllm"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.support.engines.engine_servers import main\nmain()\n"
    )
    program.chmod(0o755)
    return program


def main() -> None:
    """What the program does."""
    words = sys.argv[1:]
    if words == ["--version"]:
        print(VLLM_VERSION)
        return
    assert words[0] == "serve" and words[words.index("--host") + 1] == "127.0.0.1", words
    VllmServer(Path(words[1]), int(words[words.index("--port") + 1]))
    threading.Event().wait()
