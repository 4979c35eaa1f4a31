"""Reads a seed problem as a program: question, solution and answer become functions of quantities.

The solution of such a problem annotates its calculations.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tasks.data.seeds.math_answers import ANNOTATION, APPLY
from tasks.data.seeds.seed_numbers import (
    CENTS,
    NUMBER,
    ORDINAL,
    PERCENT,
    TOO_LONG,
    Style,
    Written,
    constants_of,
    must_stay,
    words_of,
    write_number,
    written_numbers,
)

if TYPE_CHECKING:
    from tasks.data.seeds.seed_problems import Seed

Tree: TypeAlias = "int | Fraction | tuple[type[ast.operator], Tree, Tree]"
"""A number, the index of a source, or an operation on two trees."""
RESULT = re.compile(rf"\s*\$?\s*(?:{NUMBER.pattern})\s*%?\s*")


class NoProgramError(ValueError):
    """A seed cannot be varied, for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Slot(NamedTuple):
    """A number in a text: the index of its source, and its style."""

    source: int
    style: Style


@dataclass
class Source:
    """The origin of a number: given (no tree), or calculated from earlier ones."""

    value: Fraction
    tree: Tree | None
    num_decimals: int = 0
    """Largest number of decimals with which it is written."""
    limit: Fraction | None = None
    """Largest value of a given number (hours of a day, percent); None for no limit."""


@dataclass
class Program:
    sources: list[Source] = field(default_factory=list)
    question: list[str | Slot] = field(default_factory=list)
    solution: list[str | Slot] = field(default_factory=list)
    answer: list[str | Slot] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    """Indices of the sources that may have other values."""
    ordered: list[int] = field(default_factory=list)
    """Indices of the used sources, by value: variations keep their order."""

    def values(self, given: Mapping[int, Fraction]) -> list[Fraction]:
        """The values of all sources, where `given` replaces values by index. Raises ZeroDivisionError."""
        values: list[Fraction] = []
        for index, source in enumerate(self.sources):
            values.append(given.get(index, source.value) if source.tree is None else _value(source.tree, values))
        return values

    @property
    def shape(self) -> object:
        """The parts that do not depend on the numbers: equal for a problem and its variations."""
        parts = (self.question, self.solution, self.answer)
        texts = [[piece if isinstance(piece, str) else piece.source for piece in part] for part in parts]
        return texts, [source.tree for source in self.sources if source.tree is not None], self.free


def write(part: Sequence[str | Slot], values: Sequence[Fraction]) -> str:
    return "".join(
        piece if isinstance(piece, str) else write_number(values[piece.source], piece.style) for piece in part
    )


def _value(tree: Tree, values: Sequence[Fraction]) -> Fraction:
    if isinstance(tree, tuple):
        return APPLY[tree[0]](_value(tree[1], values), _value(tree[2], values))
    return values[tree] if isinstance(tree, int) else tree


def read_program(seed: Seed) -> Program:
    """The program of a seed. Raises NoProgramError where a number's origin is unknown, nothing may be varied, or the
    program does not reproduce the seed."""
    if not ANNOTATION.search(seed.solution):
        raise NoProgramError("no_calculation")
    if any(TOO_LONG.search(text) for text in (seed.question, seed.solution, seed.answer)):
        raise NoProgramError("too_long_number")
    reader = _Reader(seed)
    reader.read_question()
    reader.read_solution()
    reader.read_answer()
    program = reader.finished()
    values = [source.value for source in program.sources]
    same = (write(program.question, values), write(program.solution, values), write(program.answer, values))
    if same != (seed.question, seed.solution, seed.answer) or program.values({}) != values:
        raise NoProgramError("not_reproduced")
    return program


