"""Systems of two linear equations with one integer solution, solved by elimination. Checked by putting the solution
into the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.problems.reasoned_problem import ReasonedProblem, coefficients, formula

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

QUESTION = re.compile(r"Find x and y with ([-+xy0-9 ]+) = (-?\d+) and ([-+xy0-9 ]+) = (-?\d+)\.")
ANSWER = re.compile(r"x = (-?\d+), y = (-?\d+)")


def draw(numbers: I64, difficulty: int) -> I64:
    """Rows of (a, b, c, d, x, y): ax + by and cx + dy, no coefficient 0, the determinant not 0."""
    factor, largest = 1 + 2 * difficulty, 5 * difficulty
    a, b, c, d = (np.where(numbers[:, n] % 2, 1, -1) * (numbers[:, n] // 2 % factor + 1) for n in range(4))
    x, y = (numbers[:, n] % (2 * largest + 1) - largest for n in (4, 5))
    return np.stack((np.abs(a), b, c, d, x, y), axis=1)[np.abs(a) * d != b * c]


def write(row: list[int]) -> ReasonedProblem:
    a, b, c, d, x, y = row
    e, f = a * x + b * y, c * x + d * y
    system = f"{formula((a, 'x'), (b, 'y'))} = {e} and {formula((c, 'x'), (d, 'y'))} = {f}"
    lines = [
        f"Multiply the first equation by {c}: {formula((a * c, 'x'), (b * c, 'y'))} = {e * c}",
        f"Multiply the second equation by {a}: {formula((c * a, 'x'), (d * a, 'y'))} = {f * a}",
        f"The difference has no x: {formula((b * c - d * a, 'y'))} = {e * c - f * a}",
        f"Divide: y = {y}",
        f"Put y into the first equation: {formula((a, 'x'))} = {e - b * y}",
        f"Divide: x = {x}",
    ]
    key = f"systems {' and '.join(sorted(system.split(' and ')))}"
    return ReasonedProblem(f"Find x and y with {system}.", "\n".join(lines), f"x = {x}, y = {y}", key)


def verify(problems: Sequence[ReasonedProblem]) -> list[bool]:
    """Whether the answer solves both equations and every one of the reasoning, and no other pair solves both."""
    return [_is_right(problem) for problem in problems]


def _is_right(problem: ReasonedProblem) -> bool:
    asked, answer = QUESTION.fullmatch(problem.question), ANSWER.fullmatch(problem.answer)
    if asked is None or answer is None:
        return False
    values = {"x": int(answer[1]), "y": int(answer[2]), "": 1}
    first, second = coefficients(asked[1]), coefficients(asked[3])
    stated = [
        (asked[1], asked[2]),
        (asked[3], asked[4]),
        *re.findall(r": ([-+xy0-9 ]+) = (-?\d+)$", problem.reasoning, re.MULTILINE),
    ]
    holds = all(
        sum(size * values[name] for name, size in coefficients(left).items()) == int(right) for left, right in stated
    )
    determinant = first.get("x", 0) * second.get("y", 0) - first.get("y", 0) * second.get("x", 0)
    return holds and determinant != 0 and len(stated) == 8
