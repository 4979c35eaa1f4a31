"""Values of mathematical expressions: exact fractions as long as they can be, else numbers of 60 digits.

Every value and every step is bounded, so a sampled `9**9**9` costs nothing: what is larger has no value here. mpmath
computes; nothing depends on time or on what was computed before. Runs in ranks and executors.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from typing import Any

Value = Any
"""A Fraction, or mpmath's mpf or mpc."""
DIGITS = 60
MAX_BITS = 4096
"""Size of numerators, denominators and, as a power of two, of every other number."""
MAX_FACTORIAL = 300
MAX_ANGLE_BITS = 300
SAME = Fraction(1, 10**30)
"""Largest relative difference of equal values: half of the digits are left for cancellation."""
ZERO = Fraction(1, 10**45)
"""Size below which a rounded value counts as 0, as sin(pi)."""
SYMBOL_STEPS = 1009
INVERSES = {"cot": "tan", "sec": "cos", "csc": "sin"}
ARCS = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
FUNCTIONS = {
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "ln", "exp", "log", "abs", "floor", "ceil", "sqrt"),
    *INVERSES,
    *ARCS,
    *ARCS.values(),
}
"""Functions of one argument that an answer may call."""


class UnreadableError(ValueError):
    """No expression, or one whose value is undefined or out of bounds."""


def symbol_value(name: str, point: int) -> Fraction:
    """What a symbol is worth at a point: drawn by hash from -3 to 3, never 0."""
    drawn = int.from_bytes(hashlib.sha256(f"{name} {point}".encode()).digest()[:8], "big")
    sign, size = 1 - drawn % 2 * 2, drawn // 2 % (3 * SYMBOL_STEPS) + 1
    return Fraction(sign * size, SYMBOL_STEPS)


class Arithmetic:
    """Operations on values. Raises UnreadableError where a result is undefined or out of bounds."""

    def __init__(self) -> None:
        from mpmath.ctx_mp import MPContext

        self._mp = MPContext()
        self._mp.dps = DIGITS
        self.constants: dict[str, Value] = {"pi": +self._mp.pi, "e": +self._mp.e, "i": self._mp.mpc(0, 1)}

    def add(self, one: Value, other: Value) -> Value:
        return self._bounded(one + other if _are_exact(one, other) else self._rounded(one) + self._rounded(other))

    def multiply(self, one: Value, other: Value) -> Value:
        return self._bounded(one * other if _are_exact(one, other) else self._rounded(one) * self._rounded(other))

    def divide(self, one: Value, other: Value) -> Value:
        if self._is_zero(other):
            raise UnreadableError("division by zero")
        return self._bounded(one / other if _are_exact(one, other) else self._rounded(one) / self._rounded(other))

    def power(self, base: Value, exponent: Value) -> Value:
        """The principal value where there are several."""
        if self._is_zero(base):
            if not isinstance(exponent, Fraction) or exponent <= 0:
                raise UnreadableError("a power of zero")
            return Fraction(0)
        if _are_exact(base, exponent) and exponent.denominator == 1:
            if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
                raise UnreadableError("a power out of bounds")
            return base ** int(exponent)
        return self._exp(self._rounded(exponent) * self._mp.log(self._rounded(base)))

    def root(self, value: Value, degree: Value) -> Value:
        """The real root where there is one."""
        if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree <= MAX_FACTORIAL:
            raise UnreadableError("a root of another degree")
        if isinstance(value, Fraction):
            if value < 0 and degree % 2:
                return -self.root(-value, degree)
            exact = Fraction(math.isqrt(abs(value.numerator)), math.isqrt(value.denominator))
            if degree == 2 and exact * exact == value:
                return exact
        return self.power(value, 1 / degree)

    def factorial(self, value: Value) -> Value:
        if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
            raise UnreadableError("a factorial out of bounds")
        return self._bounded(Fraction(math.factorial(int(value))))

    def binomial(self, total: Value, chosen: Value) -> Value:
        parts = (self.factorial(each) for each in (total, chosen, self.add(total, -chosen)))
        whole, one, other = parts
        return whole / (one * other)

    def logarithm(self, value: Value, base: Value) -> Value:
        return self.divide(self.call("ln", value), self.call("ln", base))

    def call(self, name: str, value: Value) -> Value:
        """One of FUNCTIONS. `log` without a base is no certain one: ln times a number of its own."""
        if name in ("abs", "floor", "ceil"):
            return self._of_real(name, value)
        if name == "sqrt":
            return self.root(value, Fraction(2))
        if name in INVERSES:
            return self.divide(Fraction(1), self.call(INVERSES[name], value))
        if name == "exp":
            return self._exp(self._rounded(value))
        if name in ("ln", "log"):
            if self._is_zero(value):
                raise UnreadableError("logarithm of zero")
            natural = self._bounded(self._mp.log(self._rounded(value)))
            return self.multiply(natural, symbol_value("log", 0)) if name == "log" else natural
        given = self._rounded(value)
        is_periodic = name in ("sin", "cos", "tan")
        grows = abs(self._mp.im(given) if is_periodic else self._mp.re(given)) > MAX_FACTORIAL
        if self._mp.mag(given) > MAX_ANGLE_BITS or (grows and name not in {*ARCS, *ARCS.values()}):
            raise UnreadableError("an argument out of bounds")
        return self._bounded(getattr(self._mp, ARCS.get(name, name))(given))

    def are_equal(self, one: Value, other: Value) -> bool:
        if _are_exact(one, other):
            return one == other
        left, right = self._rounded(one), self._rounded(other)
        largest = max(abs(left), abs(right))
        return largest < self._rounded(ZERO) or abs(left - right) <= largest * self._rounded(SAME)

    def _of_real(self, name: str, value: Value) -> Value:
        if name == "abs":
            return abs(value)
        if not isinstance(value, Fraction):
            if abs(self._mp.im(value)) >= self._rounded(ZERO) or self._mp.mag(value) > DIGITS:
                raise UnreadableError("rounding of what is not real or is large")
            value = Fraction(str(self._mp.nstr(self._mp.re(value), DIGITS, strip_zeros=False)))
        return Fraction(math.floor(value) if name == "floor" else math.ceil(value))

    def _exp(self, value: Value) -> Value:
        if abs(self._mp.re(value)) > MAX_BITS or abs(self._mp.im(value)) > MAX_BITS:
            raise UnreadableError("a power out of bounds")
        return self._bounded(self._mp.exp(value))

    def _is_zero(self, value: Value) -> bool:
        return not value if isinstance(value, Fraction) else abs(value) < self._rounded(ZERO)

    def _rounded(self, value: Value) -> Value:
        return self._mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def _bounded(self, value: Value) -> Value:
        if isinstance(value, Fraction):
            is_fit = max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS
        else:
            is_fit = self._mp.isfinite(value) and (not value or abs(self._mp.mag(value)) <= MAX_BITS)
        if not is_fit:
            raise UnreadableError("a value out of bounds")
        return value


def _are_exact(*values: Value) -> bool:
    return all(isinstance(value, Fraction) for value in values)
