"""Samples on a server that holds the weights: token ids in, ids and log-probabilities out.

Weights go by file: the server reads a Hugging Face directory under the name of their version, and every answer names
the version that sampled it. An answer that does not fit raises EngineError. A server that is away is waited for, gets
the weights again, and is asked the same prompts again; nothing of a lost answer is kept. Runs in ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from model.generation.generation import Generation, Sampling
from tasks.training.policy.rollout_connection import AWAY, EngineError, RolloutProtocol, ServerAnswer, ServerConnection
from tasks.training.policy.sglang_rollouts import SglangProtocol
from tasks.training.policy.vllm_rollouts import VllmProtocol

PROTOCOLS: dict[str, RolloutProtocol] = {"sglang": SglangProtocol(), "vllm": VllmProtocol()}
"""By the values of objective.rollouts that name a server."""
PATIENCE_SECONDS = 600.0
"""How long a server may be away."""
RETRY_SECONDS = 0.5


class ServedEngine:
    """The engine of one version of the weights, which the server is given before its first prompts."""

    def __init__(
        self, kind: str, url: str, weights_dir: Path, weights_version: str, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """`kind` is a key of PROTOCOLS."""
        self.protocol, self.connection = PROTOCOLS[kind], ServerConnection(url)
        self.weights_dir, self.weights_version = weights_dir, weights_version
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
        answers = self._ask(prompts, sampling, draws)
        if any(answer.weights_version != weights_version for answer in answers):
            # A server that was started again since the last answers holds the weights of its start.
            self._holds_weights = False
            answers = self._ask(prompts, sampling, draws)
        for number, (answer, own) in enumerate(zip(answers, draws, strict=True)):
            self._refuse_unusable(number, answer, len(own))
        token_ids = [answer.token_ids for answer in answers]
        log_probabilities = [answer.log_probabilities for answer in answers]
        unknown = [[math.nan] * len(ids) for ids in token_ids]
        is_plain = sampling.temperature == 1.0
        return Generation(
            token_ids, log_probabilities if is_plain else unknown, log_probabilities, unknown, weights_version
        )

    def _ask(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, draws: Sequence[Sequence[float]]
    ) -> list[ServerAnswer]:
        """The answers of a server that holds the weights, however often it goes away meanwhile. The seconds in which it
        computed answers are none of its absence."""
        seconds_away = 0.0
        while True:
            began = time.monotonic()
            try:
                if not self._holds_weights:
                    self.protocol.give_weights(self.connection, self.weights_dir, self.weights_version)
                    self._holds_weights = True
                return self.protocol.sample(self.connection, prompts, sampling, draws)
            except AWAY as error:
                seconds_away += RETRY_SECONDS + (0.0 if self._holds_weights else time.monotonic() - began)
                self._holds_weights = False
                if seconds_away > self.patience_seconds:
                    raise EngineError(
                        f"{self.connection.url} was away for {self.patience_seconds:.0f} s ({error!r}): start the "
                        f"server again, and run again"
                    ) from error
                time.sleep(RETRY_SECONDS)

    def _refuse_unusable(self, number: int, answer: ServerAnswer, max_tokens: int) -> None:
        named, size = f"answer {number} of {self.connection.url}", len(answer.token_ids)
        if answer.weights_version != self.weights_version:
            raise EngineError(
                f"{named} was sampled by weights {answer.weights_version}, not {self.weights_version}: let no other "
                f"run use this server"
            )
        if answer.scored_ids != answer.token_ids or not 1 <= size <= max_tokens:
            raise EngineError(
                f"{named} has {size} tokens, of which {len(answer.scored_ids)} have a log-probability and {max_tokens} "
                f"were asked for at most"
            )
        if not all(map(math.isfinite, answer.log_probabilities)):
            raise EngineError(f"{named} has a log-probability that is no number")
