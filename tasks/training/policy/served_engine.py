"""Samples on a server that holds the weights, by SGLang's protocol: token ids in, ids and log-probabilities out.

Weights go by file: the server reads a Hugging Face directory (`/update_weights_from_disk`) under the name of their
version. Prompts go as token ids (`/generate`), and every answer names the version that sampled it. An answer that does
not fit raises EngineError. A server that is away is waited for, gets the weights again, and is asked the same prompts
again; nothing of a lost answer is kept. Runs in ranks.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.generation.generation import Generation, Sampling

ANSWER_SECONDS = 3600.0
"""Limit of one request."""
PATIENCE_SECONDS = 600.0
"""How long a server may be away."""
RETRY_SECONDS = 0.5
MAX_SEED = 2**31
AWAY = (ConnectionError, http.client.HTTPException, TimeoutError)
"""What a connection raises whose other end is gone."""
STARTING = 503
"""Status of a server that is not ready."""


class EngineError(RuntimeError):
    """A server's answer that cannot be trained on, or a server that stays away."""


class ServedEngine:
    """The engine of one version of the weights, which the server is given before its first prompts."""

    def __init__(
        self, url: str, weights_dir: Path, weights_version: str, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self.url, self.weights_dir, self.weights_version = url.rstrip("/"), weights_dir, weights_version
        self.patience_seconds = patience_seconds
        self._holds_weights = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        weights_version: str,
        draws: Sequence[Sequence[float]],
    ) -> Generation:
        """Continue each prompt by as many tokens at most as it has draws; the first seeds the server's own. Raises
        EngineError."""
        assert weights_version == self.weights_version, (weights_version, self.weights_version)
        answers = self._ask(
            {
                "input_ids": [list(prompt) for prompt in prompts],
                "sampling_params": [_parameters(sampling, own) for own in draws],
                "return_logprob": True,
            }
        )
        if not isinstance(answers, list) or len(answers) != len(prompts):
            raise EngineError(f"{self.url} gave {_size(answers)} answers to {len(prompts)} prompts")
        read = [self._read(number, *each) for number, each in enumerate(zip(answers, draws, strict=True))]
        token_ids = [ids for ids, _ in read]
        log_probabilities = [values for _, values in read]
        unknown = [[math.nan] * len(ids) for ids in token_ids]
        is_plain = sampling.temperature == 1.0
        return Generation(
            token_ids, log_probabilities if is_plain else unknown, log_probabilities, unknown, weights_version
        )

    def _ask(self, asked: dict[str, Any]) -> Any:
        """The answer of a server that holds the weights, however often it goes away meanwhile."""
        deadline = time.monotonic() + self.patience_seconds
        while True:
            try:
                if not self._holds_weights:
                    self._give_weights()
                return self._post("/generate", asked)
            except AWAY as error:
                self._holds_weights = False
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{self.url} was away for {self.patience_seconds:.0f} s ({error!r}): start the server again, "
                        f"and run again"
                    ) from error
                time.sleep(RETRY_SECONDS)

    def _give_weights(self) -> None:
        body = {"model_path": str(self.weights_dir), "weight_version": self.weights_version}
        done = self._post("/update_weights_from_disk", body)
        if not isinstance(done, dict) or done.get("success") is not True:
            raise EngineError(f"{self.url} did not load {self.weights_dir}: {str(done)[:300]}")
        self._holds_weights = True

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Raises one of AWAY where the server is gone or starting, EngineError for what it refuses."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == STARTING:
                raise ConnectionError(f"{path}: status {STARTING}") from error
            raise EngineError(f"{self.url}{path} answered with status {error.code}: {error.read()[:300]!r}") from error
        except urllib.error.URLError as error:
            raise ConnectionError(str(error.reason)) from error
        except ValueError as error:
            raise EngineError(f"{self.url}{path} did not answer in JSON: {error}") from error

    def _read(self, number: int, answer: Any, draws: Sequence[float]) -> tuple[list[int], list[float]]:
        """(token ids, their log-probabilities at the sampling's temperature)"""
        try:
            token_ids, about = list(answer["output_ids"]), answer["meta_info"]
            scored, version = about["output_token_logprobs"], about["weight_version"]
            log_probabilities, scored_ids = [float(each[0]) for each in scored], [each[1] for each in scored]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineError(
                f"answer {number} of {self.url} has no output_ids with output_token_logprobs and weight_version "
                f"({error!r}): use a server of SGLang's protocol, 0.5 or later"
            ) from error
        if version != self.weights_version:
            raise EngineError(
                f"answer {number} of {self.url} was sampled by weights {version}, not {self.weights_version}: let no "
                f"other run use this server"
            )
        if scored_ids != token_ids or not 1 <= len(token_ids) <= len(draws):
            raise EngineError(
                f"answer {number} of {self.url} has {len(token_ids)} tokens, of which {len(scored_ids)} have a "
                f"log-probability and {len(draws)} were asked for at most"
            )
        if not all(map(math.isfinite, log_probabilities)):
            raise EngineError(f"answer {number} of {self.url} has a log-probability that is no number")
        return token_ids, log_probabilities


def _parameters(sampling: Sampling, draws: Sequence[float]) -> dict[str, Any]:
    return {
        "max_new_tokens": len(draws),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": int(draws[0] * MAX_SEED),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


def _size(answers: Any) -> int:
    return len(answers) if isinstance(answers, list) else 1
