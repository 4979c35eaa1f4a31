"""What an assistant acts in: tools bound to the state of one episode, and a judge of how it ended.

A module beside this one makes the environment of each kind of prompt from the prompt's column `answer`. The same calls
in the same order give the same observations and the same verdict. Runs in ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

INTEGER = re.compile(r"-?[0-9]{1,17}")


class ToolError(ValueError):
    """A call that a tool refuses. The assistant reads why, and goes on."""


class ToolTimeoutError(ToolError):
    """A call that used up its time."""


@dataclass(frozen=True)
class Parameter:
    """An argument of a tool; all are needed."""

    name: str
    kind: Literal["string", "integer"]
    description: str


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: tuple[Parameter, ...]

    @property
    def signature(self) -> dict[str, Any]:
        """As the prompt shows it."""
        properties = {each.name: {"type": each.kind, "description": each.description} for each in self.parameters}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        described = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class Environment:
    """The state of one episode, held by its functions."""

    functions: Mapping[str, tuple[Tool, Callable[..., str]]]
    judge: Callable[[str], bool | None]
    """Whether the assistant's last words and the state that it leaves are right; None without a verdict."""

    def call(self, name: str, arguments: Mapping[str, str]) -> str:
        """What the tool answers; `arguments` are texts as they were written. Raises ToolError."""
        if name not in self.functions:
            raise ToolError(f"there is no tool {name}: the tools are {', '.join(self.functions)}")
        tool, run = self.functions[name]
        wanted = {parameter.name for parameter in tool.parameters}
        if set(arguments) != wanted:
            raise ToolError(f"{name} takes the arguments {', '.join(sorted(wanted)) or 'none'}")
        return run(*(_value(parameter, arguments[parameter.name]) for parameter in tool.parameters))


def _value(parameter: Parameter, text: str) -> str | int:
    if parameter.kind == "string":
        return text
    if not INTEGER.fullmatch(text.strip()):
        raise ToolError(f"{parameter.name} must be an integer, is {text[:40]}")
    return int(text)


def signatures(tools: Sequence[Tool]) -> str:
    """The column `tools` of a prompt."""
    return json.dumps([tool.signature for tool in tools], ensure_ascii=False)
