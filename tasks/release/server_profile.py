"""Measures how fast a server answers at rising concurrency, and what drafts of the MTP layer gain in our own engine."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import Frozen

if TYPE_CHECKING:
    from infra.serving.model_client import ModelClient
    from model.generation.generation import Generation, InProcessEngine, Sampling

MIN_REQUESTS = 4
"""Requests at the lowest concurrency: one would show the first request's cost alone."""
PROMPT = "Note {}: the quick brown fox jumps over the lazy dog, and then"
"""Begins with the request's number, so that no server answers from its cache of prompts."""


class Level(Frozen):
    """So many requests at a time."""

    concurrency: int
    num_requests: int
    num_tokens: int
    seconds_to_first_token: tuple[float, float]
    """Median and 95th percentile over the requests."""
    seconds_between_tokens: tuple[float, float]
    """The same over all pairs of neighbours."""
    tokens_per_second: float
    """Of all requests together."""


class Drafts(Frozen):
    """One answer at a time in this process, without and with drafts."""

    tokens_per_second: float
    tokens_per_second_with_drafts: float
    acceptance_rate: float
    num_equal: int
    """Answers with the same tokens both times, of `num_answers`."""
    num_answers: int


class ServerProfile(Frozen):
    """profile.json."""

    target: str
    levels: tuple[Level, ...]
    memory_bytes: int | None
    """Resident memory of the server's process after the last level."""
    drafts: Drafts | None
    not_measured: str
    """What is null, and why; else empty."""

    def describe(self) -> str:
        """A table for a terminal."""
        lines = ["concurrent  first token s (p50, p95)  between tokens s (p50, p95)  tokens/s"]
        for each in self.levels:
            first, between = each.seconds_to_first_token, each.seconds_between_tokens
            lines.append(
                f"{each.concurrency:>10}  {first[0]:>13.4f} {first[1]:>9.4f}  {between[0]:>17.4f} {between[1]:>9.4f}  "
                f"{each.tokens_per_second:>8.1f}"
            )
        if self.memory_bytes is not None:
            lines.append(f"memory of the server: {self.memory_bytes / 1e6:,.0f} MB")
        if self.drafts is not None:
            without, with_drafts = self.drafts.tokens_per_second, self.drafts.tokens_per_second_with_drafts
            lines.append(
                f"own engine, one answer at a time: {without:.1f} tokens/s without drafts, {with_drafts:.1f} with "
                f"({self.drafts.acceptance_rate:.0%} accepted, {self.drafts.num_equal} of {self.drafts.num_answers} "
                f"answers equal)"
            )
        return "\n".join([*lines, self.not_measured] if self.not_measured else lines)


def measure_levels(client: ModelClient, levels: tuple[int, ...], num_tokens: int) -> tuple[Level, ...]:
    """Raises ServerFailedError where a request fails: a server that drops requests has no speed."""
    client.timed_answer(PROMPT.format("0"), num_tokens)  # what the first request loads is not measured
    return tuple(_measure(client, concurrency, num_tokens) for concurrency in levels)


def _measure(client: ModelClient, concurrency: int, num_tokens: int) -> Level:
    prompts = [PROMPT.format(f"{concurrency}.{number}") for number in range(max(MIN_REQUESTS, concurrency))]
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as threads:
        answers = list(threads.map(lambda prompt: client.timed_answer(prompt, num_tokens), prompts))
    seconds = time.perf_counter() - start
    total = sum(answer.num_tokens for answer in answers)
    if min(len(answer.seconds) for answer in answers) < 2:
        raise ValueError(f"{client.url} ended an answer before its second token: raise --max-tokens")
    between = np.concatenate([np.diff(answer.seconds) for answer in answers])
    return Level(
        concurrency=concurrency,
        num_requests=len(prompts),
        num_tokens=total,
        seconds_to_first_token=_percentiles(np.array([answer.seconds[0] for answer in answers])),
        seconds_between_tokens=_percentiles(between),
        tokens_per_second=total / seconds,
    )


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    median, high = np.percentile(values, (50, 95))
    return float(median), float(high)


def measure_drafts(checkpoint_dir: Path, num_tokens: int) -> tuple[Drafts | None, str]:
    """Drafts of the MTP layer in our own engine, or why there are none."""
    from dataclasses import replace

    from model.formats.hf_checkpoint import read_config
    from model.generation.generation import Sampling
    from tasks.evaluation.engine import load_engine

    if not read_config(checkpoint_dir).num_nextn_predict_layers:
        return None, "drafts: the model has no MTP layer"
    prompts = _prompts(checkpoint_dir)
    engine = load_engine(checkpoint_dir, weights_version="", batch_sequences=1)
    plain = Sampling(max_new_tokens=num_tokens)
    speeds, answers = [], []
    for sampling in (plain, replace(plain, is_speculative=True)):
        speed, answer = _timed(engine, prompts, sampling)
        speeds.append(speed)
        answers.append(answer)
    equal = sum(first == second for first, second in zip(answers[0].token_ids, answers[1].token_ids, strict=True))
    drafts = Drafts(
        tokens_per_second=speeds[0],
        tokens_per_second_with_drafts=speeds[1],
        acceptance_rate=answers[1].acceptance_rate,
        num_equal=equal,
        num_answers=len(prompts),
    )
    return drafts, ""


def engine_speed(checkpoint_dir: Path, num_tokens: int, device: str) -> float:
    """Tokens per second of our own engine, one answer at a time, without drafts."""
    from model.generation.generation import Sampling
    from tasks.evaluation.engine import load_engine

    engine = load_engine(checkpoint_dir, weights_version="", batch_sequences=1, device=device)
    return _timed(engine, _prompts(checkpoint_dir), Sampling(max_new_tokens=num_tokens))[0]


def _prompts(checkpoint_dir: Path) -> list[list[int]]:
    from tasks.evaluation.engine import document_token_ids, load_tokenizer

    tokenizer = load_tokenizer(checkpoint_dir / "tokenizer.json")
    return [document_token_ids(tokenizer, PROMPT.format(number)) for number in range(MIN_REQUESTS)]


def _timed(engine: InProcessEngine, prompts: list[list[int]], sampling: Sampling) -> tuple[float, Generation]:
    """(tokens per second, the answers), after one answer that is not measured."""
    engine.generate(prompts[:1], sampling, "")
    start = time.perf_counter()
    answers = engine.generate(prompts, sampling, "")
    return len(prompts) * sampling.max_new_tokens / (time.perf_counter() - start), answers
