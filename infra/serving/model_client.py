"""A client of any server with OpenAI's API: completions, chats, and log-probabilities where the server gives them.

A request that got no answer is repeated as often as the caller says: never where a time is measured. The key comes from
an environment variable that the user names, and is written nowhere.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from openai import OpenAI

PROBE = "One two three"
PROBE_TOKENS = 16
TEMPLATE_SETTINGS = "chat_template_kwargs"
CUT = "length"
"""Why an answer ended that had as many tokens as it may."""
REFUSALS = (400, 422)
"""Status of a request with a parameter that the server does not know."""
NOT_OFFERED = (*REFUSALS, 404, 405, 501)
"""Also of an address that it does not have."""


class ServerFailedError(RuntimeError):
    """A server that did not answer, or answered with an error."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status` of HTTP; None where no answer came."""
        super().__init__(message)
        self.status = status


class TextScore(NamedTuple):
    log_probability: float
    is_greedy: bool


@dataclass(frozen=True)
class TimedAnswer:
    seconds: list[float]
    """From the request to each piece of the stream: a token each, but parts of a character come together."""
    num_tokens: int
    """As the server counts, else the pieces."""


def key_of(variable: str) -> str:
    """The key in an environment variable that the user named; empty where none is named. Raises ValueError for a
    variable that is not set."""
    if variable and not os.environ.get(variable):
        raise ValueError(f"the environment variable {variable} of --api-key-env is not set: export the key")
    return os.environ[variable] if variable else ""


