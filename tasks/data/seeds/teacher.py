"""Asks an OpenAI-compatible server one seed at a time, with retries, rate limits, costs and a log of answers.

The log outlives a killed run.
"""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tasks.data.seeds.problem_kinds import CODE
from tasks.data.seeds.rate_limit import RateLimit
from tasks.data.seeds.seed_problems import Seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from openai import OpenAI

    from configs.schema import TeacherLimits, TeacherRequest

CHARS_PER_TOKEN = 3
MAX_DELAY_SECONDS = 60.0
MAX_RETRY_AFTER_SECONDS = 3600.0
MAX_DETAIL_CHARS = 300
INSTRUCTIONS = {
    "math": "Reason step by step. Put the final answer, and nothing else, into \\boxed{}.",
    CODE: "Reason briefly, then give the whole program in one Python code block.",
}
BAD_REQUEST, GARBAGE, EXHAUSTED = "refused_request", "unreadable_response", "no_response"
PASSING = (GARBAGE, EXHAUSTED)
"""Failures of the server, not of the seed: the next run asks for these seeds again."""
REFUSED_STATUSES, FATAL_STATUSES = (400, 413, 422), (401, 403, 404, 405)
"""Statuses that refuse one request, and those that refuse every request; after any other status it is repeated."""


@dataclass(frozen=True)
class Response:
    """The answer for a seed; without one, `failure` is the reason and `detail` the server's message."""

    id: str
    content: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    """Tokens of all attempts, also of those without a readable answer: they cost as well."""
    completion_tokens: int = 0
    num_attempts: int = 1
    failure: str = ""
    detail: str = ""
    model: str = ""
    """The model that answered, as the server names it."""


class CostExceededError(RuntimeError):
    """The configured budget is used up; the answers are kept for the next run."""


class ResponseLog:
    """Responses as JSON lines, appended as they come. A line that a killed run left unfinished is cut off."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            file.seek(0)
            written = file.read()
            whole = written[: written.rfind(b"\n") + 1]
            file.truncate(len(whole))
        self._path, self._lock = path, threading.Lock()
        self.responses: dict[str, Response] = {}
        self.num_tokens = (0, 0)
        """Tokens of prompts and of completions of all lines, with or without an answer: all are paid for."""
        for entry in map(json.loads, whole.splitlines()):
            self._count(Response(**entry))

    def append(self, response: Response) -> None:
        with self._lock, open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(response), ensure_ascii=False) + "\n")
            self._count(response)

    def is_settled(self, identity: str) -> bool:
        """Whether the seed has an answer, or a failure that another request would not change."""
        return identity in self.responses and self.responses[identity].failure not in PASSING

    def cost(self, limits: TeacherLimits) -> float:
        """Cost of all requests, in the currency of the prices."""
        prompt, completion = self.num_tokens
        return (
            prompt * limits.price_per_million_prompt_tokens + completion * limits.price_per_million_completion_tokens
        ) / 1e6

    def _count(self, response: Response) -> None:
        self.responses[response.id] = response
        self.num_tokens = (self.num_tokens[0] + response.prompt_tokens, self.num_tokens[1] + response.completion_tokens)


def ask_all(
    client: OpenAI,
    seeds: Sequence[Seed],
    request: TeacherRequest,
    limits: TeacherLimits,
    log: ResponseLog,
    report: Callable[[int], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Ask for the seeds that the log does not answer, `num_parallel` at a time. Raises CostExceededError, or the
    client's error for a wrong key, address or model; answers until then stay in the log."""
    rate = RateLimit(limits.requests_per_minute, limits.tokens_per_minute, sleep=sleep)
    waiting = [seed for seed in seeds if not log.is_settled(seed.id)]

    def ask(seed: Seed) -> None:
        spent = log.cost(limits)
        if spent >= limits.max_cost:
            raise CostExceededError(
                f"the teacher has cost {spent:.2f}, teacher.limits.max_cost is {limits.max_cost}: "
                f"{len(log.responses)} of {len(seeds)} "
                "seeds are answered and kept. Raise it and run again, or lower teacher.request.num_seeds"
            )
        log.append(_ask(client, seed, request, limits, rate, sleep))
        report(len(log.responses))

    with ThreadPoolExecutor(limits.num_parallel) as threads:
        try:
            for done in [threads.submit(ask, seed) for seed in waiting]:
                done.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _ask(
    client: OpenAI,
    seed: Seed,
    request: TeacherRequest,
    limits: TeacherLimits,
    rate: RateLimit,
    sleep: Callable[[float], None],
) -> Response:
    import openai

    failure, detail, paid = EXHAUSTED, "", (0, 0)
    messages: Any = [{"role": "user", "content": f"{seed.question}\n\n{INSTRUCTIONS[seed.kind]}"}]
    estimate = len(seed.question) // CHARS_PER_TOKEN + request.max_tokens
    for attempt in range(1, limits.max_attempts + 1):
        rate.wait(estimate)
        completion = None
        try:
            completion = client.chat.completions.create(
                model=request.model, messages=messages, temperature=request.temperature, max_tokens=request.max_tokens
            )
            response = _read(seed, completion, attempt)
        except openai.APIStatusError as error:
            failure, detail = EXHAUSTED, _reason(error, client)
            if error.status_code in REFUSED_STATUSES:
                return _unanswered(seed, paid, attempt, BAD_REQUEST, detail)
            if error.status_code in FATAL_STATUSES:
                # The server may repeat the key, and errors are logged: this one is raised again without its cause.
                raise type(error)(detail, response=error.response, body=None) from None
            delay = _retry_after(error)
            if delay is not None:
                rate.pause(delay)
                continue
        except openai.APIConnectionError as error:
            failure, detail = EXHAUSTED, _reason(error, client)
        except (openai.APIResponseValidationError, AttributeError, IndexError, TypeError, ValueError) as error:
            failure, detail = GARBAGE, _reason(error, client)
            prompt_tokens, completion_tokens = _usage(completion)
            paid = (paid[0] + prompt_tokens, paid[1] + completion_tokens)
        else:
            rate.correct(response.prompt_tokens + response.completion_tokens - estimate)
            return replace(
                response,
                prompt_tokens=response.prompt_tokens + paid[0],
                completion_tokens=response.completion_tokens + paid[1],
            )
        if attempt < limits.max_attempts:
            sleep(min(limits.first_delay_seconds * 2 ** (attempt - 1), MAX_DELAY_SECONDS) * random.uniform(0.5, 1.0))
    return _unanswered(seed, paid, limits.max_attempts, failure, detail)


