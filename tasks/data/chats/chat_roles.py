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
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}
"""Roles by their names in lower case, their words joined by _."""


def role_of(turn: dict[str, Any]) -> str | None:
    """The role of a turn, in whatever way a file names it; None for an unknown one."""
    name = turn.get("role", turn.get("from"))
    return ROLES.get(re.sub("[ -]", "_", name.lower())) if isinstance(name, str) else None
