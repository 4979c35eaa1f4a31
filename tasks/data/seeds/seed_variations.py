"""Varies a seed problem: the same story with other numbers.

Numbers are drawn by hash, the solution is calculated again, and the result is verified by another route.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.data.seeds.math_answers import ANNOTATION, APPLY
from tasks.data.seeds.seed_numbers import LIMITS, MAX_DECIMALS, ORDINAL, SHARE, num_decimals, written_numbers
from tasks.data.seeds.seed_problems import check_solution
from tasks.data.seeds.seed_programs import NoProgramError, Program, Slot, Tree, read_program, write

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tasks.data.seeds.seed_problems import Seed

NUM_DRAWS = 4096
"""Draws per seed: where several divisions must have no remainder, only one draw in hundreds is usable."""
MAX_CHOICES = 10_000
NEAR = 1e-6
"""Largest distance of a float from a whole number that counts as whole."""
STEPS = tuple(sign * 10**power for power in range(MAX_DECIMALS + 6, -1, -1) for sign in (5, 1))
AN = re.compile(r"(?:8|11(?!\d)|18(?!\d))")


def seed_variations(seed: Seed, program: Program) -> Iterator[Seed]:
    """The seed with other numbers, all different, in an order that depends only on the seed's id.

    Every pair of numbers of a variation, and each number with 0 and 1, compares as in the seed, and none needs more
    decimals: what was whole, positive, smaller, a part or a plural still is.
    """
    known = {seed.question}
    for given in _draws(seed, program):
        values = _sensible_values(program, given)
        if values is None:
            continue
        question = write(program.question, values)
        if question not in known:
            known.add(question)
            yield replace(
                seed, question=question, solution=write(program.solution, values), answer=write(program.answer, values)
            )


def _draws(seed: Seed, program: Program) -> Iterator[dict[int, Fraction]]:
    """Numbers for the free sources. A test in floats removes most impossible draws; _sensible_values decides
    exactly."""
    choices = {index: _choices(program, index) for index in program.free}
    drawn = hashlib.shake_128(seed.id.encode()).digest(4 * NUM_DRAWS * len(choices))
    hashed = np.frombuffer(drawn, "<u4").astype(np.uint64).reshape(len(choices), NUM_DRAWS)
    scales = {index: 10 ** num_decimals(program.sources[index].value) for index in choices}
    picked = [(row * len(units) >> 32).astype(np.int64) for row, units in zip(hashed, choices.values(), strict=True)]
    columns = {index: np.array(units)[pick] for pick, (index, units) in zip(picked, choices.items(), strict=True)}
    may_be = _may_be_sensible(program, {index: units / scales[index] for index, units in columns.items()})
    rows = zip(*(units[may_be].tolist() for units in columns.values()), strict=True)
    for row in dict.fromkeys(rows):
        yield {index: Fraction(units, scales[index]) for index, units in zip(columns, row, strict=True)}


def _may_be_sensible(program: Program, columns: dict[int, NDArray[np.float64]]) -> NDArray[np.bool_]:
    values: list[Any] = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for index, source in enumerate(program.sources):
            values.append(
                columns.get(index, float(source.value)) if source.tree is None else _float_value(source.tree, values)
            )
        good = np.ones(NUM_DRAWS, dtype=np.bool_)
        last, last_old = -np.inf, None
        for index in program.ordered:
            source = program.sources[index]
            scaled = values[index] * 10.0**source.num_decimals
            good &= np.abs(scaled - np.round(scaled)) < NEAR
            good &= (values[index] > last) | (source.value == last_old)
            last, last_old = values[index], source.value
    return good


def _float_value(tree: Tree, values: Sequence[Any]) -> Any:
    if isinstance(tree, tuple):
        return APPLY[tree[0]](_float_value(tree[1], values), np.float64(_float_value(tree[2], values)))
    return values[tree] if isinstance(tree, int) else float(tree)


def _sensible_values(program: Program, given: dict[int, Fraction]) -> list[Fraction] | None:
    """All numbers of a variation; None where their order or their equalities differ from the seed's, or they need more
    decimals."""
    try:
        values = program.values(given)
    except ZeroDivisionError:
        return None
    last_old, last_new = None, Fraction(0)
    for index in program.ordered:
        old, new = program.sources[index].value, values[index]
        if 10 ** program.sources[index].num_decimals % new.denominator:
            return None
        if (old > 0) != (new > 0) or (old > 1) != (new > 1) or (old < 1) != (new < 1):
            return None
        if last_old is not None and (new != last_new if old == last_old else new <= last_new):
            return None
        last_old, last_new = old, new
    olds = [source.value for source in program.sources]
    return values if len(set(zip(olds, values, strict=True))) == len(set(olds)) == len(set(values)) else None


def _choices(program: Program, index: int) -> Sequence[int]:
    """Values that could replace a quantity, in units of its last decimal: of similar size, as round, with the same
    article, within its unit."""
    source = program.sources[index]
    scale = 10 ** num_decimals(source.value)
    units = int(source.value * scale)
    step = next(step for step in STEPS if units % step == 0 and (units // step >= 4 or step == 1))
    low, high = max(step, min(units * 6 // 10, units - 2 * step)), max(units * 15 // 10, units + 2 * step)
    before, after = _around(program, index)
    limits = [
        Fraction(limit)
        for word in re.findall(r"[a-z]+", after[:25].lower())[:2]
        for limit in LIMITS.get(word.removesuffix("s"), ())
    ]
    known = [limit for limit in (*limits, source.limit) if limit is not None and source.value <= limit]
    top = min([high, *(int(limit * scale) for limit in known)])
    near = range(-(-low // step) * step, top + 1, step)
    near = near[:: -(-len(near) // MAX_CHOICES)]
    if not re.search(r"\ban?[\s$]*$", before, re.IGNORECASE):
        return near
    takes_an = bool(AN.match(str(units)))
    return [number for number in near if bool(AN.match(str(number))) == takes_an] or [units]


def _around(program: Program, index: int) -> tuple[str, str]:
    """The text before and after a quantity in the question."""
    at = next(
        position for position, piece in enumerate(program.question) if isinstance(piece, Slot) and piece.source == index
    )
    before, after = program.question[at - 1], program.question[at + 1]
    assert isinstance(before, str) and isinstance(after, str)
    return before, after


def check_variation(seed: Seed, program: Program, made: Seed) -> str:
    """The reason to reject a variation; empty where it is right.

    The check is independent of the generation: calculations and answer are checked in the text, every number is traced,
    and the text is read as a program again, which must be the seed's program and give the seed with the seed's numbers.
    """
    refused = check_solution(made, f"{made.solution}\n#### {made.answer}")
    if refused:
        return refused
    if _untraced(seed, program, made):
        return "untraced_number"
    try:
        again = read_program(made)
    except NoProgramError as error:
        return error.reason
    if again.shape != program.shape:
        return "another_program"
    old = again.values({index: program.sources[index].value for index in again.free})
    replayed = (write(program.question, old), write(program.solution, old), write(program.answer, old))
    return "" if replayed == (seed.question, seed.solution, seed.answer) else "not_reversible"


def _untraced(seed: Seed, program: Program, made: Seed) -> set[Fraction]:
    """Numbers of a solution that are neither in its question, nor the result of a calculation, nor unchanged from the
    seed."""
    known = {
        source.value
        for index, source in enumerate(program.sources)
        if source.tree is None and index not in program.free
    }
    known |= {Fraction(number) for number in ORDINAL.findall(seed.solution)}
    for number in written_numbers(made.question):
        known.add(number.value)
        if SHARE.match(made.question, number.end):
            share = number.value / 100
            known |= {share, 1 + share, 1 - share, 100 + number.value, 100 - number.value}
    known |= {number.value for _, right in ANNOTATION.findall(made.solution) for number in written_numbers(right)}
    return {number.value for number in written_numbers(made.solution)} - known
