"""Arithmetic with brackets: two to six operations, one line of reasoning for each. Read back with Python's parser and
evaluated there."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.problems.reasoned_problem import ReasonedProblem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

MAX_OPERATIONS = 6
SIGNS = ("+", "-", "+", "-", "*")
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NODES = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
QUESTION = re.compile(r"Compute ([-+*() 0-9]+)\.")
LINE = re.compile(r"(-?\d+) ([-+*]) (-?\d+) = (-?\d+)")


def draw(numbers: I64, difficulty: int) -> I64:
    """Rows of (operations, operands, signs, joints: indices at which two neighbours are joined)."""
    count = np.full((len(numbers), 1), difficulty + 1)
    operands = numbers[:, : MAX_OPERATIONS + 1] % (10 * difficulty + 10) + 1
    signs = numbers[:, 7 : 7 + MAX_OPERATIONS] % len(SIGNS)
    return np.concatenate((count, operands, signs, numbers[:, 13 : 13 + MAX_OPERATIONS] % 5040), axis=1)


def write(row: list[int]) -> ReasonedProblem:
    """Join two neighbours until one number is left, with one line of reasoning each."""
    count = row[0]
    parts = [(str(value), value) for value in row[1 : count + 2]]
    lines = []
    for sign, joint in zip(row[8 : 8 + count], row[14 : 14 + count], strict=True):
        at = joint % (len(parts) - 1)
        (left, a), (right, b) = parts[at], parts[at + 1]
        result = APPLY[SIGNS[sign]](a, b)
        lines.append(f"{a} {SIGNS[sign]} {b} = {result}")
        parts[at : at + 2] = [(f"({left} {SIGNS[sign]} {right})", result)]
    expression, result = parts[0]
    expression = expression[1:-1]
    return ReasonedProblem(f"Compute {expression}.", "\n".join(lines), str(result), f"brackets {expression}")


def verify(problems: Sequence[ReasonedProblem]) -> list[bool]:
    """Whether the expression has the answer's value, every line of the reasoning is true, and the last gives the
    answer."""
    return [_is_right(problem) for problem in problems]


def _is_right(problem: ReasonedProblem) -> bool:
    asked = QUESTION.fullmatch(problem.question)
    lines = [LINE.fullmatch(line) for line in problem.reasoning.split("\n")]
    if asked is None or None in lines:
        return False
    stated = [(APPLY[line[2]](int(line[1]), int(line[3])), int(line[4])) for line in lines if line is not None]
    value = str(_value(ast.parse(asked[1], mode="eval").body))
    return all(computed == given for computed, given in stated) and value == problem.answer == str(stated[-1][1])


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return NODES[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(f"{ast.dump(node)} is no arithmetic")
