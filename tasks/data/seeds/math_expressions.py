"""Reads an expression as mathematicians write it, in LaTeX or plainly, and computes its value. Nothing is evaluated but
the operations of math_values: a text that has anything else is unreadable.

`2x`, `2\\pi` and `xy` are products, `1/2x` is (1/2)x, and three letters in a row that are no function are a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from tasks.data.seeds.math_values import FUNCTIONS, Arithmetic, UnreadableError, Value, symbol_value

MAX_TOKENS = 200
MAX_DEPTH = 40
MAX_LETTERS = 2
"""Letters in a row that are a product: three are a word."""
TOKEN = re.compile(r"(?:\d+(?:\.\d+)?|\.\d+)(?:e[+-]?\d{1,3}(?![\d.]))?|\\[a-z]+|[a-z]+|[-+*/^!()\[\]{}|_]|(\S)")
NUMBER = re.compile(r"[\d.]")
UPRIGHT = re.compile(r"\\(?:operatorname|mathrm)\{([a-z]+)\}")
WRITTEN_OTHERWISE = {
    "\\cdot": "*",
    "\\times": "*",
    "\\ast": "*",
    "\\div": "/",
    "\\lvert": "|",
    "\\rvert": "|",
    "\\vert": "|",
    "\\mid": "|",
}
GREEK = {
    *("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa"),
    *("lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "infty"),
}
"""Commands that are symbols."""
NAMES = sorted({*FUNCTIONS, "pi"}, key=lambda name: -len(name))
PAIRS = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
ROUNDINGS = {"\\lfloor": "floor", "\\lceil": "ceil", "|": "abs"}


class Read(NamedTuple):
    value: Value
    symbols: frozenset[str]
    is_undone: bool
    """Whether it leaves a sum or a product of two rational numbers to be computed, as `47+38`; a power such as 3*10^5
    or a fraction is no such product."""
    has_calls: bool
    """Whether it leaves a function, a root, a binomial or a rounding to be computed, as `\\log_8 2`."""


def read_expression(text: str, arithmetic: Arithmetic, point: int) -> Read:
    """Of text in small letters. Raises UnreadableError."""
    reader = _Reader(_tokens(text), arithmetic, point)
    value = reader.sum()
    if reader.next is not None:
        raise UnreadableError(f"{reader.next} is unexpected")
    return Read(value, frozenset(reader.symbols), reader.is_undone, reader.has_calls)


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    for match in TOKEN.finditer(UPRIGHT.sub(r" \1 ", text)):
        if match[1] is not None:
            raise UnreadableError(f"{match[1]} is no part of an expression")
        tokens += _letters(match[0]) if match[0].isalpha() else [WRITTEN_OTHERWISE.get(match[0], match[0])]
    if not tokens or len(tokens) > MAX_TOKENS:
        raise UnreadableError("no expression, or a long one")
    return tokens


def _letters(word: str) -> list[str]:
    """A run of letters as functions, pi and single letters."""
    parts, num_letters = [], 0
    while word:
        name = next((name for name in NAMES if word.startswith(name)), word[0])
        num_letters += len(name) == 1
        parts.append(name if len(name) == 1 else f"\\{name}")
        word = word[len(name) :]
    if num_letters > MAX_LETTERS:
        raise UnreadableError("a word")
    return parts


class _Reader:
    """Recursive descent over the tokens, which computes as it reads."""

    def __init__(self, tokens: Sequence[str], arithmetic: Arithmetic, point: int) -> None:
        self.tokens, self.arithmetic, self.point = tokens, arithmetic, point
        self.at = self.depth = self.num_bars = 0
        self.symbols: set[str] = set()
        self.is_undone = self.has_calls = False

    @property
    def next(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, *wanted: str) -> str:
        token = self.next
        if token is None or (wanted and token not in wanted):
            raise UnreadableError(f"{token} in place of {wanted}")
        self.at += 1
        return token

    def sum(self) -> Value:
        value = self.product()
        while self.next in ("+", "-"):
            sign = self.take()
            term = self.product()
            self._leaves_undone(value, term)
            value = self.arithmetic.add(value, -term if sign == "-" else term)
        return value

    def product(self) -> Value:
        value, was_power = self.signed()
        while self.next in ("*", "/") or self._begins_factor():
            operation = self.take() if self.next in ("*", "/") else "*"
            factor, is_power = self.signed()
            if operation == "/":
                value = self.arithmetic.divide(value, factor)
                continue
            if not (was_power or is_power):
                self._leaves_undone(value, factor)
            value, was_power = self.arithmetic.multiply(value, factor), was_power or is_power
        return value

    def _leaves_undone(self, one: Value, other: Value) -> None:
        self.is_undone |= isinstance(one, Fraction) and isinstance(other, Fraction)

    def _begins_factor(self) -> bool:
        """Whether a factor follows without a sign. Two numbers side by side are none."""
        token = self.next
        if token is None or token in "+-*/^!)]}_" or token in ("\\rfloor", "\\rceil"):
            return False
        if token == "|" and self.num_bars:
            return False
        if NUMBER.match(token) and NUMBER.match(self.tokens[self.at - 1]):
            raise UnreadableError("two numbers side by side")
        return True

    def signed(self) -> tuple[Value, bool]:
        """(value, whether it is a power or a factorial)"""
        sign = 1
        while self.next in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        value, is_power = self.power()
        return sign * value, is_power

    def power(self) -> tuple[Value, bool]:
        start = self.at
        value = self.deeper(self.atom)
        while self.next == "!":
            self.take()
            value = self.arithmetic.factorial(value)
        if self.next == "^":
            self.take()
            exponent, _ = self.deeper(self.signed)
            value = self.arithmetic.power(value, exponent)
        return value, self.at - start > 1 and self.tokens[start] not in ("(", "{", "[")

    def deeper(self, read: Callable[[], Value]) -> Value:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        value = read()
        self.depth -= 1
        return value

    def atom(self) -> Value:
        token = self.take()
        if NUMBER.match(token):
            return Fraction(token)
        if token in PAIRS:
            return self.bracket(token)
        name = token.removeprefix("\\")
        if token in ("\\frac", "\\binom"):
            one, other = self.argument(), self.argument()
            self.has_calls |= name == "binom"
            return self.arithmetic.divide(one, other) if name == "frac" else self.arithmetic.binomial(one, other)
        if name in FUNCTIONS and len(name) > 1:
            return self.function(name)
        if name in self.arithmetic.constants and self.next != "_":
            return self.arithmetic.constants[name]
        if name in GREEK or re.fullmatch("[a-z]", token):
            return self.symbol(name)
        raise UnreadableError(f"{token} is unknown")

    def bracket(self, opening: str) -> Value:
        outer, self.num_bars = self.num_bars, int(opening == "|")
        value = self.sum()
        self.take(PAIRS[opening])
        self.num_bars = outer
        self.has_calls |= opening in ROUNDINGS
        return self.arithmetic.call(ROUNDINGS[opening], value) if opening in ROUNDINGS else value

    def argument(self) -> Value:
        """What follows \\frac: a group, or one digit of a number, as in \\frac12."""
        token = self.next
        if token is None or not token.isdecimal() or len(token) == 1:
            return self.deeper(self.atom)
        self.tokens = [*self.tokens[: self.at], token[0], token[1:], *self.tokens[self.at + 1 :]]
        return Fraction(self.take())

    def function(self, name: str) -> Value:
        """With a power of the function (`\\sin^2 x`), a degree of the root or a base of the logarithm before its
        argument, which has brackets or goes on to the next sign or function."""
        self.has_calls = True
        degree = base = exponent = None
        if name == "sqrt" and self.next == "[":
            degree = self.deeper(self.atom)
        if name == "log" and self.next == "_":
            self.take()
            base = self.deeper(self.atom)
        if self.next == "^":
            self.take()
            exponent, _ = self.deeper(self.signed)
            if not isinstance(exponent, Fraction) or exponent < 0:
                raise UnreadableError("an inverse or a reciprocal")
        is_bracketed = name == "sqrt" or self.next in ("(", "{", "[", "|")
        given = self.deeper(self.atom if is_bracketed else self.factors)
        if degree is not None:
            value = self.arithmetic.root(given, degree)
        else:
            value = self.arithmetic.call(name, given) if base is None else self.arithmetic.logarithm(given, base)
        return value if exponent is None else self.arithmetic.power(value, exponent)

    def factors(self) -> Value:
        value, _ = self.signed()
        while self._begins_factor() and (self.next or "").removeprefix("\\") not in FUNCTIONS:
            value = self.arithmetic.multiply(value, self.power()[0])
        return value

    def symbol(self, name: str) -> Value:
        if self.next == "_":
            self.take()
            start = self.at
            closing = PAIRS.get(self.take(), "")
            while closing and self.take() != closing:
                pass
            name += "_" + "".join(self.tokens[start : self.at]).strip("{}")
        self.symbols.add(name)
        return symbol_value(name, self.point)
