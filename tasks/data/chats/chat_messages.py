"""Reads the turns of a conversation: who speaks, what is said, thought and called, as the chat template renders it.

The results of calls come in the order of the calls: the template writes no ids. The functions are pure.
"""

from __future__ import annotations

import json
import reprlib
from itertools import groupby
from typing import Any, TypeGuard

from model.text.chat_template import Message, ToolCall
from tasks.data.chats.chat_roles import ROLES, is_only_read, is_reasoning, role_of
from tasks.data.chats.chat_tools import MalformedChatError, Record, calls_of
from tasks.data.chats.python_calls import python_calls
from tasks.data.chats.written_thoughts import thought_and_said

CALL_ROLES = ("function_call", "tool_call")
REASONINGS = ("reasoning_content", "reasoning", "thinking", "Complex_CoT")
REASONINGS += ("thinking_trajectories", "deepseek_thinking_trajectory")
SWITCHES = ("on", "off")
"""Values of Nemotron's field `reasoning`, which says whether there is some."""
SAID = ("content", "value", "text", "system_prompt")
"""Fields of what a turn says; the last two are those of nebius' SWE-agent trajectories."""
PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "tool_call": "tool_call",
    "tool_use": "tool_call",
}
"""What a content's parts are, by their type; a part of another type, such as a picture, is refused."""


def messages_of(turns: list[Any]) -> list[Message]:
    """A conversation's turns, the results of calls in the order of the calls: the template writes no ids."""
    ordered: list[Any] = []
    position: dict[str, int] = {}
    apart = [piece for turn in turns for piece in _results_apart(turn)]
    for is_result, run in groupby(apart, key=lambda turn: isinstance(turn, dict) and role_of(turn) == "tool"):
        given = list(run)
        if is_result:
            given.sort(key=lambda turn: position.get(str(turn.get("tool_call_id")), len(position)))
        else:
            position = {identity: number for number, identity in enumerate(_ids_of_calls(given[-1]))}
        ordered += given
    return [message_of(number, turn) for number, turn in enumerate(ordered)]


def _results_apart(turn: Any) -> list[Any]:
    """A turn whose parts hold results of calls (type tool_result), as one turn for each result and one for the rest."""
    parts = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(parts, list):
        return [turn]
    is_result = [isinstance(part, dict) and part.get("type") == "tool_result" for part in parts]
    results = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content")}
        for part, found in zip(parts, is_result, strict=True)
        if found
    ]
    rest = [part for part, found in zip(parts, is_result, strict=True) if not found]
    return [*results, {**turn, "content": rest}] if rest or not results else results


def _ids_of_calls(turn: Any) -> list[str]:
    """The ids of the calls of a turn, in their order."""
    lists = [turn.get(key) for key in ("tool_calls", "content")] if isinstance(turn, dict) else []
    calls = [call for given in lists if isinstance(given, list) for call in given if isinstance(call, dict)]
    return [str(call["id"]) for call in calls if call.get("id") is not None]


def message_of(number: int, given: object) -> Message:
    turn = object_of(number, given)
    role, content = role_of(turn), next((turn[key] for key in SAID if turn.get(key) is not None), None)
    name = turn.get("role", turn.get("from"))
    if role is None:
        raise MalformedChatError(
            "unknown_role", f"turn {number} has role {reprlib.repr(name)}, known are {', '.join(ROLES)}"
        )
    message = text_message(role, "")
    if str(name).lower() in CALL_ROLES:
        message["tool_calls"] = calls_of(number, content)
        return message
    if role == "user" and content is None:
        raise MalformedChatError("broken_turn", f"turn {number} of the user has no content, its fields are {[*turn]}")
    if role == "tool" and _is_value(content):
        content = json.dumps(content, ensure_ascii=False)
    parts = content if isinstance(content, list) else [] if content is None else [{"type": "text", "text": content}]
    kinds = [_kind(number, part) for part in parts]
    texts = {
        kind: "\n".join(_text(number, part) for part, own in zip(parts, kinds, strict=True) if own == kind)
        for kind in ("text", "reasoning")
    }
    message["content"] = texts["text"]
    if role == "assistant":
        reasoning = reasoning_of(turn) or texts["reasoning"]
        message["reasoning"], message["content"] = thought_and_said(number, texts["text"], reasoning)
        if is_reasoning(turn):
            message["reasoning"], message["content"] = message["content"] or message.get("reasoning", ""), ""
        called = [_value(part) for part, kind in zip(parts, kinds, strict=True) if kind == "tool_call"]
        called += [turn[key] for key in ("tool_calls", "function_call") if turn.get(key)]
        message["tool_calls"] = [call for value in called for call in calls_of(number, value)]
        if isinstance(written := turn.get("function_calls"), str) and written.strip():  # Olmo 3's
            message["tool_calls"] += _python_calls(number, written)
        if is_only_read(turn):
            message["is_trained"] = False
    return message


def _python_calls(number: int, written: str) -> list[ToolCall]:
    calls = python_calls(written)
    if calls is None:
        raise MalformedChatError("broken_tool_call", f"turn {number}: {reprlib.repr(written)} is no list of calls")
    return calls


def _is_value(content: object) -> bool:
    """Whether a tool's result is an object, or a list with one that is no part of a text."""
    if isinstance(content, list):
        return any(isinstance(part, dict) and "type" not in part for part in content)
    return isinstance(content, dict)


def text_message(role: str, content: str) -> Message:
    return {"role": role, "content": content, "reasoning": "", "tool_calls": []}


def _kind(number: int, part: object) -> str:
    named = part.get("type") or "text" if isinstance(part, dict) else "text"
    if not isinstance(named, str) or named not in PARTS:
        raise MalformedChatError("unsupported_part", f"turn {number} has a part of type {named}: only text is read")
    return PARTS[named]


def _text(number: int, part: object) -> str:
    value = _value(part)
    if not isinstance(value, str | int | float):
        raise MalformedChatError("broken_turn", f"turn {number}: its text is {type(value).__name__}, not a string")
    return str(value)


def _value(part: object) -> object:
    """What a part holds; a part of type tool_use is the call itself."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "tool_use":
        return part
    return next((part[key] for key in ("value", "text", "thinking") if key in part), None)


def object_of(number: int, turn: object) -> Record:
    if not isinstance(turn, dict):
        raise MalformedChatError("broken_turn", f"turn {number} is no object but {type(turn).__name__}")
    return turn


def reasoning_of(fields: Record) -> str:
    """What an assistant thought, in a field beside what it said."""
    told = [fields.get(key) for key in REASONINGS]
    given = ["\n\n".join(each) if are_texts(each) else each for each in told]
    details = fields.get("reasoning_details")  # OpenRouter's
    parts = [part.get("text") for part in details if isinstance(part, dict)] if isinstance(details, list) else []
    said = "\n".join(part for part in parts if isinstance(part, str))
    return next((text for text in [*given, said] if isinstance(text, str) and text and text not in SWITCHES), "")


def are_texts(turns: Any) -> TypeGuard[list[str]]:
    return isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns)
