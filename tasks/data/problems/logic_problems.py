"""Knights, who tell the truth, and knaves, who lie: puzzles with exactly one solution. Read back from the text, checked
by enumeration."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.problems.reasoned_problem import ReasonedProblem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kofi", "Lena")
CLAIMS = (
    "{0} is a knight",
    "{0} is a knave",
    "{0} and {1} are of the same kind",
    "{0} and {1} are of different kinds",
    "{0} and {1} are both knights",
    "at least one of {0} and {1} is a knave",
)
TRUTHS: tuple[Callable[..., bool], ...] = (
    lambda b, c: b,
    lambda b, c: not b,
    lambda b, c: b == c,
    lambda b, c: b != c,
    lambda b, c: b and c,
    lambda b, c: not (b and c),
)
RULES = "Everyone here is a knight, whose every sentence is true, or a knave, whose every sentence is false."
SAID = re.compile(r'(\w+) says: "([^"]+)"\.')
MAX_PEOPLE = 6
SIMPLE_CLAIMS = 4
"""Number of CLAIMS that are used at difficulty 1."""


def draw(numbers: I64, difficulty: int) -> I64:
    """Rows of (people, first name, then per person: claim, two others whom it speaks of) of puzzles with one solution.

    3 people at difficulties 1, with the simple claims, and 2; then 4, 5 and 6."""
    count = min(2 + (difficulty + 1) // 2 + difficulty // 4, MAX_PEOPLE)
    speakers = np.arange(count)
    claims = numbers[:, :count] % (SIMPLE_CLAIMS if difficulty == 1 else len(CLAIMS))
    one = (speakers + 1 + numbers[:, 6 : 6 + count] % (count - 1)) % count
    other = (one + 1 + numbers[:, 12 : 12 + count] % (count - 1)) % count
    kinds = np.arange(1 << count)[:, None] >> speakers & 1 == 1
    b, c = kinds.T[one], kinds.T[other]
    is_true = np.select(
        [(claims == number)[:, :, None] for number in range(6)], [b, ~b, b == c, b != c, b & c, ~(b & c)]
    )
    num_solutions = (is_true == kinds.T[None]).all(axis=1).sum(axis=1)
    rows = np.concatenate(
        (np.full((len(numbers), 1), count), numbers[:, 18:19] % len(NAMES), claims, one, other), axis=1
    )
    return rows[num_solutions == 1]


def write(row: list[int]) -> ReasonedProblem:
    count, shift = row[:2]
    names = [NAMES[(shift + number) % len(NAMES)] for number in range(count)]
    said = list(zip(row[2 : 2 + count], row[2 + count : 2 + 2 * count], row[2 + 2 * count :], strict=True))
    texts = [CLAIMS[claim].format(names[one], names[other]) for claim, one, other in said]
    lines: list[str] = []
    solution = _search([], said, names, texts, lines)[0]
    statements = " ".join(f'{name} says: "{text}".' for name, text in zip(names, texts, strict=True))
    answer = ", ".join(f"{name}: {_kind(is_knight)}" for name, is_knight in zip(names, solution, strict=True))
    spoken_of = [(one,) if claim < 2 else (min(one, other), max(one, other)) for claim, one, other in said]
    key = " ".join(
        f"{claim} {' '.join(map(str, people))};" for (claim, *_), people in zip(said, spoken_of, strict=True)
    )
    kin = _kin([claim for claim, *_ in said], spoken_of)
    return ReasonedProblem(
        f"{RULES} {statements} Who is what?", "\n".join(lines), answer, f"logic {key}", f"logic {kin}"
    )


def _kin(claims: list[int], spoken_of: list[tuple[int, ...]]) -> str:
    """A key that is equal for every order of the people: who claims what of whom, three steps deep, with claims instead
    of positions."""
    colours = list(map(str, claims))
    for _ in range(3):
        about = [",".join(sorted(colours[other] for other in people)) for people in spoken_of]
        by = [
            ",".join(sorted(colours[at] for at, people in enumerate(spoken_of) if own in people))
            for own in range(len(claims))
        ]
        described = (
            f"{colour} of {others} by {speakers}" for colour, others, speakers in zip(colours, about, by, strict=True)
        )
        colours = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in described]
    return " ".join(sorted(colours))


def _search(
    known: list[bool], said: list[tuple[int, int, int]], names: list[str], texts: list[str], lines: list[str]
) -> list[list[bool]]:
    """All solutions that begin with the `known` kinds; appends attempts and reasons of failure to `lines`."""
    for speaker, (claim, one, other) in enumerate(said[: len(known)]):
        needed = max(one, other) if claim > 1 else one
        if needed < len(known) and TRUTHS[claim](known[one], known[other % len(known)]) != known[speaker]:
            lines[-1] += (
                f' But then "{texts[speaker]}" is {"false" if known[speaker] else "true"}, and {names[speaker]} says '
                f"it: impossible."
            )
            return []
    if len(known) == len(said):
        lines[-1] += " This fits every sentence."
        return [known]
    solutions = []
    for is_knight in (True, False):
        lines.append(f"{'  ' * len(known)}Suppose {names[len(known)]} is a {_kind(is_knight)}.")
        solutions += _search([*known, is_knight], said, names, texts, lines)
    return solutions


def _kind(is_knight: bool) -> str:
    return "knight" if is_knight else "knave"


def verify(problems: Sequence[ReasonedProblem]) -> list[bool]:
    """Whether exactly one assignment of kinds makes knights' sentences true and knaves' false, and it is the answer."""
    return [_is_right(problem) for problem in problems]


def _is_right(problem: ReasonedProblem) -> bool:
    said = [(name, *_claim(text)) for name, text in SAID.findall(problem.question)]
    names = [name for name, *_ in said]
    kinds = (dict(zip(names, kinds, strict=True)) for kinds in itertools.product((True, False), repeat=len(names)))
    fits = [
        kind
        for kind in kinds
        if all(truth(*(kind[other] for other in others)) == kind[name] for name, truth, others in said)
    ]
    stated = ", ".join(f"{name}: {_kind(is_knight)}" for name, is_knight in fits[0].items()) if fits else ""
    return problem.question.startswith(RULES) and len(fits) == 1 and stated == problem.answer


def _claim(text: str) -> tuple[Callable[..., bool], list[str]]:
    """(a sentence's truth as a function of kinds, the people in it), read from its words."""
    people = re.findall(r"[A-Z]\w+", text)
    if len(people) == 1:
        return (lambda kind: kind) if text.endswith("knight") else (lambda kind: not kind), people
    if "kind" in text:
        return (lambda one, other: one is other) if "same" in text else (lambda one, other: one is not other), people
    return (lambda *kinds: all(kinds)) if "both" in text else (lambda *kinds: False in kinds), people
