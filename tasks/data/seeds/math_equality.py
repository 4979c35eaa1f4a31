"""Whether two final answers are mathematically equal: numbers, expressions, equations, inequalities, tuples,
intervals, matrices and sets.

Expressions are equal where their values are at five points, whose coordinates are drawn by hash: exactly where they are
rational, else to 30 digits. That is a test by random points (Schwartz, 1980; Zippel, 1979), so two different answers
would have to agree in all of them to be taken for equal. It needs no simplification, whose time has no bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tasks.data.seeds.math_expressions import Read, read_expression
from tasks.data.seeds.math_values import Arithmetic, UnreadableError, Value

MAX_CHARS = 500
MAX_PARTS = 20
NUM_POINTS = 5
OTHER_SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": "*",
        "·": "*",
        "⋅": "*",
        "÷": "/",
        "π": " pi ",
        "√": "\\sqrt ",
        "∞": "\\infty ",
        "²": "^2",
        "³": "^3",
    }
)
ORDERS = {
    "<": re.compile(r"\\lt(?![a-z])"),
    ">": re.compile(r"\\gt(?![a-z])"),
    "≤": re.compile(r"<=|\\leq?(?:slant)?(?![a-z])"),
    "≥": re.compile(r">=|\\geq?(?:slant)?(?![a-z])"),
    "≠": re.compile(r"!=|\\neq?(?![a-z])"),
}
"""Signs of order, and how else they are written."""
REVERSED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}
ORDER = re.compile(f"([{''.join(ORDERS)}])")
NAME = re.compile(
    r"(?!(?:e|\\pi|\\infty)$)(?:[a-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?(?:\([a-z]\))?|\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)"
)
NAMED = re.compile(rf"({NAME.pattern})\s*(?:=|\\in(?![a-z]))([^=]*)")
"""`x=5`, `f(x)=2x`, `x\\in[1,2]` and `(x,y)=(1,2)`."""
SUCH_THAT = re.compile(rf"\{{\s*[a-z]\s*(?:[|:]|\\mid(?![a-z]))(.*{ORDER.pattern}.*)\}}")
"""`{x|x>1}`."""
MATRIX = re.compile(
    r"(?:\\begin\{[bp]matrix\}|[\[(]\s*\\begin\{array\}\s*\{[lcr\s]*\})"
    r"(.*?)(?:\\\\\s*)?(?:\\end\{[bp]matrix\}|\\end\{array\}\s*[\])])",
    re.DOTALL,
)
RELATIONS = re.compile(r"\\(?:approx|equiv|to|rightarrow)(?![a-z])")
OPENING, CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class Answer:
    kind: Literal["value", "set", "tuple", "equation"]
    """set: parts in any order, as a list or a union of intervals. equation: left side less right side."""
    brackets: str
    """Of a tuple or an interval; signs of any other inequality, and names of a matrix and its rows."""
    texts: tuple[str, ...]
    """Expressions of a value or an equation."""
    parts: tuple[Answer, ...]
    name: str
    """What it is the value of; empty where that is not said."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Of an equation, or of a value with its name; empty for anything else."""
        named = (self.name, *self.texts) if self.name and self.kind == "value" else ()
        return self.texts if self.kind == "equation" else named


def are_equal(answer: str, wanted: str) -> bool:
    """Of final answers in small letters without formatting. False where one of them cannot be read.

    A number is wanted where the wanted answer is one: an answer that leaves its sum, product or function to be
    computed, as `47+38` for 85 or `\\log_8 2` for 1/3, repeats the question."""
    if max(len(answer), len(wanted)) > MAX_CHARS:
        return False
    try:
        comparison = _Comparison()
        return comparison.agree(_read(answer), _read(wanted))
    except UnreadableError:
        return False


def _read(text: str) -> Answer:
    text = text.translate(OTHER_SIGNS).replace("**", "^").replace("\\{", "{").replace("\\}", "}").strip()
    for sign, others in ORDERS.items():
        text = others.sub(sign, text)
    if _is_enclosed(text) and (such_that := SUCH_THAT.fullmatch(text)):
        return _read(such_that[1])
    if named := NAMED.fullmatch(text):
        answer = _read_unnamed(named[2].strip())
        return Answer(answer.kind, answer.brackets, answer.texts, answer.parts, "".join(named[1].split()))
    return _read_unnamed(text)


def _read_unnamed(text: str) -> Answer:
    if RELATIONS.search(text):
        raise UnreadableError("a relation")
    if matrix := MATRIX.fullmatch(text):
        return _tuple("matrix", [_tuple("row", map(_read, row.split("&"))) for row in matrix[1].split("\\\\")])
    united = _split(text.replace("\\cup", "∪"), "∪")
    if len(united) > 1:
        return _set(united)
    is_enclosed, listed = _is_enclosed(text), _split(text[1:-1], ",;")
    if is_enclosed and text[0] == "{" and (len(listed) > 1 or "," not in text):
        return _set(listed) if len(listed) > 1 else _read_unnamed(listed[0].strip())
    if is_enclosed and len(listed) > 1:
        return _tuple(text[0] + text[-1], map(_read, listed))
    blanks, parts = _split(text, ";"), _split(text, ",")
    if len(blanks) > 1:
        return _tuple(";", map(_read, blanks))
    if len(parts) > 1:
        return _set(parts)
    if ORDER.search(text):
        return _inequality(ORDER.split(text))
    if text.count("\\pm") == 1:
        return _set([text.replace("\\pm", sign) for sign in "+-"])
    sides = text.split("=")
    if len(sides) > 2:
        raise UnreadableError("a chain of equations")
    return Answer("equation" if len(sides) == 2 else "value", "", tuple(sides), (), "")


