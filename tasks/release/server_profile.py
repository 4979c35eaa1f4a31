"""Measures how fast a server answers at rising concurrency, and what drafts of the MTP layer gain in llama.cpp's server
and in our own engine."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from configs.schema import Frozen

if TYPE_CHECKING:
    from infra.serving.model_client import ModelClient
    from model.generation.generation import InProcessEngine, Sampling

MIN_REQUESTS = 4
"""Requests at the lowest concurrency: one would show only the first request's cost."""
LLAMA_SERVER, OWN_ENGINE = "llama.cpp's server", "our own engine"
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
    """One answer at a time in an engine, without and with drafts."""

    engine: str
    tokens_per_second: float
    tokens_per_second_with_drafts: float
    acceptance_rate: float
    num_equal: int
    """Answers with the same tokens both times, of `num_answers`."""
    num_answers: int

    @property
    def gain(self) -> float:
        """Speed with drafts over that without."""
        return self.tokens_per_second_with_drafts / self.tokens_per_second


class TimedAnswers(NamedTuple):
    """Answers to the same prompts, one at a time."""

    token_ids: Sequence[Sequence[int]]
    tokens_per_second: float
    acceptance_rate: float
    """NaN without drafts."""


class ServerProfile(Frozen):
    """profile.json."""

    target: str
    levels: tuple[Level, ...]
    memory_bytes: int | None
    """Resident memory of the server's process after the last level."""
    drafts: tuple[Drafts, ...]
    """Of llama.cpp's server and our own engine; none where they were not measured."""
    not_measured: str
    """What is absent, and why; else empty."""

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
        for each in self.drafts:
            lines.append(
                f"{each.engine}, one answer at a time: {each.tokens_per_second:.1f} tokens/s without drafts, "
                f"{each.tokens_per_second_with_drafts:.1f} with ({each.acceptance_rate:.0%} accepted, "
                f"{each.num_equal} of {each.num_answers} answers equal)"
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
        raise ValueError(
            f"{client.url} ended an answer before its second token, as a server that ignores `ignore_eos` may: no time "
            f"between tokens is measured"
        )
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


def compare_drafts(engine: str, plain: TimedAnswers, drafted: TimedAnswers) -> Drafts:
    """The answers of one engine to the same prompts."""
    pairs = zip(plain.token_ids, drafted.token_ids, strict=True)
    return Drafts(
        engine=engine,
        tokens_per_second=plain.tokens_per_second,
        tokens_per_second_with_drafts=drafted.tokens_per_second,
        acceptance_rate=drafted.acceptance_rate,
        num_equal=sum(list(first) == list(second) for first, second in pairs),
        num_answers=len(plain.token_ids),
    )


def served_answers(url: str, checkpoint_dir: Path, num_tokens: int) -> TimedAnswers:
    """Of llama.cpp's server at `url`, which has drafts or not. `url` is without a trailing slash."""
    prompts = _prompts(checkpoint_dir)
    _served_answer(url, prompts[0], num_tokens)
    start = time.perf_counter()
    answers = [_served_answer(url, prompt, num_tokens) for prompt in prompts]
    seconds = time.perf_counter() - start
    drafted, accepted = (
        sum(answer["timings"].get(name, 0) for answer in answers) for name in ("draft_n", "draft_n_accepted")
    )
    return TimedAnswers(
        [answer["tokens"] for answer in answers],
        sum(len(answer["tokens"]) for answer in answers) / seconds,
        accepted / drafted if drafted else float("nan"),
    )


def _served_answer(url: str, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
    body = {
        "prompt": prompt_ids,
        "n_predict": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    asked = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=600) as response:
        return json.load(response)


def measure_own_drafts(checkpoint_dir: Path, num_tokens: int) -> Drafts:
    """Drafts of the MTP layer in our own engine."""
    from dataclasses import replace

    from model.generation.generation import Sampling
    from tasks.evaluation.engine import load_engine

    prompts = _prompts(checkpoint_dir)
    engine = load_engine(checkpoint_dir, weights_version="", batch_sequences=1)
    plain = Sampling(max_new_tokens=num_tokens)
    both = [_timed(engine, prompts, sampling) for sampling in (plain, replace(plain, is_speculative=True))]
    return compare_drafts(OWN_ENGINE, *both)


def engine_speed(checkpoint_dir: Path, num_tokens: int, device: str) -> float:
    """Tokens per second of our own engine, one answer at a time, without drafts."""
    from model.generation.generation import Sampling
    from tasks.evaluation.engine import load_engine

    engine = load_engine(checkpoint_dir, weights_version="", batch_sequences=1, device=device)
    return _timed(engine, _prompts(checkpoint_dir), Sampling(max_new_tokens=num_tokens)).tokens_per_second


def _prompts(checkpoint_dir: Path) -> list[list[int]]:
    from tasks.evaluation.engine import document_token_ids, load_tokenizer

    tokenizer = load_tokenizer(checkpoint_dir / "tokenizer.json")
    return [document_token_ids(tokenizer, PROMPT.format(number)) for number in range(MIN_REQUESTS)]


def _timed(engine: InProcessEngine, prompts: list[list[int]], sampling: Sampling) -> TimedAnswers:
    """The answers, after one that is not measured."""
    engine.generate(prompts[:1], sampling, "")
    start = time.perf_counter()
    answers = engine.generate(prompts, sampling, "")
    speed = len(prompts) * sampling.max_new_tokens / (time.perf_counter() - start)
    return TimedAnswers(answers.token_ids, speed, answers.acceptance_rate)
