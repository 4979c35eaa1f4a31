"""Asks a server for many different function calls, to compare how it answers in two settings."""

from __future__ import annotations

import json
import urllib.request
from typing import Any, NamedTuple

NAMES = ("add", "compare", "record", "rate")
MAX_CALL_TOKENS = 320


class MadeCalls(NamedTuple):
    calls: list[tuple[str, str, int]]
    """Name, arguments and number of tokens, in the order in which they were asked for."""
    num_taken: int
    """Drafted tokens that were right."""


def made_calls(url: str, num_calls: int) -> MadeCalls:
    """Greedy calls of functions that differ in name and schema, each required. `url` is without a trailing slash.

    Raises HTTPError where the server refuses, and KeyError where it answers without a call."""
    calls, num_taken = [], 0
    for number in range(num_calls):
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(_asked(number)).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        function = call["function"]
        calls.append((function["name"], function["arguments"], answer["usage"]["completion_tokens"]))
        num_taken += answer["timings"].get("draft_n_accepted", 0)
    return MadeCalls(calls, num_taken)


def _asked(number: int) -> dict[str, Any]:
    name = NAMES[number % len(NAMES)]
    properties = {"first": {"enum": [number, number + 1]}, "is_sure": {"type": "boolean"}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "messages": [{"role": "user", "content": f"{name} {number} and {number * 7 % 101}"}],
        "tools": [{"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}],
        "tool_choice": "required",
        "max_tokens": MAX_CALL_TOKENS,
        "temperature": 0,
    }
