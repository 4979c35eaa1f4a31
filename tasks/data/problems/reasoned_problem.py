"""A problem with the way to its answer; how its formulas are written and read."""

from __future__ import annotations

import re
from typing import NamedTuple


class ReasonedProblem(NamedTuple):
    question: str
    reasoning: str
    answer: str
    key: str
    """Equal for problems that differ only in words."""
    kin: str = ""
    """Equal for problems that differ only in names and order: all are trained on, or all are held out. Empty where the
    key decides."""

    @property
    def text(self) -> str:
        """The problem as documents hold it."""
        return f"Question: {self.question}\n{self.reasoning}\nAnswer: {self.answer}\n"


def formula(*terms: tuple[int, str]) -> str:
    """`3x - y + 5` of (coefficient, variable); terms of 0 are left out, and the sum of none is `0`."""
    written = ""
    for coefficient, variable in terms:
        if coefficient:
            size = str(abs(coefficient)) if abs(coefficient) != 1 or not variable else ""
            sign = ("-" if coefficient < 0 else "+") if not written else (" - " if coefficient < 0 else " + ")
            written += sign.removeprefix("+") + size + variable
    return written or "0"


def coefficients(text: str) -> dict[str, int]:
    """Coefficients of a formula by variable, with the constant under "". Raises ValueError for anything else."""
    squeezed = text.replace(" ", "")
    terms = re.findall(r"([+-]?)(\d*)([a-z](?:\^2)?)?", squeezed)
    if "".join("".join(term) for term in terms) != squeezed or not squeezed:
        raise ValueError(f"{text!r} is no sum of terms such as 3x - y + 5")
    sizes: dict[str, int] = {}
    for sign, size, variable in terms:
        if size or variable:
            sizes[variable] = sizes.get(variable, 0) + int(f"{sign}{size or 1}")
    return sizes