class _Reader:
    def __init__(self, seed: Seed) -> None:
        self.seed = seed
        self.program = Program()
        self.by_value: dict[Fraction, list[int]] = {}
        self.by_tree: dict[Tree, int] = {}
        self.fixed: set[int] = set()
        self.used: set[int] = set()
        """Sources that calculations and the answer use."""
        self.possible: set[int] = set()
        """The same sources, and all others with the same values."""
        self.asked: list[int] = []
        """Sources of the question's quantities, all of which must be used."""

    def add(self, value: Fraction, tree: Tree | None, decimals: int = 0) -> int:
        self.program.sources.append(Source(value, tree, decimals))
        index = len(self.program.sources) - 1
        self.by_value.setdefault(value, []).append(index)
        return index

    def read_question(self) -> None:
        question = self.seed.question
        end = 0
        constants = constants_of(question) | {
            number.value for number in written_numbers(question) if must_stay(question, number)
        }
        for value in sorted(constants):
            self.add(value, None)
        for number in written_numbers(question):
            if must_stay(question, number):
                continue
            index = self.add(number.value, None, number.num_decimals)
            self.asked.append(index)
            self.program.question += [question[end : number.start], Slot(index, number.style)]
            end = number.end
            self._derive(index, question[number.end :])
        self.program.question.append(question[end:])

    def _derive(self, index: int, after: str) -> None:
        """Add other forms of a quantity: .2, 1.2, 0.8, 80 and 120 for 20 %, and dollars for cents."""
        value, share = self.program.sources[index].value, (ast.Div, index, Fraction(100))
        if PERCENT.match(after):
            self.program.sources[index].limit = Fraction(100) if value <= 100 else None
            trees: list[Tree] = [
                share,
                (ast.Add, Fraction(1), share),
                (ast.Sub, Fraction(1), share),
                (ast.Add, Fraction(100), index),
                (ast.Sub, Fraction(100), index),
            ]
        elif CENTS.match(after):
            trees = [share]
        else:
            return
        values = [source.value for source in self.program.sources]
        for tree in trees:
            self.by_tree[tree] = self.add(_value(tree, values), tree)

    def read_solution(self) -> None:
        text, end = self.seed.solution, 0
        if re.search("<<|>>", ANNOTATION.sub("", text)):
            raise NoProgramError("unreadable_calculation")
        calculated: dict[int, int] = {}
        spans = []
        for match in ANNOTATION.finditer(text):
            index, slots = self._calculation(match)
            calculated[match.end()] = index
            spans.append((match.start(), match.end(), slots))
        pieces: list[str | Slot] = []
        for start, stop, slots in [*spans, (len(text), len(text), [])]:
            pieces += self._bound(text[end:start], calculated.get(end))
            pieces += slots
            end = stop
        self.program.solution = pieces

    def _calculation(self, match: re.Match[str]) -> tuple[int, list[str | Slot]]:
        """The source of an annotation's result, and the annotation's text."""
        pieces: list[str | Slot] = ["<<"]
        end, names = 0, ""
        leaves: list[int] = []
        for number in written_numbers(match[1]):
            indices = self.by_value.get(number.value, ())
            leaves.append(self._bind(number, indices))
            self.used.add(leaves[-1])
            self.possible.update(indices)
            pieces += [match[1][end : number.start], Slot(leaves[-1], number.style)]
            names += f"{match[1][end : number.start]}n{len(leaves) - 1}"
            end = number.end
        pieces.append(match[1][end:])
        tree = _tree(names + match[1][end:], leaves)
        if not RESULT.fullmatch(match[2]):
            raise NoProgramError("unreadable_calculation")
        (number,) = written_numbers(match[2])
        value = _checked(tree, self.program)
        if value != number.value:
            raise NoProgramError("rounded_result")
        index = tree if isinstance(tree, int) else self.by_tree.get(tree)
        if index is None:
            index = self.by_tree[tree] = self.add(value, tree)
        self._note(index, number)
        pieces += ["=", match[2][: number.start], Slot(index, number.style), match[2][number.end :], ">>"]
        return index, pieces

    def _bound(self, text: str, calculated: int | None) -> list[str | Slot]:
        """A part of the solution's text; a number at its beginning repeats the calculation before it."""
        pieces: list[str | Slot] = []
        end = 0
        for number in written_numbers(text):
            if ORDINAL.match(text, number.start):
                continue
            indices = self.by_value.get(number.value, ())
            if calculated is not None and calculated in indices and not text[: number.start].strip(" $="):
                indices = [calculated]
            pieces += [text[end : number.start], Slot(self._bind(number, indices), number.style)]
            end = number.end
        return [*pieces, text[end:]]

    def _bind(self, number: Written, indices: Sequence[int]) -> int:
        """The source of a number; where there are several possible sources, none of them is varied."""
        if not indices:
            raise NoProgramError("unexplained_number")
        if len(indices) > 1:
            self.fixed.update(indices)
        self._note(indices[-1], number)
        return indices[-1]

    def _note(self, index: int, number: Written) -> None:
        source = self.program.sources[index]
        source.num_decimals = max(source.num_decimals, number.num_decimals)

    def read_answer(self) -> None:
        numbers = written_numbers(self.seed.answer)
        indices = [index for number in numbers for index in self.by_value.get(number.value, ())]
        calculated = [index for index in indices if self.program.sources[index].tree is not None]
        if len(numbers) != 1 or not calculated:
            raise NoProgramError("answer_not_calculated")
        number = numbers[0]
        index = self._bind(number, calculated)
        self.used.add(index)
        self.program.answer = [
            self.seed.answer[: number.start],
            Slot(index, number.style),
            self.seed.answer[number.end :],
        ]

    def finished(self) -> Program:
        """The program with its free sources: not those that are ambiguous, also stated in words, or dependent on other
        quantities."""
        program = self.program
        support = _supports(program)
        if set(self.asked) - {given for index in self.possible for given in support[index]}:
            raise NoProgramError("unused_number")
        values = [source.value for source in program.sources]
        stated_in_words = words_of(self.seed.solution) | words_of(self.seed.question)
        self.fixed |= {index for index, value in enumerate(values) if value in stated_in_words}
        self.fixed |= _dependent(self.asked, values)
        fixed = {given for index in self.fixed for given in support[index]}
        answer = next(piece.source for piece in program.answer if isinstance(piece, Slot))
        program.free = [index for index in self.asked if index in support[answer] - fixed]
        if not program.free:
            raise NoProgramError("nothing_to_vary")
        program.ordered = sorted({*self.used, *self.asked}, key=lambda index: values[index])
        return program


