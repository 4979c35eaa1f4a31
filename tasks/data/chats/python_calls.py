"""Reads calls of functions that a text writes as Python does: `[f(x=1), g(y="a")]`, or one in each line."""

from __future__ import annotations

import ast
import re

from model.text.chat_template import ToolCall

NAME = r"[\w.]+"
PIECE = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[()]|[^()\"']+|.", re.DOTALL)
"""A string of Python's, whose brackets do not count, a bracket, or what is between those."""
JSON_NAMES = {"true": True, "false": False, "null": None}


def python_calls(text: str, name: str = NAME) -> list[ToolCall] | None:
    """The calls that the text consists of; None of any other text. `name` is the pattern of a function's name, which
    in ToolACE may hold spaces. Arguments without a name are none that a template can write."""
    written = text.strip()
    if written.startswith("[") and written.endswith("]"):
        written = written[1:-1]
    opening, calls, position = re.compile(rf"[\s,;]*({name})\s*(?=\()"), [], 0
    while opened := opening.match(written, position):
        position = _end_of_brackets(written, opened.end())
        arguments = _arguments(written[opened.end() : position])
        if arguments is None:
            return None
        calls.append(ToolCall(name=opened[1], arguments=arguments))
    return calls if calls and not written[position:].strip() else None


def _end_of_brackets(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed; the text's end where it is not."""
    depth = 0
    for piece in PIECE.finditer(text, start):
        depth += (piece[0] == "(") - (piece[0] == ")")
        if not depth:
            return piece.end()
    return len(text)


def _arguments(written: str) -> dict[str, object] | None:
    """The values of arguments in brackets by their names; None where that is not all that the brackets hold."""
    try:
        call = ast.parse(f"f{written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            return None
        return {str(each.arg): ast.literal_eval(_WithoutJson().visit(each.value)) for each in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


class _WithoutJson(ast.NodeTransformer):
    """Writes JSON's names of values as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node
