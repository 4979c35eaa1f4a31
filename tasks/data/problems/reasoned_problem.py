"""A problem with the way to its answer; how its formulas are written and read."""

from __future__ import annotations

import re
from typing import NamedTuple


class ReasonedProblem(NamedTuple):
    question: str
    reasoning: str
    answer: str
    key: str
    """Equal for problems that differ in words alone."""
    kin: str = ""
    """Equal for problems that are one but for names and order, which are many: trained on or held out together. Empty:
    the key is."""

    @property
    def text(self) -> str:
        """As documents hold it."""
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
    """What stands before each variable, and the number without one under "": a formula read back. Raises ValueError for
    anything else."""
    squeezed = text.replace(" ", "")
    terms = re.findall(r"([+-]?)(\d*)([a-z](?:\^2)?)?", squeezed)
    if "".join("".join(term) for term in terms) != squeezed or not squeezed:
        raise ValueError(f"{text!r} is no sum of terms such as 3x - y + 5")
    found: dict[str, int] = {}
    for sign, size, variable in terms:
        if size or variable:
            found[variable] = found.get(variable, 0) + int(f"{sign}{size or 1}")
    return found
