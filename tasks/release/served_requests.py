"""What users ask of a served model besides greedy answers: each check asks for one thing, and says what was wrong.

Part of the smoke test. The server has a key and several slots, as `glm46 serve --api-key-env NAME --slots N` starts it.
For the parity of engines it also writes many function calls, without and with drafts of the MTP layer.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from openai import OpenAI

    from configs.schema import ServingResources
    from tasks.release.generate_reference import ReferenceAnswer

NUM_CONCURRENT = 50
CONCURRENT_TOKENS = 8
"""Tokens of each of the answers that are asked for at the same time."""
ANSWERS = ("yes", "no")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"enum": list(ANSWERS)}},
    "required": ["answer"],
    "additionalProperties": False,
}
MAX_SCHEMA_TOKENS = 160
"""Enough for any object of SCHEMA: llama.cpp allows 22 characters of white space at each of five places."""


CALLED = "record_answer"
CALL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "enum": list(ANSWERS)},
        "is_sure": {"type": "boolean"},
        "score": {**SCHEMA, "properties": {"points": {"enum": [1, 2]}}, "required": ["points"]},
    },
    "required": ["answer", "is_sure", "score"],
    "additionalProperties": False,
}
"""A string, a truth value and an object: few values, so an answer that fits is checked without a library."""
MAX_CALL_TOKENS = 256
"""Enough for any call of CALLED, one byte a token."""

FUNCTIONS = ("add", "compare", "record", "rate")
MAX_MADE_TOKENS = 320
"""Enough for each of these calls, likewise."""


def check_key(server_url: str) -> list[str]:
    """A wrong key, and none, must be refused."""
    reasons = []
    for what, headers in (("a wrong key", {"Authorization": "Bearer wrong"}), ("no key", {})):
        status = _status(urllib.request.Request(f"{server_url}/v1/models", headers=headers))
        if status != HTTPStatus.UNAUTHORIZED:
            reasons.append(f"a request with {what} was answered with status {status}, not {HTTPStatus.UNAUTHORIZED}")
    return reasons


def check_oversized(server_url: str, headers: dict[str, str], num_tokens: int) -> list[str]:
    """A prompt of more tokens than the context holds must be refused as the client's mistake."""
    body = json.dumps({"prompt": [0] * num_tokens, "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{server_url}/v1/completions", body, headers)
    status = _status(request)
    if status == HTTPStatus.BAD_REQUEST:
        return []
    return [f"a prompt of {num_tokens} tokens was answered with status {status}, not {HTTPStatus.BAD_REQUEST}"]


def check_stream(client: OpenAI, model_name: str, answer: ReferenceAnswer) -> list[str]:
    """The pieces of a streamed answer must make the text of the whole one."""
    asked: dict[str, Any] = {
        "model": model_name,
        "prompt": list(answer.prompt_ids),
        "max_tokens": len(answer.token_ids),
        "temperature": 0,
    }
    whole = client.completions.create(**asked).choices[0].text
    pieces = [piece.choices[0].text for piece in client.completions.create(**asked, stream=True) if piece.choices]
    if "".join(pieces) == whole and len(pieces) > 1:
        return []
    return [f"prompt {answer.prompt!r}: streamed in {len(pieces)} pieces as {''.join(pieces)!r}, whole {whole!r}"]


def check_schema(client: OpenAI, model_name: str, message: str, settings: dict[str, Any]) -> list[str]:
    """An answer that was asked for in a JSON schema must fit it."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model=model_name,
        messages=[{"role": "user", "content": message}],
        max_tokens=MAX_SCHEMA_TOKENS,
        temperature=0,
        response_format=form,
        extra_body=settings,
    )
    text = answer.choices[0].message.content or ""
    try:
        fits = json.loads(text) in [{"answer": each} for each in ANSWERS]
    except ValueError:
        fits = False
    return [] if fits else [f"message {message!r} with a JSON schema was answered with {text!r}"]


def check_call(client: OpenAI, model_name: str, message: str) -> list[str]:
    """A function call that is required must be made, with arguments of its schema."""
    function: Any = {"name": CALLED, "description": "Records the answer.", "parameters": CALL_SCHEMA}
    answer = client.chat.completions.create(
        model=model_name,
        messages=[{"role": "user", "content": message}],
        max_tokens=MAX_CALL_TOKENS,
        temperature=0,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
    )
    choice = answer.choices[0]
    calls = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
    made = [(call.name, _arguments(call.arguments)) for call in calls]
    fits = len(made) == 1 and made[0][0] == CALLED and _are_of_call(made[0][1])
    if fits and choice.finish_reason == "tool_calls":
        return []
    shown = [f"{call.name}({call.arguments})" for call in calls] or choice.message.content
    return [f"message {message!r} with a required function was answered with {shown!r}, {choice.finish_reason}"]


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _are_of_call(given: Any) -> bool:
    """Whether arguments are values of CALL_SCHEMA."""
    return given in [
        {"answer": answer, "is_sure": is_sure, "score": {"points": points}}
        for answer in ANSWERS
        for is_sure in (True, False)
        for points in (1, 2)
    ]


def check_concurrent(
    answers: Sequence[ReferenceAnswer], check_answer: Callable[[ReferenceAnswer], list[str]]
) -> list[str]:
    """Many requests at the same time must each get the answer to their own prompt."""
    short = [leading for answer in answers if (leading := _leading(answer, CONCURRENT_TOKENS)).num_clear]
    if not short:
        return []
    asked = [short[number % len(short)] for number in range(NUM_CONCURRENT)]
    with ThreadPoolExecutor(NUM_CONCURRENT) as threads:
        reasons = [reason for found in threads.map(check_answer, asked) for reason in found]
    return [f"{NUM_CONCURRENT} requests at the same time: {reasons[0]} ({len(reasons)} differ)"] if reasons else []


def _leading(answer: ReferenceAnswer, num_tokens: int) -> ReferenceAnswer:
    num_clear = min(num_tokens, answer.num_clear, len(answer.token_ids) - answer.is_stopped)
    changes = {"token_ids": answer.token_ids[:num_clear], "pieces": answer.pieces[:num_clear], "num_clear": num_clear}
    return answer.model_copy(update=changes | {"is_stopped": False})


def _status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=60) as answered:
            return answered.status
    except urllib.error.HTTPError as refused:
        return refused.code


class MadeCall(NamedTuple):
    name: str
    arguments: str
    num_tokens: int


class MadeCalls(NamedTuple):
    calls: list[MadeCall]
    """In the order in which they were asked for."""
    num_taken: int
    """Drafted tokens that were right."""


def calls_of_file(
    gguf_path: Path, resources: ServingResources, log_path: Path, num_calls: int, *, is_drafting: bool
) -> MadeCalls:
    """Those of a server that is started for them, on loopback."""
    from infra.serving.model_server import Access, running_model_server

    private, access = resources.model_copy(update={"port": 0}), Access(is_drafting=is_drafting)
    with running_model_server(gguf_path, private, log_path, access=access) as server:
        return made_calls(server.url, num_calls)


def made_calls(url: str, num_calls: int) -> MadeCalls:
    """Greedy calls of functions that differ in name and schema, each required. `url` is without a trailing slash.

    Raises HTTPError where the server refuses, and KeyError where it answers without a call."""
    calls, num_taken = [], 0
    for number in range(num_calls):
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(_asked_call(number)).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        function = call["function"]
        calls.append(MadeCall(function["name"], function["arguments"], answer["usage"]["completion_tokens"]))
        num_taken += answer["timings"].get("draft_n_accepted", 0)
    return MadeCalls(calls, num_taken)


def _asked_call(number: int) -> dict[str, Any]:
    name = FUNCTIONS[number % len(FUNCTIONS)]
    properties = {"first": {"enum": [number, number + 1]}, "is_sure": {"type": "boolean"}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "messages": [{"role": "user", "content": f"{name} {number} and {number * 7 % 101}"}],
        "tools": [{"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}],
        "tool_choice": "required",
        "max_tokens": MAX_MADE_TOKENS,
        "temperature": 0,
    }
