"""Linear equations ax + b = cx + d with an integer solution. Read back from the text and checked by putting the
solution in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.problems.reasoned_problem import ReasonedProblem, coefficients, formula

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

QUESTION = re.compile(r"Solve for x: ([-+x0-9 ]+) = ([-+x0-9 ]+)\.")


def draw(numbers: I64, difficulty: int) -> I64:
    """Rows of (a, b, c, d, x) with a > 0 and a other than c."""
    largest, factor = 10 * difficulty, 2 + 2 * difficulty
    a = numbers[:, 0] % factor + 1
    c = numbers[:, 1] % (2 * factor + 1) - factor
    b = numbers[:, 2] % (2 * largest + 1) - largest
    x = numbers[:, 3] % (2 * largest + 1) - largest
    rows = np.stack((a, b, c, (a - c) * x + b, x), axis=1)
    return rows[(a != c) & (np.abs(a - c) + np.abs(b) + np.abs(c) > 1)]


def write(row: list[int]) -> ReasonedProblem:
    a, b, c, d, x = row
    lines = []
    equation = f"{formula((a, 'x'), (b, ''))} = {formula((c, 'x'), (d, ''))}"
    if c:
        change = ("Subtract {} from" if c > 0 else "Add {} to").format(formula((abs(c), "x")))
        lines.append(f"{change} both sides: {formula((a - c, 'x'), (b, ''))} = {d}")
    if b:
        change = f"Subtract {b} from" if b > 0 else f"Add {-b} to"
        lines.append(f"{change} both sides: {formula((a - c, 'x'))} = {d - b}")
    if a - c != 1:
        lines.append(f"Divide both sides by {a - c}: x = {x}")
    lines.append(f"Check: the left side is {a * x + b}, the right side is {c * x + d}.")
    sides = " = ".join(sorted(equation.split(" = ")))
    return ReasonedProblem(f"Solve for x: {equation}.", "\n".join(lines), str(x), f"equations {sides}")


def verify(problems: Sequence[ReasonedProblem]) -> list[bool]:
    """Whether the answer is the only solution, and both sides of every equation of the reasoning are equal at it."""
    return [_is_right(problem) for problem in problems]


def _is_right(problem: ReasonedProblem) -> bool:
    asked = QUESTION.fullmatch(problem.question)
    if asked is None or not re.fullmatch(r"-?\d+", problem.answer):
        return False
    x = int(problem.answer)
    left, right = coefficients(asked[1]), coefficients(asked[2])
    steps = re.findall(r": ([-+x0-9 ]+) = ([-+x0-9 ]+)$", problem.reasoning, re.MULTILINE)
    checked = re.search(r"left side is (-?\d+), the right side is (-?\d+)\.$", problem.reasoning)
    sides = [(_at(coefficients(one), x), _at(coefficients(other), x)) for one, other in [(asked[1], asked[2]), *steps]]
    is_unique = left.get("x", 0) != right.get("x", 0)
    return (
        is_unique
        and checked is not None
        and all(a == b for a, b in sides)
        and sides[0] == (int(checked[1]), int(checked[2]))
    )


def _at(side: dict[str, int], x: int) -> int:
    return side.get("x", 0) * x + side.get("", 0)