def _tuple(brackets: str, parts: Iterable[Answer], name: str = "") -> Answer:
    return Answer("tuple", brackets, (), tuple(parts), name)


def _inequality(written: Sequence[str]) -> Answer:
    """An interval where it bounds a name, else its sides from the smallest to the largest. Of sides and signs."""
    if {">", "≥"} & {*written}:
        written = [REVERSED.get(part, part) for part in reversed(written)]
    if len(written) == 3 and "≠" not in written:
        are_names = [NAME.fullmatch(side.strip()) is not None for side in written[::2]]
        if are_names == [True, False]:
            written = ["-\\infty", "<", *written]
        elif are_names == [False, True]:
            written = [*written, "<", "\\infty"]
    sides, signs = written[::2], written[1::2]
    if len(sides) == 3 and {*signs} <= {"<", "≤"} and NAME.fullmatch(name := sides[1].strip()):
        brackets = ("[" if signs[0] == "≤" else "(") + ("]" if signs[1] == "≤" else ")")
        return _tuple(brackets, map(_read, (sides[0], sides[2])), "".join(name.split()))
    return _tuple("".join(signs), map(_read, sides))


def _set(texts: Sequence[str]) -> Answer:
    """Without the name that all of its parts have: `x=1, x=2`."""
    parts = [_read(text) for text in texts]
    if len({part.name for part in parts}) == 1:
        parts = [Answer(part.kind, part.brackets, part.texts, part.parts, "") for part in parts]
    return Answer("set", "", (), tuple(parts), "")


def _split(text: str, separators: str) -> list[str]:
    """At every separator that is in no bracket."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in OPENING) - (char in CLOSING)
        if char in separators and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if len(parts) >= MAX_PARTS:
        raise UnreadableError("too many parts")
    return [*parts, text[start:]]


def _is_enclosed(text: str) -> bool:
    """Whether the first bracket is closed by the last character; an interval's may be of two kinds."""
    if len(text) < 2 or text[0] not in OPENING or text[-1] not in CLOSING:
        return False
    depths, depth = [], 0
    for char in text:
        depth += (char in OPENING) - (char in CLOSING)
        depths.append(depth)
    return depths[-1] == 0 and all(depths[:-1])


def _is_left_undone(answer: Read, wanted: Read) -> bool:
    """Whether an answer leaves to be computed what the wanted number does not: a sum, or a function of a rational
    value."""
    if wanted.is_undone or wanted.has_calls:
        return answer.is_undone and not wanted.is_undone
    return answer.is_undone or (answer.has_calls and isinstance(wanted.value, Fraction))


class _Comparison:
    def __init__(self) -> None:
        self.arithmetic = Arithmetic()

    def agree(self, answer: Answer, wanted: Answer) -> bool:
        ours, theirs = answer.sides, wanted.sides
        if ours and theirs and ours[0] != theirs[0]:
            return self._same_solutions(ours, theirs)
        if answer.name and wanted.name and answer.name != wanted.name:
            return False
        if answer.kind != wanted.kind or answer.brackets != wanted.brackets:
            return False
        if answer.kind == "value":
            return self._same_values(answer.texts[0], wanted.texts[0])
        if answer.kind == "equation":
            return self._same_solutions(answer.texts, wanted.texts)
        if answer.kind == "tuple":
            pairs = list(zip(answer.parts, wanted.parts, strict=False))
            return len(answer.parts) == len(wanted.parts) and all(self.agree(*pair) for pair in pairs)
        return self._covers(answer, wanted) and self._covers(wanted, answer, is_reversed=True)

    def _covers(self, one: Answer, other: Answer, is_reversed: bool = False) -> bool:
        """Whether every part of one is a part of the other."""
        return all(
            any(self.agree(theirs, own) if is_reversed else self.agree(own, theirs) for theirs in other.parts)
            for own in one.parts
        )

    def _same_values(self, answer: str, wanted: str) -> bool:
        ours, theirs = self._values(answer), self._values(wanted)
        if not theirs[0].symbols and _is_left_undone(ours[0], theirs[0]):
            return False
        return all(self.arithmetic.are_equal(one.value, other.value) for one, other in zip(ours, theirs, strict=True))

    def _same_solutions(self, answer: Sequence[str], wanted: Sequence[str]) -> bool:
        """Whether the differences of both sides have the same quotient at every point. An identity has none. Without a
        symbol the sides themselves are compared."""
        if not any(self._values(side)[0].symbols for side in (*answer, *wanted)):
            return all(map(self._same_values, answer, wanted))
        ours, theirs = self._differences(answer), self._differences(wanted)
        if self._are_zero(ours) or self._are_zero(theirs):
            return False
        multiply = self.arithmetic.multiply
        crossed = [
            (multiply(one, theirs[0]), multiply(other, ours[0])) for one, other in zip(ours, theirs, strict=True)
        ]
        return all(self.arithmetic.are_equal(*pair) for pair in crossed)

    def _are_zero(self, values: Sequence[Value]) -> bool:
        return all(self.arithmetic.are_equal(value, self.arithmetic.add(value, value)) for value in values)

    def _differences(self, sides: Sequence[str]) -> list[Value]:
        left, right = (self._values(side) for side in sides)
        return [self.arithmetic.add(one.value, -other.value) for one, other in zip(left, right, strict=True)]

    def _values(self, text: str) -> list[Read]:
        first = read_expression(text, self.arithmetic, 0)
        if not first.symbols:
            return [first] * NUM_POINTS
        return [first, *(read_expression(text, self.arithmetic, point) for point in range(1, NUM_POINTS))]
