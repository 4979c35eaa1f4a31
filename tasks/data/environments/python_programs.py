"""Environment `python`: a question whose result is a number, and a tool that runs programs in the sandbox."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random

from tasks.data.environments.calculator import is_same_number
from tasks.data.environments.environment import Environment, Parameter, Tool, ToolError, ToolTimeoutError
from tasks.data.environments.task import Task
from tasks.data.sandbox.code_sandbox import run_program

KIND = "python"
TOOLS = (
    Tool(
        "python",
        "Runs a program without files and network, and shows what it prints. Each call starts afresh.",
        (Parameter("code", "string", "For example print(2**10)"),),
    ),
)
QUESTIONS: tuple[tuple[str, str, Callable[[int, int], bool]], ...] = (
    (
        "How many primes are there from {a} to {b}?",
        "all(n % d for d in range(2, int(n**0.5) + 1))",
        lambda n, c: not any(n % divisor == 0 for divisor in range(2, math.isqrt(n) + 1)),
    ),
    (
        "How many integers from {a} to {b} have the digit sum {c}?",
        "sum(map(int, str(n))) == {c}",
        lambda n, c: n // 1000 + n // 100 % 10 + n // 10 % 10 + n % 10 == c,
    ),
    (
        "How many integers from {a} to {b} are multiples of {c} and no squares?",
        "n % {c} == 0 and int(n**0.5) ** 2 != n",
        lambda n, c: n // c * c == n and math.isqrt(n) ** 2 != n,
    ),
    (
        "How many integers from {a} to {b} read the same backwards?",
        "str(n) == str(n)[::-1]",
        lambda n, c: [*str(n)] == [*reversed(str(n))],
    ),
)
"""Questions, each with the condition on n that a program has, and the same condition as we count it. Up to 9,999."""


def open_python(expected: str) -> Environment:
    """`expected` is JSON with the result as text: {"answer": "57"}."""
    result = json.loads(expected)["answer"]
    return Environment({TOOLS[0].name: (TOOLS[0], run_python)}, lambda answer: is_same_number(answer, result))


def run_python(code: str) -> str:
    """What the program prints. Raises ToolError with its error."""
    ran = run_program(code)
    if ran is None:
        raise ToolTimeoutError("the program used up its time or memory, or ended its process")
    printed, error = ran
    if error:
        raise ToolError(f"{error}\n{printed}".strip())
    return printed.strip() or "(nothing was printed)"


def make_task(draw: Random) -> Task:
    """A count over a range of integers."""
    a = draw.randint(100, 5000)
    b, c = a + draw.randint(200, 4999), draw.randint(3, 19)
    question, condition, is_counted = draw.choice(QUESTIONS)
    asked = question.format(a=a, b=b, c=c)
    result = str(sum(is_counted(n, c) for n in range(a, b + 1)))
    program = f"print(sum(1 for n in range({a}, {b + 1}) if {condition.format(c=c)}))"
    return Task(asked, json.dumps({"answer": result}), [("python", {"code": program})], result, asked)
