"""Asks a server that samples answers and scores rows, and what such a server answers. Runs in ranks."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from model.generation.generation import NonFiniteLogitsError, Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

ANSWER_SECONDS = 3600.0
"""Limit of one request."""
MAX_SEED = 2**31
ONE_TOKEN, ONE_DRAW = Sampling(1, 1.0), (0.0,)
"""By which a row that is scored is continued; at temperature 1 every server reports the model's own probabilities."""
AWAY = (ConnectionError, http.client.HTTPException, TimeoutError)
"""What a connection raises whose other end is gone."""
STARTING = 503
"""Status of a server that is not ready."""


class EngineError(RuntimeError):
    """Answers that cannot be trained on, or a server that stays away."""


class RefusedRequestError(EngineError):
    """A request that a server refuses."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BrokenWeightsError(EngineError, NonFiniteLogitsError):
    """An answer with a log-probability that is no number: an evaluation counts it, training stops at it."""

    def __init__(self, message: str) -> None:
        RuntimeError.__init__(self, message)


@dataclass(frozen=True)
class ServerAnswer:
    """One answer as a server gave it."""

    token_ids: list[int]
    """With the stop token that ended it, if one did."""
    scored_ids: list[int]
    """Of the tokens that have a log-probability."""
    log_probabilities: list[float]
    """At the sampling's temperature; NaN where the weights are broken."""
    weights_version: str
    """Of the weights that sampled it; several where they changed meanwhile."""
    experts: NDArray[np.integer[Any]] | None = None
    """Of each token that was read, of each layer: those that it was sent to. None where the server names none."""


class TokenScore(NamedTuple):
    """An engine's view of one token after those before it."""

    log_probability: float
    """NaN where the weights are broken."""
    is_greedy: bool
    """Whether no token is more likely there."""


@dataclass(frozen=True)
class ServerScores:
    """What a server says of the tokens of one row."""

    tokens: list[TokenScore]
    """Of every token after the first, at temperature 1."""
    weights_version: str
    """As of an answer."""


class RolloutProtocol(Protocol):
    """How a kind of server is given weights and asked."""

    def give_weights(self, connection: ServerConnection, weights_dir: Path, weights_version: str) -> None:
        """Have the server read a Hugging Face directory and answer under the name of its version. Raises EngineError,
        and one of AWAY."""
        ...

    def sample(
        self,
        connection: ServerConnection,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[Sequence[float]],
    ) -> list[ServerAnswer]:
        """Continue each prompt by as many tokens at most as it has draws; the first seeds the server's own. Raises
        EngineError, and one of AWAY."""
        ...

    def score(self, connection: ServerConnection, rows: Sequence[Sequence[int]]) -> list[ServerScores]:
        """Log-probability of every token of each row after the first. Servers score what they are about to continue:
        each row is continued by one token, which nobody reads. Raises EngineError, and one of AWAY."""
        ...


class ServerConnection:
    """Posts JSON to one server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def post(self, path: str, body: dict[str, Any]) -> Any:
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
            said = f"{self.url}{path} answered with status {error.code}: {error.read()[:300]!r}"
            raise RefusedRequestError(said, error.code) from error
        except urllib.error.URLError as error:
            raise ConnectionError(str(error.reason)) from error
        except ValueError as error:
            raise EngineError(f"{self.url}{path} did not answer in JSON: {error}") from error


def server_seed(draws: Sequence[float]) -> int:
    """The seed of an answer, of the first of its draws."""
    return int(draws[0] * MAX_SEED)
