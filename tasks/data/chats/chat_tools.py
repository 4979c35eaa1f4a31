"""Reads the tools, calls and results of conversations, from fields or from the texts in which a file holds them.

In files for Hermes, Qwen and models like them a system says what tools there are (`<tools>`), an assistant's text holds
its calls (`<tool_call>` around JSON) and a turn their results (`<tool_response>`). Trained as text that would teach
another model's way to call, beside the one of the chat template. So they are taken out of the texts, and the words that
explain that way with them. GLM's own written calls are read too, and Glaive's (`<functioncall>`). Nothing is taken
where no tools are described.
"""

from __future__ import annotations

import ast
import json
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from model.text.chat_template import Message, ToolCall
from tasks.data.chats.chat_roles import role_of
from tasks.data.prompts.function_calls import name_and_arguments, written_calls
from tasks.data.readers.json_lines import MAX_DEPTH, is_deep

Record = dict[str, Any]

TOOLS = ("tools", "functions", "available_tools", "xml_tools")
"""Fields that describe functions; the last two are Toucan's and SmolTalk2's."""

MAX_DETAIL_CHARS = 200
DESCRIBED = re.compile(r"<tools>\s*([^<\s].*?)</tools>", re.DOTALL)
EXPLAINED = re.compile(
    r"(?:^#+ Tools[ \t]*\n\s*)?(?:^You may call one or more functions[^\n]*\n\s*)?"
    r"(?<![^.\n])[^.\n]*<tools>.*</tools>(?:.*</tool_call>[^\n]*)?",
    re.DOTALL | re.MULTILINE,
)
"""From the sentence that names the list of tools to the end of the line that shows how a call is written."""
OFFERED = re.compile(
    r"(?<![^.\n])[^.\n]*access to the following functions\. Use them if required -\s*([\[{].*[\]}])", re.DOTALL
)
"""Glaive's list of tools, in JSON without a mark."""
CALL = re.compile(
    r"<tool_call>(.*?)</tool_call>|<functioncall>(?=\s*\{)(.*?)(?=<functioncall>|<\|endoftext\|>|\Z)", re.DOTALL
)
"""Of Hermes, Qwen and GLM, or of Glaive, which ends a turn."""
QUOTED = re.compile(r"(\"arguments\":\s*)'(\{.*\})'(\s*\})", re.DOTALL)
"""Glaive's arguments, which are JSON in single quotes."""
RESULT = re.compile(r"\s*<tool_response>(.*?)</tool_response>\s*", re.DOTALL)
NAME = re.compile(r"[\w.:/-]+")


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
    """Tool calls of a turn, from JSON text or objects; a call's arguments may themselves be JSON text. Raises
    MalformedChatError."""
    parsed = from_json(value)
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


def take_written(messages: list[Message], tools: list[Record]) -> tuple[list[Message], list[Record]]:
    """Messages without what their texts hold of tools, calls and results, which stand where those of fields do; and
    the tools, those of the systems where no others are given. Raises MalformedChatError for what cannot be read."""
    tools = tools or tools_of(
        [tool for message in messages if message["role"] == "system" for tool in _listed(message)]
    )
    if not tools:
        return messages, tools
    taken: list[Message] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            taken.append(_with_calls(number, message))
        elif message["role"] == "system":
            list_of_tools = EXPLAINED if DESCRIBED.search(message["content"]) else OFFERED
            taken.append({**message, "content": list_of_tools.sub("", message["content"]).strip()})
        else:
            taken += _results(message)
    return taken, tools


def _listed(system: Message) -> list[Any]:
    texts = DESCRIBED.findall(system["content"]) or OFFERED.findall(system["content"])
    return [tool for text in texts for tool in _values(text, "broken_tools", "the list of tools")]


def _with_calls(number: int, message: Message) -> Message:
    """An assistant's turn whose text may hold calls. Where fields hold some too, those count."""
    bodies = [marked or QUOTED.sub(r"\1\2\3", open_) for marked, open_ in CALL.findall(message["content"])]
    rest = CALL.sub("", message["content"])
    if "<tool_call>" in rest:
        raise MalformedChatError("broken_tool_call", f"turn {number}: <tool_call> without </tool_call>")
    if not bodies:
        return message
    calls = message.get("tool_calls") or [call for body in bodies for call in _written_calls(number, body.strip())]
    return {**message, "content": rest.strip(), "tool_calls": calls}


def _written_calls(number: int, body: str) -> list[ToolCall]:
    if "<arg_key>" in body or NAME.fullmatch(body):
        written = written_calls(f"<tool_call>{body}</tool_call>")
        if written is None:
            raise MalformedChatError("broken_tool_call", f"turn {number}: {reprlib.repr(body)} lacks a tag")
        return [{"name": name, "arguments": dict(arguments)} for name, arguments in written]
    return calls_of(number, _values(body, "broken_tool_call", f"turn {number}"))


def _values(text: str, reason: str, where: str) -> list[Any]:
    """The values of a text: of JSON or of a Python literal, the whole, one after the other or one in each line."""
    whole = _value(text.strip())
    found = [whole] if whole is not None else _values_in_turn(text.strip())
    found = found or [_value(line.strip()) for line in text.strip().splitlines()]
    if None in found:
        raise MalformedChatError(reason, f"{where}: {reprlib.repr(text)} is neither JSON nor a Python literal")
    return [value for each in found for value in (each if isinstance(each, list) else [each])]


def _value(text: str) -> Any:
    """A JSON value, or the one of Python's literals that stands in files in its place; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _values_in_turn(text: str) -> list[Any]:
    """The JSON values that a text consists of; none where it holds anything else."""
    found, decoder = [], json.JSONDecoder()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        found.append(value)
        text = text[end:].lstrip()
    return found


def _results(message: Message) -> list[Message]:
    """A turn of results that are marked in its text, as one message for each; any other turn as it is."""
    text = message["content"]
    if not RESULT.match(text) or RESULT.sub("", text):
        return [message]
    return [{**message, "role": "tool", "content": found.strip()} for found in RESULT.findall(text)]
