"""Reads the tools and calls of conversations from the fields in which a file holds them."""

from __future__ import annotations

import ast
import json
import reprlib
from collections.abc import Sequence
from typing import Any

from model.text.chat_template import ToolCall
from tasks.data.chats.chat_roles import role_of
from tasks.data.prompts.function_calls import name_and_arguments
from tasks.data.readers.json_lines import MAX_DEPTH, is_deep

Record = dict[str, Any]

TOOLS = ("tools", "functions", "available_tools", "xml_tools")
"""Fields that describe functions; the last two are Toucan's and SmolTalk2's."""

MAX_DETAIL_CHARS = 200


class MalformedChatError(ValueError):
    """A record is no conversation with an answer, for `reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail[:MAX_DETAIL_CHARS]


def from_json(value: object) -> Any:
    """The value of JSON text; anything else is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def calls_of(number: int, value: object) -> list[ToolCall]:
    """Tool calls of a turn, from objects or their text; a call's arguments may themselves be JSON text. Raises
    MalformedChatError."""
    parsed = literal_of(value) if isinstance(value, str) else value
    calls: list[ToolCall] = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        name, given = name_and_arguments(call)
        arguments = from_json(given)
        if not isinstance(arguments, dict) or not isinstance(name, str):
            raise MalformedChatError(
                "broken_tool_call", f"turn {number}: {reprlib.repr(value)} needs a name and an object of arguments"
            )
        if is_deep(arguments):
            raise MalformedChatError(
                "broken_tool_call", f"turn {number}: arguments nest more than {MAX_DEPTH} levels deep"
            )
        calls.append({"name": name, "arguments": arguments})
    return calls


def functions_of(record: Record, turns: Sequence[Any]) -> list[Record]:
    """What `tools_of` gives of the first field that describes functions, of the record or of a system's turn. Raises
    MalformedChatError."""
    places = [record, *(turn for turn in turns if isinstance(turn, dict) and role_of(turn) == "system")]
    return tools_of(next(filter(None, (place.get(name) for place in places for name in TOOLS)), None))


def tools_of(value: object) -> list[Record]:
    """Function descriptions, each as {"type": "function", "function": {...}}. Raises MalformedChatError."""
    parsed = from_json(value or [])
    parsed = [from_json(tool) for tool in parsed] if isinstance(parsed, list) else parsed
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise MalformedChatError("broken_tools", f"{reprlib.repr(value)} is no list of objects")
    if is_deep(parsed):
        raise MalformedChatError("broken_tools", f"they nest more than {MAX_DEPTH} levels deep")
    return [tool if tool.get("function") else {"type": "function", "function": _described(tool)} for tool in parsed]


def _described(tool: Record) -> Record:
    """A function with its `parameters`, which Anthropic's API calls `input_schema`."""
    if "input_schema" not in tool:
        return tool
    return {("parameters" if key == "input_schema" else key): value for key, value in tool.items()}


def literal_of(text: str) -> Any:
    """A JSON value, or the one of Python's literals that files have in its place; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
