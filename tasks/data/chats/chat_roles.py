"""The roles of a conversation's turns, by the names that files give them."""

from __future__ import annotations

import re
from typing import Any

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "reasoning": "assistant",
    "thinking": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "environment": "tool",
}
"""Roles by their names in lower case, their words joined by _."""
THOUGHTS = ("reasoning", "thinking")
UNTRAINED = ("weight", "loss", "train", "training")
"""Fields of an assistant's turn that say by 0 or false, also as text, that it is only read: OpenAI's, AgentInstruct's
and ms-swift's, axolotl's two. nebius' `mask` says it by true."""


def role_of(turn: dict[str, Any]) -> str | None:
    """The role of a turn, in whatever way a file names it; None for an unknown one."""
    return ROLES.get(_name_of(turn))


def is_reasoning(turn: dict[str, Any]) -> bool:
    """Whether a turn is what an assistant thought before the turn that answers: gpt-oss's channel, or a role."""
    return turn.get("channel") == "analysis" or _name_of(turn) in THOUGHTS


def is_only_read(turn: dict[str, Any]) -> bool:
    """Whether a turn of an assistant is not to be trained."""
    is_untrained = any(str(turn.get(key)).lower() in ("0", "0.0", "false") for key in UNTRAINED)
    return is_untrained or turn.get("mask") is True


def _name_of(turn: dict[str, Any]) -> str:
    name = turn.get("role", turn.get("from"))
    return re.sub("[ -]", "_", name.lower()) if isinstance(name, str) else ""
