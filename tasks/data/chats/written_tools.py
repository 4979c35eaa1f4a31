"""Takes the tools, calls and results of conversations out of the texts in which a file holds them.

In files for Hermes, Qwen and models like them a system says what tools there are (`<tools>`), an assistant's text holds
its calls (`<tool_call>` around JSON) and a turn their results (`<tool_response>`). Trained as text that would teach
another model's way to call, beside the one of the chat template. So they are taken out of the texts, and the words that
explain that way with them. Calls are also read as GLM, Glaive (`<functioncall>`), Qwen3-Coder (`<function=...>`),
Mistral (`[TOOL_CALLS]`), Nemotron (`<TOOLCALL>`), Llama 3 (`<|python_tag|>`) and ToolACE (`[f(x=1)]`) write them; those
in the marks of other models are refused. Nothing is taken where no tools are described.
"""

from __future__ import annotations

import json
import re
import reprlib
from typing import Any

from model.text.chat_template import Message, ToolCall
from tasks.data.chats.chat_tools import MalformedChatError, Record, calls_of, literal_of, tools_of
from tasks.data.chats.python_calls import python_calls
from tasks.data.prompts.function_calls import ARGUMENTS, name_and_arguments, written_calls

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
LISTED = re.compile(
    r"(?<![^\n])[^\n]*list of functions in JSON format that you can invoke[.:]\s*(\[.*\])\.?\s*"
    r"Should you decide to return the function call.*?(?:NO other text MUST be included\.|\Z)",
    re.DOTALL,
)
"""ToolACE's, with the words on how a call is written."""
DECLARED = re.compile(r"<\|im_system\|>tool_declare<\|im_middle\|>(.*?)<\|im_end\|>", re.DOTALL)
"""Kimi's, which Toucan has."""
OFFERS = ((DESCRIBED, EXPLAINED), (OFFERED, OFFERED), (LISTED, LISTED), (DECLARED, DECLARED))
"""What finds the tools in a system's text, and what is taken out of it with them."""
QWEN_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
QWEN_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
MISTRAL_CALL = re.compile(r"([\w.:/-]+?)(?:\[CALL_ID\]\w+)?\[ARGS\](.*)", re.DOTALL)
CALL = re.compile(
    r"<tool_call>(.*?)</tool_call>|<functioncall>(?=\s*\{)(.*?)(?=<functioncall>|<\|endoftext\|>|\Z)"
    r"|(<function=[^>\n]+>.*?</function>)|\[TOOL_CALLS\](?=\s*\[\s*\{|[^\[\n]+\[)(.*?)(?:(?=\[TOOL_CALLS\])|</s>|\Z)"
    r"|<TOOLCALL>(.*?)</TOOLCALL>|<\|python_tag\|>(?=\s*\{)(.*?)(?:<\|eom_id\|>|<\|eot_id\|>|\Z)",
    re.DOTALL,
)
"""Of Hermes, Qwen and GLM, or of Glaive, Qwen3-Coder, Mistral, Nemotron and Llama 3; Glaive's, Mistral's and Llama's
end a turn."""
UNREAD = re.compile(
    r"\[TOOL_CALLS\](?=\s*\[\s*\{|[\w.:/-]+\[)|<\|python_tag\|>(?=\S)|<｜tool▁calls?▁begin｜>|<\|tool_call(?:s_section)?_begin\|>"
    r"|<TOOLCALL>(?=\s*\[)|<minimax:tool_call>|<｜DSML｜|<\|tool_call\|>(?=\s*\[)|<function_calls>(?=\s*[\w.]+\()"
)
"""Marks before a call that is not read, among them DeepSeek's, Kimi's, MiniMax's, Granite's and Olmo's."""
QUOTED = re.compile(r"(\"arguments\":\s*)'(\{.*\})'(\s*\})", re.DOTALL)
"""Glaive's arguments, which are JSON in single quotes."""
RESULT = re.compile(r"\s*<tool_response>(.*?)</tool_response>\s*", re.DOTALL)
NAME = re.compile(r"[\w.:/-]+")


def take_written(messages: list[Message], tools: list[Record]) -> tuple[list[Message], list[Record]]:
    """Messages without what their texts hold of tools, calls and results, which stand where those of fields do; and
    the tools, those of the systems where no others are given. Raises MalformedChatError for what cannot be read."""
    tools = tools or tools_of(
        [tool for message in messages if message["role"] == "system" for tool in _listed(message)]
    )
    taken: list[Message] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            taken.append(_with_calls(number, message, tools) if tools else message)
            _refuse_marks(number, taken[-1]["content"])
        elif message["role"] == "system" and tools:
            explained = next((taken for described, taken in OFFERS if described.search(message["content"])), None)
            said = message["content"] if explained is None else explained.sub("", message["content"]).strip()
            taken.append({**message, "content": said})
        else:
            taken += _results(message) if tools else [message]
    return taken, tools


