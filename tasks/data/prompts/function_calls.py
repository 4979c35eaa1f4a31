"""Reads function calls as GLM-4.5/4.6 write them, and compares them with the expected ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Fields of a call's arguments: OpenAI's, Llama 3's, LangChain's, Anthropic's."""


class ExpectedCall(TypedDict):
    """A call with the values that each argument may have."""

    name: str
    accepted: dict[str, list[object]]
    optional: list[str]
    """Arguments that may be left out."""


def name_and_arguments(call: object) -> tuple[Any, Any]:
    """Those of a call as files hold it, with OpenAI's `function` around them or without; (None, None) of no object."""
    given = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(given, dict):
        return None, None
    return given.get("name"), next((given[key] for key in ARGUMENTS if given.get(key) is not None), None) or {}


def calls_agree(text: str, expected: Sequence[ExpectedCall]) -> bool:
    """Whether the text makes exactly the expected calls, in any order. A call that cannot be read is no call, and
    makes the others wrong too."""
    written = written_calls(text)
    if written is None or len(written) != len(expected):
        return False
    taken: dict[int, int] = {}
    return all(_is_placed(number, written, expected, taken, set()) for number in range(len(written)))


def _is_placed(
    number: int,
    written: Sequence[tuple[str, dict[str, str]]],
    expected: Sequence[ExpectedCall],
    taken: dict[int, int],
    tried: set[int],
) -> bool:
    """Gives a written call an expected one; the call that has it moves to another where it can (a path of Kuhn's
    matching). `taken` are the written calls by the expected ones that they have."""
    for place, wanted in enumerate(expected):
        if place in tried or not _agrees(*written[number], wanted):
            continue
        tried.add(place)
        if place not in taken or _is_placed(taken[place], written, expected, taken, tried):
            taken[place] = number
            return True
    return False


def written_calls(text: str) -> list[tuple[str, dict[str, str]]] | None:
    """(name, arguments as text) of every call; None where a tag is missing, or an argument is there twice."""
    said, *opened = text.split("<tool_call>")
    calls = [_call(*part.split("</tool_call>")) for part in opened]
    return None if "</tool_call>" in said or None in calls else [call for call in calls if call is not None]


def write_calls(calls: Sequence[tuple[str, str]]) -> str:
    """Calls as GLM writes them, of (name, arguments as a JSON object). Arguments that are none give a call that cannot
    be read."""
    return "".join(f"\n<tool_call>{name}\n{_written(arguments)}</tool_call>" for name, arguments in calls)


def _written(arguments: str) -> str:
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        return "<arg_key>"
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())


def _call(body: str, *after: str) -> tuple[str, dict[str, str]] | None:
    """The call that a body describes; `after` are the parts that closing tags cut off: there must be one."""
    head, *parts = body.split("<arg_key>")
    arguments: dict[str, str] = {}
    for part in parts:
        key, _, rest = part.partition("</arg_key>")
        before, *values = rest.split("<arg_value>")
        value, closed, more = values[0].partition("</arg_value>") if len(values) == 1 else ("", "", "")
        if not closed or before.strip() or more.strip() or key in arguments:
            return None
        arguments[key] = value
    return (head.strip(), arguments) if len(after) == 1 else None


def _agrees(name: str, arguments: Mapping[str, str], wanted: ExpectedCall) -> bool:
    required = set(wanted["accepted"]) - set(wanted["optional"])
    # Servers take no dots in names: BFCL's `math.factorial` is `math_factorial` there.
    is_named = name.replace(".", "_") == wanted["name"].replace(".", "_")
    if not is_named or not required <= set(arguments) <= set(wanted["accepted"]):
        return False
    return all(any(_is(text, value) for value in wanted["accepted"][key]) for key, text in arguments.items())


def _is(text: str, value: object) -> bool:
    """A string is written as it is, anything else as JSON: 1 is 1.0, but true is not 1."""
    if isinstance(value, str):
        return text == value
    try:
        return _typed(json.loads(text)) == _typed(value)
    except (ValueError, RecursionError):
        return False


def _typed(value: object) -> object:
    """The value with truth values marked, which Python takes for numbers."""
    if isinstance(value, bool):
        return ("truth", value)
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return {key: _typed(item) for key, item in value.items()} if isinstance(value, dict) else value