def _unanswered(seed: Seed, paid: tuple[int, int], num_attempts: int, failure: str, detail: str) -> Response:
    return Response(seed.id, "", "", "", paid[0], paid[1], num_attempts, failure, detail)


def _reason(error: Exception, client: OpenAI) -> str:
    """The beginning of an error's message, without the key."""
    return str(error).replace(client.api_key, "<key>")[:MAX_DETAIL_CHARS]


def _usage(completion: Any) -> tuple[int, int]:
    """Tokens of prompt and completion that a response states; (0, 0) where it states none."""
    usage = getattr(completion, "usage", None)
    prompt, completed = getattr(usage, "prompt_tokens", 0), getattr(usage, "completion_tokens", 0)
    return (prompt if isinstance(prompt, int) else 0), (completed if isinstance(completed, int) else 0)


def _read(seed: Seed, completion: Any, attempt: int) -> Response:
    """The answer in a chat completion, with estimated tokens where the server counts none. Raises AttributeError,
    IndexError or TypeError for anything else."""
    message = completion.choices[0].message
    content = message.content
    if not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}")
    reasoning = getattr(message, "reasoning_content", None)
    reasoning = reasoning if isinstance(reasoning, str) else ""
    prompt_tokens, completion_tokens = _usage(completion)
    if not prompt_tokens + completion_tokens:
        prompt_tokens, completion_tokens = (
            -(-len(text) // CHARS_PER_TOKEN) for text in (seed.question, content + reasoning)
        )
    finish_reason, model = str(completion.choices[0].finish_reason), str(getattr(completion, "model", None) or "")
    return Response(seed.id, content, reasoning, finish_reason, prompt_tokens, completion_tokens, attempt, model=model)


def _retry_after(error: Any) -> float | None:
    """Seconds that the server asks to wait; None where it states no readable number."""
    try:
        return min(max(float(error.response.headers["retry-after"]), 0.0), MAX_RETRY_AFTER_SECONDS)
    except (KeyError, ValueError):
        return None
