"""What users ask of a served model besides greedy answers: each function asks for one thing, and says what was wrong.

Part of the smoke test. The server has a key and several slots, as `glm46 serve --api-key-env NAME --slots N` starts it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

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
