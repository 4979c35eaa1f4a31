"""Small functions over lists of integers, with unit tests.

The expected values are computed step by step. The written function is run against them in a process of its own
(code_sandbox).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tasks.data.problems.reasoned_problem import ReasonedProblem
from tasks.data.sandbox.code_sandbox import run_trusted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]


class Stage(NamedTuple):
    """One operation on a list: in words, as a line of code, and as a function that computes the tests' values. {k} is a
    number from 2 to 9."""

    words: str
    line: str
    apply: Callable[[list[int], int], Any]


STAGES = (
    Stage(
        "keep the numbers greater than {k}",
        "numbers = [number for number in numbers if number > {k}]",
        lambda v, k: list(filter(k.__lt__, v)),
    ),
    Stage(
        "keep the numbers less than {k}",
        "numbers = [number for number in numbers if number < {k}]",
        lambda v, k: list(filter(k.__gt__, v)),
    ),
    Stage(
        "keep the multiples of {k}",
        "numbers = [number for number in numbers if number % {k} == 0]",
        lambda v, k: [n for n in v if not abs(n) % k],
    ),
    Stage(
        "drop the multiples of {k}",
        "numbers = [number for number in numbers if number % {k} != 0]",
        lambda v, k: [n for n in v if abs(n) % k],
    ),
    Stage(
        "add {k} to each number", "numbers = [number + {k} for number in numbers]", lambda v, k: list(map(k.__add__, v))
    ),
    Stage(
        "multiply each number by {k}",
        "numbers = [number * {k} for number in numbers]",
        lambda v, k: list(map(k.__mul__, v)),
    ),
    Stage(
        "replace each number by its absolute value",
        "numbers = [abs(number) for number in numbers]",
        lambda v, k: [max(n, -n) for n in v],
    ),
    Stage("reverse the order", "numbers = numbers[::-1]", lambda v, k: list(reversed(v))),
    Stage("sort in ascending order", "numbers = sorted(numbers)", lambda v, k: np.sort(v).tolist()),
    Stage(
        "take every number once, where it first occurs",
        "numbers = list(dict.fromkeys(numbers))",
        lambda v, k: [n for index, n in enumerate(v) if n not in v[:index]],
    ),
    Stage(
        "take the first {k} numbers",
        "numbers = numbers[:{k}]",
        lambda v, k: [n for _, n in zip(range(k), v, strict=False)],
    ),
)
RESULTS = (
    Stage("return the list", "return numbers", lambda v, k: v),
    Stage("return the sum", "return sum(numbers)", lambda v, k: int(np.sum(v, dtype=np.int64))),
    Stage("return how many are left", "return len(numbers)", lambda v, k: int(np.size(v))),
    Stage(
        "return the largest number, or {k} if there is none",
        "return max(numbers, default={k})",
        lambda v, k: int(np.sort(v)[-1]) if v else k,
    ),
)
INPUTS = ([3, -4, 12, 7, 7, 0, 18], [5, 9, 2, 9, -6, 15, 4, 10], [], [24, 6, 6, -9, 1, 8])
QUESTION = re.compile(
    r"Write a Python function `transform\(numbers\)` for a list of integers: .*\n(assert .+)$", re.DOTALL
)
MAX_STAGES = 6


def draw(numbers: I64, difficulty: int) -> I64:
    """Rows of (stages, result, then per stage: its index in STAGES and its number)."""
    count = np.full((len(numbers), 1), difficulty + 1)
    result = numbers[:, :2] % (len(RESULTS), 8)
    stages = numbers[:, 2 : 2 + MAX_STAGES] % len(STAGES)
    sizes = numbers[:, 8 : 8 + MAX_STAGES] % 8
    rows = np.concatenate((count, result, stages, sizes + 2), axis=1)
    return rows[(np.diff(stages[:, : difficulty + 1], axis=1) != 0).all(axis=1)]


def write(row: list[int]) -> ReasonedProblem:
    """Write a problem; its tests use the lists of INPUTS, including the empty one."""
    count, result, default = row[:3]
    chosen = [
        (STAGES[index], size)
        for index, size in zip(row[3 : 3 + count], row[3 + MAX_STAGES : 3 + MAX_STAGES + count], strict=True)
    ]
    chosen.append((RESULTS[result], default))
    words = [stage.words.format(k=size) for stage, size in chosen]
    body = "".join(f"    {stage.line.format(k=size)}\n" for stage, size in chosen)
    tests = "\n".join(f"assert transform({given!r}) == {_expected(given, chosen)!r}" for given in INPUTS)
    task = f"{', then '.join(words[:-1])}; {words[-1]}"
    question = (
        f"Write a Python function `transform(numbers)` for a list of integers: {task}. It passes these tests:\n{tests}"
    )
    steps = "\n".join(
        f"{number}. To {text}: `{line.strip()}`"
        for number, (text, line) in enumerate(zip(words, body.splitlines(), strict=True), 1)
    )
    return ReasonedProblem(question, steps, f"```python\ndef transform(numbers):\n{body}```", f"code {task}")


def _expected(given: list[int], chosen: list[tuple[Stage, int]]) -> Any:
    values: Any = list(given)
    for stage, size in chosen:
        values = stage.apply(values, size)
    return values


def verify(problems: Sequence[ReasonedProblem]) -> list[bool]:
    """Whether the function of the answer passes the tests of the question."""
    return run_trusted([program(problem.question, problem.answer) for problem in problems])


def program(question: str, answer: str) -> str:
    """The program that is run: the code of the answer, then the tests of the question; it fails where either is
    missing."""
    tests, code = QUESTION.fullmatch(question), re.search(r"```(?:python)?\n(.*?)```", answer, re.DOTALL)
    return f"{code[1]}\n{tests[1]}\n" if tests and code else "raise ValueError"