class ModelClient:
    """Asks one model of one server."""

    def __init__(
        self, url: str, key_variable: str, timeout_seconds: float, model: str, *, num_retries: int = 0
    ) -> None:
        """`model` empty takes the only one that the server lists. `num_retries`: of a request that got no answer, or
        the status 408, 409, 429 or 5xx; waits double up to 8 s, or are what the server says. Raises ValueError for a
        URL that is none or holds a password, for a key that is not set, and for a server with several models."""
        from openai import OpenAI

        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"{url} is no URL of a server: write http://HOST:PORT/v1 or https://HOST/v1")
        if "@" in address.netloc:
            raise ValueError("the URL names a user or a password before @: give the key with --api-key-env NAME")
        key = key_of(key_variable)
        self.url = url.rstrip("/")
        base_url = self.url if address.path.strip("/") else f"{self.url}/v1"
        self._client: OpenAI = OpenAI(base_url=base_url, api_key=key or "none", timeout=timeout_seconds, max_retries=0)
        self.num_answered, self.sends_template_settings = 0, True
        self.model = model or self._only_model()
        self._client = self._client.with_options(max_retries=num_retries)  # the first contact fails at once

    def _only_model(self) -> str:
        with self._explained():
            names = sorted(model.id for model in self._client.models.list())
        if len(names) != 1:
            raise ValueError(f"{self.url} serves {len(names)} models ({', '.join(names[:8])}): name one with --model")
        return names[0]

    def complete(
        self, prompt: str, max_tokens: int, stop: Sequence[str], temperature: float, seed: int
    ) -> tuple[str, bool]:
        """(the continuation of a text, whether it ended before `max_tokens`); greedy at temperature 0."""
        with self._explained():
            answer = self._client.completions.create(
                model=self.model, prompt=prompt, max_tokens=max_tokens, **_stops(stop), **_chance(temperature, seed)
            )
            return _encodable(answer.choices[0].text), answer.choices[0].finish_reason != CUT

    def chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any],
        max_tokens: int,
        stop: Sequence[str],
        enable_thinking: bool,
        temperature: float,
        seed: int,
    ) -> tuple[str, list[tuple[str, str]], bool]:
        """(what the assistant says after its reasoning, its calls as name and JSON of the arguments, whether it ended
        before `max_tokens`). `enable_thinking` goes to the chat template, as vLLM, SGLang and llama.cpp take it."""
        from openai import omit

        settings = {TEMPLATE_SETTINGS: {"enable_thinking": enable_thinking}} if self.sends_template_settings else None
        with self._explained():
            answer = self._client.chat.completions.create(
                model=self.model,
                messages=list(messages),
                max_tokens=max_tokens,
                extra_body=settings,
                tools=list(tools) if tools else omit,
                **_stops(stop),
                **_chance(temperature, seed),
            )
            message = answer.choices[0].message
            functions = [call.function for call in message.tool_calls or () if call.type == "function"]
            said, calls = message.content or "", [(each.name, each.arguments) for each in functions]
            written = [(_encodable(name), _encodable(arguments)) for name, arguments in calls]
            return _encodable(said), written, answer.choices[0].finish_reason != CUT

    def takes_template_settings(self) -> bool:
        """Whether a short chat with settings of the chat template is answered. Where the server refuses these by name,
        later chats go without."""
        try:
            self.chat([{"role": "user", "content": PROBE}], (), PROBE_TOKENS, (), False, 0.0, 0)
        except ServerFailedError as error:
            if error.status not in REFUSALS or TEMPLATE_SETTINGS not in str(error.__cause__):
                raise
            self.sends_template_settings = False
        return self.sends_template_settings

    def timed_answer(self, prompt: str, num_tokens: int) -> TimedAnswer:
        """A streamed greedy continuation, which does not stop before `num_tokens` where the server knows `ignore_eos`
        (vLLM, SGLang, llama.cpp)."""
        start, seconds, counted = time.perf_counter(), [], None
        with self._explained():
            pieces = self._client.completions.create(
                model=self.model,
                prompt=prompt,
                max_tokens=num_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            for piece in pieces:
                counted = piece.usage.completion_tokens if piece.usage else counted
                if piece.choices and piece.choices[0].text:
                    seconds.append(time.perf_counter() - start)
        return TimedAnswer(seconds, len(seconds) if counted is None else counted)

    def require_likelihoods(self) -> None:
        """Raises ValueError for a server that does not report the log-probabilities of a prompt, ServerFailedError for
        one that failed otherwise."""
        try:
            self.score(PROBE, " four")
        except (ServerFailedError, ValueError) as error:
            if isinstance(error, ServerFailedError) and error.status not in NOT_OFFERED:
                raise
            raise ValueError(
                f"{self.url} reports no log-probabilities of a given text (`echo` with `logprobs` of /v1/completions), "
                f"which likelihood benchmarks need: give the checkpoint or its GGUF file, or a suite that only "
                f"generates ({error})"
            ) from error

    def score(self, context: str, continuation: str) -> TextScore:
        """Of the tokens that end after the context. Raises ValueError for an answer without them."""
        text = context + continuation
        with self._explained():
            answer = self._client.completions.create(
                model=self.model, prompt=text, max_tokens=1, temperature=0, logprobs=1, echo=True
            )
        reported = answer.choices[0].logprobs
        if reported is None or not reported.tokens or not reported.token_logprobs:
            raise ValueError(f"{self.url} answered without log-probabilities of the prompt")
        total, is_greedy, num_scored = 0.0, True, 0
        starts = _token_starts(text, reported.tokens, reported.text_offset or [])
        if not starts:
            raise ValueError(f"{self.url} reports tokens, and not where each begins in the prompt")
        for index, (start, end) in enumerate(pairwise([*starts, math.inf])):
            value = reported.token_logprobs[index]
            if end <= len(context) or start >= len(text):
                continue
            if value is None:
                raise ValueError(f"{self.url} reports no log-probability of the first token: the context is empty")
            best = (reported.top_logprobs or [])[index]
            total, num_scored = total + value, num_scored + 1
            is_greedy &= value >= max(best.values())
        if not num_scored:
            raise ValueError(f"{self.url} reported no token after the context")
        return TextScore(total, is_greedy)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Counts an answer; a failure is one sentence."""
        from openai import APIConnectionError, APIStatusError, APITimeoutError, OpenAIError

        try:
            yield
        except APITimeoutError as error:
            raise ServerFailedError(
                f"{self.url} took longer than {self._client.timeout} s {self._place}{self._tries}: raise the suite's "
                f"timeout_seconds, or start the server again"
            ) from error
        except APIConnectionError as error:
            raise ServerFailedError(
                f"{self.url} stopped answering {self._place}{self._tries} ({error.__cause__ or error}): start the "
                f"server again and repeat the command"
            ) from error
        except APIStatusError as error:
            said = f"{self.url} answered {error.status_code} {self._place}: {str(error)[:300]}"
            raise ServerFailedError(said, error.status_code) from error
        except OpenAIError as error:
            raise ServerFailedError(f"{self.url} gave no usable answer {self._place}: {str(error)[:300]}") from error
        self.num_answered += 1

    @property
    def _place(self) -> str:
        return f"after {self.num_answered} answers" if self.num_answered else "at the first request"

    @property
    def _tries(self) -> str:
        return f" in {self._client.max_retries + 1} tries" if self._client.max_retries else ""


def _token_starts(text: str, tokens: Sequence[str], offsets: Sequence[int]) -> list[float]:
    """Where in the text each token begins, by the tokens' own characters: SGLang reports -1 as every offset, and others
    count a start token that they put before it. Where a token is a part of a character, by the server's offsets, if
    the answer's token begins where the text ends. Empty where neither tells."""
    first = "".join(tokens).find(text)
    if first >= 0:
        return [end - len(token) - first for token, end in zip(tokens, accumulate(map(len, tokens)), strict=True)]
    return list(offsets) if offsets and offsets[-1] == len(text) else []


def _encodable(text: str) -> str:
    """With "?" for half a surrogate pair, which a server leaves of a character that it cut: no file can hold one."""
    return text.encode(errors="replace").decode()


def _stops(stop: Sequence[str]) -> dict[str, Any]:
    """OpenAI's API takes at most four; the rest is cut off by the caller."""
    return {"stop": list(stop[:4])} if stop else {}


def _chance(temperature: float, seed: int) -> dict[str, Any]:
    """A seed is sent only where it decides something: not every server takes one."""
    return {"temperature": temperature, "seed": seed} if temperature else {"temperature": 0}
