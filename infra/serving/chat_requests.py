"""Gives chat requests the one form that llama.cpp's server and a required call (required_call.py) read.

Clients write null for what a message does not have, "" for a call without arguments, `thinking` as GLM's own API has
it, and the choice of a tool in the words of several APIs.
"""

from __future__ import annotations

import json
from typing import Any

WORDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
THINKING = {"enabled": True, "disabled": False}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Asked = dict[str, Any]
"""A request's body."""


def readable_chat(asked: Asked) -> Asked:
    """The request in that form; what is wrong in it stays for whoever reads it. Raises ValueError for a choice among
    tools that are not there, for a chat of no messages, and for a role that the template does not know."""
    asked = _with_choice(dict(asked))
    refuse_wrong_messages(asked)
    messages = asked.get("messages")
    if isinstance(messages, list):
        asked["messages"] = [read for each in messages for read in _messages(each)]
    return with_thinking(asked)


def refuse_wrong_messages(asked: Asked) -> None:
    """Raises ValueError for messages that are none, to which llama.cpp would answer anything, and for one of a role
    that the template does not know and would leave out."""
    messages = asked.get("messages", [None])
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {'no list' if messages else 'empty'}: give a list of at least one")
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(role, str) and role not in ROLES:
            raise ValueError(f"message {number} has the role {role!r}: write one of {', '.join(ROLES)}")


def with_thinking(asked: Asked) -> Asked:
    """The request, in this shape or Anthropic's, with what it says of reasoning where the template reads it."""
    settings, thinks = asked.get("chat_template_kwargs"), _thinks(asked)
    if thinks is None or not (settings is None or isinstance(settings, dict)):
        return asked
    return asked | {"chat_template_kwargs": {"enable_thinking": thinks, **(settings or {})}}


def _thinks(asked: Asked) -> bool | None:
    """Whether an answer begins with reasoning, as GLM's API, DashScope's, Ollama's and OpenRouter's say it; None where
    the request does not say. One that the request begins has none: llama.cpp would leave out the line end before
    it."""
    thinking, reasoning, messages = asked.get("thinking"), asked.get("reasoning"), asked.get("messages")
    if isinstance(thinking, dict) and isinstance(thinking.get("type"), str) and thinking["type"] in THINKING:
        return THINKING[thinking["type"]]
    reasoning = reasoning if isinstance(reasoning, dict) else {}
    switches = (asked.get("enable_thinking"), asked.get("think"), reasoning.get("enabled"))
    if (switch := next((each for each in switches if isinstance(each, bool)), None)) is not None:
        return switch
    if reasoning.get("effort") == "none":
        return False
    last = messages[-1] if isinstance(messages, list) and messages else None
    return False if isinstance(last, dict) and last.get("role") == "assistant" else None


def _messages(message: Any) -> list[Any]:
    """A message, or one for each of the results that GLM's template takes in one: `[{"output": ...}, ...]`."""
    if not isinstance(message, dict):
        return [message]
    read, results = _message(message), message.get("content")
    is_several = isinstance(results, list) and all(isinstance(each, dict) and "output" in each for each in results)
    if read.get("role") != "tool" or not is_several or not results:
        return [read]
    outputs = [each["output"] for each in results]
    return [{**read, "content": each if isinstance(each, str) else json.dumps(each)} for each in outputs]


def _message(message: Asked) -> Asked:
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if message.get("role") == "function":  # OpenAI's older name, which no template knows
        message["role"] = "tool"
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(each) if isinstance(each, dict) else each for each in calls]
    return message


def _call(call: Asked) -> Asked:
    call, function = {"type": "function", **call}, call.get("function")
    if isinstance(function, dict) and function.get("arguments") in ("", None):
        call["function"] = {**function, "arguments": "{}"}
    return call


def _with_choice(asked: Asked) -> Asked:
    choice = asked.get("tool_choice")
    if not isinstance(choice, dict):
        return asked
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _narrowed(asked, choice.get("allowed_tools", choice))
    if isinstance(kind, str) and kind in WORDS:
        return asked | {"tool_choice": WORDS[kind]}
    name = choice.get("name")
    if "function" not in choice and isinstance(name, str):
        return asked | {"tool_choice": {"type": "function", "function": {"name": name}}}
    return asked


def _narrowed(asked: Asked, allowed: Any) -> Asked:
    """With those of its tools that a choice of the kind allowed_tools names."""
    mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise ValueError("tool_choice of the type allowed_tools has a mode, auto or required, and a list of tools")
    names, tools = list(map(_name_of, listed)), asked.get("tools")
    tools = [tool for tool in tools if _name_of(tool) in names] if isinstance(tools, list) else []
    if not tools:
        raise ValueError(f"tool_choice allows {names}, and none of them is one of tools")
    return asked | {"tool_choice": mode, "tools": tools}


def _name_of(tool: Any) -> Any:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None
