"""Environment `calculator`: a question whose result is a number, and a tool that computes."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from random import Random

from tasks.data.environments.environment import Environment, Parameter, Tool, ToolError
from tasks.data.environments.task import Task

KIND = "calculator"
MAX_EXPRESSION_CHARS = 200
"""Bounds the time and the size of a result: no operator grows faster than multiplication."""
MAX_NUMBER_CHARS = 400
NUMBER = re.compile(r"[-+]?(?:\d+/\d+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?)")
"""An integer, a fraction or a decimal with an exponent up to 999: `1e1000000000` would fill the memory."""
TOOLS = (
    Tool(
        "calculator",
        "Computes an expression of numbers with + - * / and brackets.",
        (Parameter("expression", "string", "For example (12 + 7) * 3"),),
    ),
)
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
FORMS = ("{a} * {b} + {c}", "({a} + {b}) * {c}", "{a} * {b} - {c}", "({a} - {b}) * {c}")


def open_calculator(expected: str) -> Environment:
    """`expected` is JSON with the result as text: {"answer": "57"}."""
    result = json.loads(expected)["answer"]
    return Environment({TOOLS[0].name: (TOOLS[0], calculate)}, lambda answer: is_same_number(answer, result))


def is_same_number(answer: str, expected: str) -> bool:
    """Whether the answer is a number and nothing else, and is the expected one."""
    said, wanted = _number(answer.strip().removesuffix(".")), _number(expected.strip())
    return said is not None and said == wanted


def _number(text: str) -> Fraction | None:
    if len(text) > MAX_NUMBER_CHARS or not NUMBER.fullmatch(text):
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def calculate(expression: str) -> str:
    """The value, as an integer or with up to 10 decimals. Raises ToolError."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"the expression has more than {MAX_EXPRESSION_CHARS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("this is no expression of numbers with + - * / and brackets") from None
    try:
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.10f}".rstrip("0").rstrip(".")
    except (ValueError, OverflowError):  # an integer beyond Python's 4,300 digits, a fraction beyond a float's range
        raise ToolError("the result is too large to be written") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(node)


def make_task(draw: Random) -> Task:
    """A calculation of three numbers, too large for the head."""
    a, b, c = draw.randint(120, 999), draw.randint(12, 99), draw.randint(12, 99)
    expression = draw.choice(FORMS).format(a=a, b=b, c=c)
    result = calculate(expression)
    expected = json.dumps({"answer": result})
    return Task(f"What is {expression}?", expected, [("calculator", {"expression": expression})], result, expression)