def _tree(text: str, leaves: Sequence[int]) -> Tree:
    """An annotated calculation over n0, n1 ... as a tree."""
    plain = re.sub(r"(n\d+)%", r"(\1/100)", text.replace("$", "").replace(",", "").strip())
    plain = re.sub(r"\s*[x×]\s*", "*", plain)
    try:
        return _read_tree(ast.parse(plain, mode="eval").body, leaves)
    except (SyntaxError, TypeError) as error:
        raise NoProgramError("unreadable_calculation") from error


def _read_tree(node: ast.expr, leaves: Sequence[int]) -> Tree:
    if isinstance(node, ast.BinOp) and type(node.op) in APPLY:
        return type(node.op), _read_tree(node.left, leaves), _read_tree(node.right, leaves)
    if isinstance(node, ast.Name) and re.fullmatch(r"n\d+", node.id):
        return leaves[int(node.id[1:])]
    if isinstance(node, ast.Constant) and node.value == 100:
        return Fraction(100)
    raise TypeError(ast.dump(node))


def _checked(tree: Tree, program: Program) -> Fraction:
    try:
        return _value(tree, [source.value for source in program.sources])
    except ZeroDivisionError as error:
        raise NoProgramError("unreadable_calculation") from error


def _dependent(asked: Sequence[int], values: Sequence[Fraction]) -> set[int]:
    """Quantities of which two give a third by a sum or a product: the question may state one fact twice."""
    dependent: set[int] = set()
    for one in asked:
        for other in asked:
            if one < other:
                made = {values[one] + values[other], values[one] * values[other]}
                for third in asked:
                    if third not in (one, other) and values[third] in made:
                        dependent |= {one, other, third}
    return dependent


def _supports(program: Program) -> list[set[int]]:
    """The given numbers on which each source depends."""
    supports: list[set[int]] = []
    for index, source in enumerate(program.sources):
        supports.append(
            {index} if source.tree is None else {given for leaf in _leaves(source.tree) for given in supports[leaf]}
        )
    return supports


def _leaves(tree: Tree) -> list[int]:
    if isinstance(tree, tuple):
        return _leaves(tree[1]) + _leaves(tree[2])
    return [tree] if isinstance(tree, int) else []
