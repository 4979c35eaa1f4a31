"""Asks an OpenAI-compatible server one seed at a time: retries, rate limits, costs, and a log of answers that outlives a killed run."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tasks.data.rate_limit import RateLimit
from tasks.data.seed_problems import CODE, Seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from openai import OpenAI

    from configs.schema import TeacherLimits, TeacherRequest

CHARS_PER_TOKEN = 3
MAX_DELAY_SECONDS = 60.0
INSTRUCTIONS = {
    "math": "Reason step by step. Put the final answer, and nothing else, into \\boxed{}.",
    CODE: "Reason briefly, then give the whole program in one Python code block.",
}
BAD_REQUEST, GARBAGE, EXHAUSTED = "refused_request", "unreadable_response", "no_response"


@dataclass(frozen=True)
class Response:
    """What came back for a seed; `failure` says why nothing did."""

    id: str
    content: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_attempts: int = 1
    failure: str = ""


class CostExceededError(RuntimeError):
    """The configured budget is used up; what was answered is kept for the next run."""


class ResponseLog:
    """Responses as JSON lines, appended as they come. A line that a killed run left unfinished is cut off."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1] if path.exists() else b""
        path.write_bytes(whole)
        self._path, self._lock = path, threading.Lock()
        self.responses = {entry["id"]: Response(**entry) for entry in map(json.loads, whole.splitlines())}

    def append(self, response: Response) -> None:
        with self._lock, open(self._path, "a", encoding="utf-8") as file:
            self.responses[response.id] = response
            file.write(json.dumps(asdict(response), ensure_ascii=False) + "\n")


def cost(responses: Sequence[Response], limits: TeacherLimits) -> float:
    """Of all responses, in the currency of the prices."""
    prompt, completion = sum(one.prompt_tokens for one in responses), sum(one.completion_tokens for one in responses)
    return (prompt * limits.price_per_million_prompt_tokens + completion * limits.price_per_million_completion_tokens) / 1e6


def ask_all(
    client: OpenAI, seeds: Sequence[Seed], request: TeacherRequest, limits: TeacherLimits, log: ResponseLog,
    report: Callable[[int], None], sleep: Callable[[float], None] = time.sleep,
) -> None:  # fmt: skip
    """Ask what the log does not answer yet, so many at a time as allowed. Raises CostExceededError, or the client's error for a wrong
    key, address or model; what was answered until then stays in the log."""
    rate = RateLimit(limits.requests_per_minute, limits.tokens_per_minute, sleep=sleep)
    waiting = [seed for seed in seeds if seed.id not in log.responses]

    def ask(seed: Seed) -> None:
        spent = cost(list(log.responses.values()), limits)
        if spent >= limits.max_cost:
            raise CostExceededError(
                f"the teacher has cost {spent:.2f}, teacher.limits.max_cost is {limits.max_cost}: {len(log.responses)} of {len(seeds)} "
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
    client: OpenAI, seed: Seed, request: TeacherRequest, limits: TeacherLimits, rate: RateLimit, sleep: Callable[[float], None]
) -> Response:
    import openai

    failure = EXHAUSTED
    messages: Any = [{"role": "user", "content": f"{seed.question}\n\n{INSTRUCTIONS[seed.kind]}"}]
    estimate = len(seed.question) // CHARS_PER_TOKEN + request.max_tokens
    for attempt in range(1, limits.max_attempts + 1):
        rate.wait(estimate)
        try:
            completion = client.chat.completions.create(
                model=request.model, messages=messages, temperature=request.temperature, max_tokens=request.max_tokens
            )
            response = _read(seed, completion, attempt)
        except (openai.BadRequestError, openai.UnprocessableEntityError):
            return Response(seed.id, num_attempts=attempt, failure=BAD_REQUEST)
        except (openai.RateLimitError, openai.InternalServerError, openai.ConflictError) as error:
            failure = EXHAUSTED
            delay = _retry_after(error)
            if delay is not None:
                rate.pause(delay)
                continue
        except openai.APIConnectionError:
            failure = EXHAUSTED
        except (openai.APIResponseValidationError, AttributeError, IndexError, TypeError, ValueError):
            failure = GARBAGE
        else:
            rate.correct(response.prompt_tokens + response.completion_tokens - estimate)
            return response
        if attempt < limits.max_attempts:
            sleep(min(limits.first_delay_seconds * 2 ** (attempt - 1), MAX_DELAY_SECONDS) * random.uniform(0.5, 1.0))
    return Response(seed.id, num_attempts=limits.max_attempts, failure=failure)


def _read(seed: Seed, completion: Any, attempt: int) -> Response:
    """Raises AttributeError, IndexError or TypeError for what is no chat completion."""
    message, usage = completion.choices[0].message, completion.usage
    content = message.content
    if not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}")
    reasoning = getattr(message, "reasoning_content", None)
    return Response(
        seed.id, content, reasoning if isinstance(reasoning, str) else "", str(completion.choices[0].finish_reason),
        int(usage.prompt_tokens), int(usage.completion_tokens), attempt,
    )  # fmt: skip


def _retry_after(error: Any) -> float | None:
    """Seconds that the server asks to wait; None where it says nothing readable."""
    try:
        return min(max(float(error.response.headers["retry-after"]), 0.0), MAX_DELAY_SECONDS)
    except (KeyError, ValueError):
        return None
