"""Quadratic equations with integer solutions, factored. Checked by putting the solutions in, their number by the
discriminant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.problems.reasoned_problem import ReasonedProblem, coefficients, formula

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

QUESTION = re.compile(r"Find all x with ([-+x^0-9 ]+) = 0\.")


def draw(numbers: I64, difficulty: int) -> I64:
    """Rows of (leading coefficient, smaller, larger solution)."""
    largest = 30 * difficulty
    roots = np.sort(numbers[:, :2] % (2 * largest + 1) - largest, axis=1)
    return np.concatenate((numbers[:, 2:3] % (3 * difficulty) + 1, roots), axis=1)


def write(row: list[int]) -> ReasonedProblem:
    k, r, s = row
    equation = formula((k, "x^2"), (-k * (r + s), "x"), (k * r * s, ""))
    lines = [f"Divide both sides by {k}: {formula((1, 'x^2'), (-(r + s), 'x'), (r * s, ''))} = 0"] if k > 1 else []
    lines.append(f"Two numbers with the sum {r + s} and the product {r * s} are {r} and {s}.")
    lines.append(f"So ({formula((1, 'x'), (-r, ''))}) * ({formula((1, 'x'), (-s, ''))}) = 0.")
    answer = f"x = {r}" if r == s else f"x = {r} or x = {s}"
    return ReasonedProblem(f"Find all x with {equation} = 0.", "\n".join(lines), answer, f"quadratics {equation}")


def verify(problems: Sequence[ReasonedProblem]) -> list[bool]:
    """Whether every answer makes the left side 0, their number fits the discriminant, and the factors of the reasoning
    multiply to the left side."""
    return [_is_right(problem) for problem in problems]


def _is_right(problem: ReasonedProblem) -> bool:
    asked = QUESTION.fullmatch(problem.question)
    if asked is None or not re.fullmatch(r"x = -?\d+( or x = -?\d+)?", problem.answer):
        return False
    solutions = [int(part) for part in re.findall(r"-?\d+", problem.answer)]
    left = coefficients(asked[1])
    a, b, c = left.get("x^2", 0), left.get("x", 0), left.get("", 0)
    discriminant = b * b - 4 * a * c
    is_complete = len(set(solutions)) == len(solutions) == (2 if discriminant > 0 else 1)
    product = re.search(r"^So \((x[-+ 0-9]*)\) \* \((x[-+ 0-9]*)\) = 0\.$", problem.reasoning, re.MULTILINE)
    factors = [coefficients(part).get("", 0) for part in product.groups()] if product else []
    is_factored = len(factors) == 2 and (a * sum(factors), a * factors[0] * factors[-1]) == (b, c)
    return is_complete and discriminant >= 0 and is_factored and all(a * x * x + b * x + c == 0 for x in solutions)
