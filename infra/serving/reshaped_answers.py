"""Writes what llama.cpp's server answers as the API that was asked has it, whole or event by event.

Log-probabilities of /v1/completions come in the shape of chat completions: llama.cpp's own shape, with token ids, stays
beside OpenAI's as `content`. A response that was cut says that it is completed, and a message that a stop sequence
ended that the turn ended.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import StreamReader

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
RESPONSES = ("/v1/responses", "/responses")
COMPLETED, INCOMPLETE = "response.completed", "response.incomplete"
Answer = dict[str, Any]
Reshape = Callable[[Answer], Answer]


def reshaping(path: str, asked: Mapping[str, Any], context_length: int) -> Reshape | None:
    """What is done with an answer, or with each event of it; None where it stays as it is."""
    if path == COMPLETIONS and asked.get("logprobs"):
        offsets: dict[int, int] = {}
        return lambda answer: _with_logprobs(answer, offsets)
    if path == MESSAGES:
        return _with_stop_reason
    if path in RESPONSES:
        given = asked.get("max_output_tokens")
        limit = given if isinstance(given, int) and given > 0 else context_length
        return lambda answer: _with_status(answer, limit, context_length)
    return None


def reshaped(body: bytes, reshape: Reshape) -> bytes:
    return json.dumps(reshape(json.loads(body)), ensure_ascii=False).encode()


async def reshaped_events(content: StreamReader, reshape: Reshape) -> AsyncIterator[bytes]:
    """The lines of a stream. A line that names an event waits for the data, whose type is the event's name."""
    named = b""
    async for line in content:
        if line.startswith(b"event: "):
            named = line
        elif line.startswith(b"data: {"):
            data = reshape(json.loads(line.removeprefix(b"data: ")))
            name = b"event: %s\n" % str(data.get("type")).encode() if named else b""
            yield name + b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n"
            named = b""
        else:
            yield named + line
            named = b""


def _with_stop_reason(answer: Answer) -> Answer:
    """A message, or the event that ends one, in Anthropic's shape."""
    told = answer.get("delta") if answer.get("type") == "message_delta" else answer
    if isinstance(told, dict) and told.get("stop_sequence") is not None:
        told["stop_reason"] = "stop_sequence"
    return answer


def _with_status(answer: Answer, limit: int, context_length: int) -> Answer:
    """A response, or the event that ends one. Where all tokens that were allowed are used it counts as cut, also where
    the last one would have ended it: the server does not tell."""
    response = answer.get("response", {}) if answer.get("type") == COMPLETED else answer
    usage = response.get("usage") or {}
    if usage.get("output_tokens", 0) < limit and usage.get("total_tokens", 0) < context_length:
        return answer
    response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    if response.get("output"):
        response["output"][-1]["status"] = "incomplete"
    return answer if response is answer else {**answer, "type": INCOMPLETE}


def _with_logprobs(completion: Answer, offsets: dict[int, int]) -> Answer:
    """A completion, or one event of it, with `logprobs` as OpenAI's API has them; offsets: characters so far, by
    choice."""
    for choice in completion.get("choices", []):
        reported = (choice.get("logprobs") or {}).get("content")
        if reported is None:
            continue
        start, starts = offsets.get(choice["index"], 0), []
        for entry in reported:
            starts.append(start)
            start += len(entry["token"])
        offsets[choice["index"]] = start
        choice["logprobs"] = {
            "tokens": [entry["token"] for entry in reported],
            "token_logprobs": [entry["logprob"] for entry in reported],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in entry["top_logprobs"]} for entry in reported
            ],
            "text_offset": starts,
            "content": reported,
        }
    return completion