def _listed(system: Message) -> list[Any]:
    texts = next(filter(None, (described.findall(system["content"]) for described, _ in OFFERS)), [])
    return [tool for text in texts for tool in _values(text, "broken_tools", "the list of tools")]


def _with_calls(number: int, message: Message, tools: list[Record]) -> Message:
    """An assistant's turn whose text may hold calls, or be nothing but calls. Where fields hold some too, those
    count."""
    said = message["content"]
    if not message.get("tool_calls") and (calls := _bare_calls(number, said, tools)):
        return {**message, "content": "", "tool_calls": calls}
    bodies = [next(filter(None, groups), "") for groups in CALL.findall(said)]
    rest = CALL.sub("", said)
    if "<tool_call>" in rest:
        raise MalformedChatError("broken_tool_call", f"turn {number}: <tool_call> without </tool_call>")
    if not bodies:
        return message
    calls = message.get("tool_calls") or [call for body in bodies for call in _written_calls(number, body.strip())]
    return {**message, "content": rest.strip(), "tool_calls": calls}


def _bare_calls(number: int, said: str, tools: list[Record]) -> list[ToolCall]:
    """The calls of a text without marks that consists of them: in JSON, Llama 3's way, or as Python writes them,
    ToolACE's and Llama 4's. A list that begins with a call of a described function must be one."""
    names = [name for tool in tools if isinstance(name := (tool.get("function") or {}).get("name"), str) and name]
    name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    opening = re.match(rf"\s*(\[?)\s*(?:{name})\s*\(", said) if names else None
    if opening is not None:
        calls = python_calls(said, name)
        if calls is None and opening[1]:
            raise MalformedChatError("broken_tool_call", f"turn {number}: {reprlib.repr(said)} is no list of calls")
        return calls or []
    value = literal_of(said.strip()) if re.match(r"\s*(?:\[\s*)?\{", said) else None
    listed = value if isinstance(value, list) else [value]
    is_called = all(name in names and given is not None for name, given in map(_name_and_given, listed))
    return calls_of(number, value) if listed and is_called else []


def _name_and_given(call: object) -> tuple[object, object]:
    """The name and arguments of a call; no arguments of an object that has no field of them, such as a record."""
    has_arguments = isinstance(call, dict) and bool(call.keys() & {*ARGUMENTS})
    return name_and_arguments(call) if has_arguments else (None, None)


def _refuse_marks(number: int, said: str) -> None:
    if mark := UNREAD.search(said):
        raise MalformedChatError(
            "unsupported_tool_call", f"turn {number} has a call after {mark[0]!r}: give calls as tool_calls"
        )


def _written_calls(number: int, body: str) -> list[ToolCall]:
    if "<function=" in body:
        return _qwen_calls(number, body)
    if called := MISTRAL_CALL.fullmatch(body):
        return calls_of(number, {"name": called[1], "arguments": called[2].strip()})
    if "<arg_key>" in body or NAME.fullmatch(body):
        written = written_calls(f"<tool_call>{body}</tool_call>")
        if written is None:
            raise MalformedChatError("broken_tool_call", f"turn {number}: {reprlib.repr(body)} lacks a tag")
        return [{"name": name, "arguments": dict(arguments)} for name, arguments in written]
    body = QUOTED.sub(r"\1\2\3", body)
    return calls_of(number, _values(body, "broken_tool_call", f"turn {number}"))


def _qwen_calls(number: int, body: str) -> list[ToolCall]:
    """Qwen3-Coder's calls; values are text, as GLM writes them."""
    functions = QWEN_FUNCTION.findall(body)
    rest = [QWEN_FUNCTION.sub("", body), *(QWEN_PARAMETER.sub("", inner) for _, inner in functions)]
    if any(text.strip() for text in rest):
        raise MalformedChatError("broken_tool_call", f"turn {number}: {reprlib.repr(body)} lacks a tag")
    return [{"name": name, "arguments": dict(QWEN_PARAMETER.findall(inner))} for name, inner in functions]


def _values(text: str, reason: str, where: str) -> list[Any]:
    """The values of a text: of JSON or of a Python literal, the whole, one after the other or one in each line."""
    whole = literal_of(text.strip())
    found = [whole] if whole is not None else _values_in_turn(text.strip())
    found = found or [literal_of(line.strip()) for line in text.strip().splitlines()]
    if None in found:
        raise MalformedChatError(reason, f"{where}: {reprlib.repr(text)} is neither JSON nor a Python literal")
    return [value for each in found for value in (each if isinstance(each, list) else [each])]


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
