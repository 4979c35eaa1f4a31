"""The answers of a running llama.cpp server to token ids, as our own engine gives them to the same questions.

Prompts that follow one another and are equal go in one request, one answer per slot: llama.cpp reads the prompt once
and draws every answer with a seed of its own. Requests follow one another, so that what is computed together, and with
it the last bit of a logit, is the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tasks.evaluation.engine import Continuations

if TYPE_CHECKING:
    from model.generation.sampling import Sampling
    from tasks.release.served_scoring import ServedScorer

SEEDS_PER_CALL = 1 << 16
"""Seeds between two calls whose sampling has consecutive seeds: more than a call has answers."""


class ServedEngine:
    """A server that holds weights of one version and answers `num_slots` equal prompts at a time."""

    def __init__(self, scorer: ServedScorer, num_slots: int, weights_version: str) -> None:
        self.scorer, self.num_slots, self.weights_version = scorer, num_slots, weights_version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, weights_version: str) -> Continuations:
        """Greedy at temperature 0, else drawn from all tokens. The seed of an answer follows from `sampling.seed` and
        its number, so the same questions get the same answers, but not those of our engine: the draws are the
        server's."""
        assert weights_version == self.weights_version, (weights_version, self.weights_version)
        assert sampling.top_p == 1 and sampling.ends is None and not sampling.first_index, sampling
        answers: list[tuple[list[int], list[float]]] = []
        for prompt, equal in groupby(prompts):
            num_left = len(list(equal))
            while num_left:
                size = min(num_left, self.num_slots)
                answers += self._answer(prompt, size, sampling, sampling.seed * SEEDS_PER_CALL + len(answers))
                num_left -= size
        return Continuations.up_to_stops(answers, sampling.stop_token_ids)  # llama.cpp knows some of them only

    def _answer(
        self, prompt: Sequence[int], num_answers: int, sampling: Sampling, seed: int
    ) -> list[tuple[list[int], list[float]]]:
        request: dict[str, Any] = {
            "prompt": list(prompt),
            "n_predict": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "samplers": ["temperature"],
            "seed": seed,
            "n_probs": 1,
            "return_tokens": True,
            "cache_prompt": True,
        }
        reply = self.scorer.complete(request | ({"n_cmpl": num_answers} if num_answers > 1 else {}))
        replies = reply if isinstance(reply, list) else [reply]
        assert len(replies) == num_answers, f"{num_answers} answers were asked for, {len(replies)} came"
        return [self._read(prompt, each) for each in sorted(replies, key=lambda each: each.get("index", 0))]

    def _read(self, prompt: Sequence[int], reply: dict[str, Any]) -> tuple[list[int], list[float]]:
        token_ids, reported = reply["tokens"], reply.get("completion_probabilities", [])
        if len(reported) < len(token_ids):  # those that end inside a character are not reported
            return token_ids, [score for score, _ in self.scorer.score_tokens(prompt, token_ids)]
        return token_ids, [entry["logprob"] for entry in reported]
