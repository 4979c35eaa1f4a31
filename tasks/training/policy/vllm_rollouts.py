"""vLLM's protocol: its worker reads the weights of a directory (infra/serving/vllm_worker.py), the keys and values of
older weights are dropped, and the version gets its name. Each prompt is a request of its own to
`/inference/v1/generate`, all at the same time: vLLM computes them together.

    glm46 serve --engine vllm --checkpoint HF_DIR --rollouts
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from model.generation.generation import Sampling
from tasks.training.policy.rollout_connection import (
    ONE_DRAW,
    ONE_TOKEN,
    EngineError,
    RefusedRequestError,
    ServerAnswer,
    ServerConnection,
    ServerScores,
    TokenScore,
    server_seed,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

MAX_REQUESTS = 256
"""Requests at the same time; vLLM lets those wait that it does not compute (`--max-num-seqs`)."""
START_WITH = "start it with `glm46 serve --engine vllm --checkpoint HF_DIR --rollouts`"
ABSENT = (403, 404, 500)
"""Statuses of a path, or a method of the worker, that a server was not started with."""
BROKEN = -9999.0
"""Log-probability that vLLM reports where the logits are not finite; of rows it answers with NOT_JSON in its place."""
NOT_JSON = "Out of range float values are not JSON compliant"
ENDED = ("stop", "length")
"""Reasons of an answer that ended by itself; an abort has another."""


class VllmProtocol:
    """Of vLLM 0.32 and later."""

    def give_weights(self, connection: ServerConnection, weights_dir: Path, weights_version: str) -> None:
        _ask(connection, "/collective_rpc", {"method": "read_weights", "kwargs": {"weights_path": str(weights_dir)}})
        for path, body in (("/reset_prefix_cache", {}), ("/update_weight_version", {"new_version": weights_version})):
            done = _ask(connection, path, body)
            if not isinstance(done, dict) or done.get("success") is not True:
                raise EngineError(f"{connection.url}{path} failed after it read {weights_dir}: {str(done)[:300]}")

    def sample(
        self,
        connection: ServerConnection,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[Sequence[float]],
    ) -> list[ServerAnswer]:
        answers = _generate(connection, prompts, [_parameters(sampling, own) for own in draws])
        return [_read(connection, number, answer) for number, answer in enumerate(answers)]

    def score(self, connection: ServerConnection, rows: Sequence[Sequence[int]]) -> list[ServerScores]:
        answers = _each(lambda row: _score(connection, row), rows)
        return [_read_scores(connection, number, row, answers[number]) for number, row in enumerate(rows)]


def read_prompt_scores(named: str, row: Sequence[int], reported: Any) -> list[TokenScore]:
    """Of the tokens of a row after the first what vLLM reports as `prompt_logprobs`: by position the row's token and
    the most likely one, by id. Raises EngineError, which begins with `named`, where it does not."""
    try:
        tokens = []
        for token_id, entry in zip(row[1:], reported[1:], strict=False):
            value = float(entry[str(token_id)]["logprob"])
            tokens.append(TokenScore(value, value >= max(float(each["logprob"]) for each in entry.values())))
        return tokens
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"{named} has no prompt_logprobs of its row's tokens ({error!r}): use a server of vLLM, 0.32 or later"
        ) from error


def _generate(
    connection: ServerConnection, prompts: Sequence[Sequence[int]], parameters: Sequence[dict[str, Any]]
) -> list[Any]:
    bodies = [
        {"token_ids": list(prompt), "sampling_params": own} for prompt, own in zip(prompts, parameters, strict=True)
    ]
    return _each(lambda body: _ask(connection, "/inference/v1/generate", body), bodies)


def _each(ask: Callable[[T], Any], asked: Sequence[T]) -> list[Any]:
    with ThreadPoolExecutor(min(len(asked), MAX_REQUESTS)) as requests:
        return list(requests.map(ask, asked))


def _score(connection: ServerConnection, row: Sequence[int]) -> Any:
    """The answer with the log-probabilities of a row; without any where the weights are broken."""
    body = {"token_ids": list(row), "sampling_params": _parameters(ONE_TOKEN, ONE_DRAW)}
    scored = body["sampling_params"] | {"prompt_logprobs": 1}
    try:
        return _ask(connection, "/inference/v1/generate", body | {"sampling_params": scored})
    except RefusedRequestError as error:
        if NOT_JSON not in str(error):
            raise
    return _ask(connection, "/inference/v1/generate", body) | {"prompt_logprobs": NOT_JSON}


def _read_scores(connection: ServerConnection, number: int, row: Sequence[int], answer: Any) -> ServerScores:
    version, reported = _read(connection, number, answer).weights_version, answer.get("prompt_logprobs")
    if reported == NOT_JSON:
        return ServerScores([TokenScore(math.nan, False)] * (len(row) - 1), version)
    return ServerScores(read_prompt_scores(f"answer {number} of {connection.url}", row, reported), version)


def _ask(connection: ServerConnection, path: str, body: dict[str, Any]) -> Any:
    try:
        return connection.post(path, body)
    except RefusedRequestError as error:
        if error.status in ABSENT:
            raise EngineError(f"{error}; {START_WITH}") from error
        raise


def _parameters(sampling: Sampling, draws: Sequence[float]) -> dict[str, Any]:
    return {
        "max_tokens": len(draws),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": server_seed(draws),
        "logprobs": 0,
        "detokenize": False,
    }


def _read(connection: ServerConnection, number: int, answer: Any) -> ServerAnswer:
    try:
        (choice,) = answer["choices"]
        content, reason = choice["logprobs"]["content"], choice["finish_reason"]
        versions = ", ".join(span["version"] for span in choice["weight_versions"])
        log_probabilities = [float(each["logprob"]) for each in content]
        log_probabilities = [math.nan if value <= BROKEN else value for value in log_probabilities]
        scored_ids = [each["token_id"] for each in content]
        token_ids = list(choice["token_ids"])
        experts = _read_experts(choice.get("routed_experts"))
    except (KeyError, TypeError, ValueError, EOFError) as error:
        raise EngineError(
            f"answer {number} of {connection.url} has no token_ids with logprobs and weight_versions ({error!r}): "
            f"{START_WITH}"
        ) from error
    if reason not in ENDED:
        raise ConnectionError(f"answer {number} of {connection.url} was given up ({reason})")
    return ServerAnswer(token_ids, scored_ids, log_probabilities, versions, experts)


def _read_experts(written: str | None) -> NDArray[np.integer[Any]] | None:
    """Of the bytes of a .npy file in base64: (tokens, layers, experts of each)."""
    return (
        None if written is None else np.load(io.BytesIO(base64.b64decode(written, validate=True)), allow_pickle=False)
    )
