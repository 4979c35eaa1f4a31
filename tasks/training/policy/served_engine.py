"""Samples and scores on a server that holds the weights: token ids in, ids and log-probabilities out.

Weights go by file: the server reads a Hugging Face directory under the name of their version, and every answer names
the version that sampled it. An answer that does not fit raises EngineError. A server that is away is waited for, gets
the weights again, and is asked the same prompts again; nothing of a lost answer is kept. Runs in ranks, and where
checkpoints are evaluated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from model.generation.continuation_scores import ContinuationScore, Pair
from model.generation.generation import Generation, Sampling, sampling_draws
from tasks.training.policy.rollout_connection import (
    AWAY,
    BrokenWeightsError,
    EngineError,
    RolloutProtocol,
    ServerAnswer,
    ServerConnection,
    ServerScores,
    TokenScore,
)
from tasks.training.policy.served_routes import read_routes
from tasks.training.policy.sglang_rollouts import SglangProtocol
from tasks.training.policy.vllm_rollouts import VllmProtocol

if TYPE_CHECKING:
    from configs.schema import ModelRecipe

PROTOCOLS: dict[str, RolloutProtocol] = {"sglang": SglangProtocol(), "vllm": VllmProtocol()}
"""By the values of `rollouts` that name a server."""
PATIENCE_SECONDS = 600.0
"""How long a server may be away."""
RETRY_SECONDS = 0.5

A = TypeVar("A", ServerAnswer, ServerScores)


class ServedEngine:
    """The engine of one version of the weights, which the server is given before its first prompts."""

    def __init__(
        self,
        kind: str,
        url: str,
        weights_dir: Path,
        weights_version: str,
        recipe: ModelRecipe | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`kind` is a key of PROTOCOLS. `recipe`: of the model whose routes are kept; None keeps none."""
        self.protocol, self.connection = PROTOCOLS[kind], ServerConnection(url)
        self.weights_dir, self.weights_version = weights_dir, weights_version
        self.recipe, self.patience_seconds = recipe, patience_seconds
        self._holds_weights = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        weights_version: str,
        draws: Sequence[Sequence[float]] | None = None,
    ) -> Generation:
        """Continue each prompt by as many tokens at most as it has draws; the first seeds the server's own. None: those
        of `sampling_draws`. What ends a continuation by its text (`sampling.ends`) ends none here. Raises
        EngineError, also for answers without routes where they are to be kept, and BrokenWeightsError where nothing can
        be drawn; what such weights continue greedily has the log-probability NaN."""
        assert weights_version == self.weights_version, (weights_version, self.weights_version)
        given = sampling_draws(sampling, len(prompts)) if draws is None else draws
        answers = self._ask(lambda: self.protocol.sample(self.connection, prompts, sampling, given))
        for number, (answer, own) in enumerate(zip(answers, given, strict=True)):
            self._refuse_unusable(number, answer, len(own), is_drawn=sampling.temperature > 0)
        routes = None
        if sampling.keeps_routes:
            assert self.recipe is not None, "the routes of a model without a recipe"
            routes = [
                read_routes(self._named(number), answer, len(prompt), self.recipe)
                for number, (answer, prompt) in enumerate(zip(answers, prompts, strict=True))
            ]
        token_ids = [answer.token_ids for answer in answers]
        log_probabilities = [answer.log_probabilities for answer in answers]
        unknown = [[math.nan] * len(ids) for ids in token_ids]
        # Servers compute greedy answers, of temperature 0, at temperature 1.
        is_plain = sampling.temperature in (0.0, 1.0)
        return Generation(
            token_ids, log_probabilities if is_plain else unknown, log_probabilities, unknown, weights_version, routes
        )

    def score(self, token_id_sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural log-probability of every token after the first, given those before it; NaN of broken weights. Raises
        EngineError."""
        return [[token.log_probability for token in row] for row in self._scores(token_id_sequences)]

    def score_continuations(self, pairs: Sequence[Pair]) -> list[ContinuationScore]:
        """Log-probability of every continuation after its context, and whether it is the greedy one. Raises
        EngineError."""
        rows = self._scores([[*context, *continuation] for context, continuation in pairs])
        scored = [row[-len(continuation) :] for row, (_, continuation) in zip(rows, pairs, strict=True)]
        return [
            ContinuationScore(sum(token.log_probability for token in own), all(token.is_greedy for token in own))
            for own in scored
        ]

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[list[TokenScore]]:
        if not rows:
            return []
        answers = self._ask(lambda: self.protocol.score(self.connection, rows))
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            named, values = self._named(number), [token.log_probability for token in answer.tokens]
            self._refuse_other_weights(named, answer.weights_version)
            if len(values) != len(row) - 1:
                raise EngineError(
                    f"{named} has the log-probabilities of {len(values)} tokens of its row, which has {len(row) - 1} "
                    f"after its first"
                )
        return [answer.tokens for answer in answers]

    def _ask(self, request: Callable[[], list[A]]) -> list[A]:
        """The answers to a request; a second time where the first ones are of other weights."""
        answers = self._ask_holder(request)
        if any(answer.weights_version != self.weights_version for answer in answers):
            # A server that was started again since the last answers holds the weights of its start.
            self._holds_weights = False
            answers = self._ask_holder(request)
        return answers

    def _ask_holder(self, request: Callable[[], list[A]]) -> list[A]:
        """The answers of a server that holds the weights, however often it goes away meanwhile. The seconds in which it
        computed answers are none of its absence."""
        seconds_away = 0.0
        while True:
            began = time.monotonic()
            try:
                if not self._holds_weights:
                    self.protocol.give_weights(self.connection, self.weights_dir, self.weights_version)
                    self._holds_weights = True
                return request()
            except AWAY as error:
                seconds_away += RETRY_SECONDS + (0.0 if self._holds_weights else time.monotonic() - began)
                self._holds_weights = False
                if seconds_away > self.patience_seconds:
                    raise EngineError(
                        f"{self.connection.url} was away for {self.patience_seconds:.0f} s ({error!r}): start the "
                        f"server again, and run again"
                    ) from error
                time.sleep(RETRY_SECONDS)

    def _refuse_unusable(self, number: int, answer: ServerAnswer, max_tokens: int, *, is_drawn: bool) -> None:
        named, size = self._named(number), len(answer.token_ids)
        self._refuse_other_weights(named, answer.weights_version)
        if answer.scored_ids != answer.token_ids or not 1 <= size <= max_tokens:
            raise EngineError(
                f"{named} has {size} tokens, of which {len(answer.scored_ids)} have a log-probability and {max_tokens} "
                f"were asked for at most"
            )
        if is_drawn and not all(map(math.isfinite, answer.log_probabilities)):
            raise BrokenWeightsError(f"{named} has a log-probability that is no number: the weights are broken")

    def _named(self, number: int) -> str:
        return f"answer {number} of {self.connection.url}"

    def _refuse_other_weights(self, named: str, version: str) -> None:
        if version != self.weights_version:
            raise EngineError(
                f"{named} was sampled by weights {version}, not {self.weights_version}: let no other run use this "
                f"server"
            )
