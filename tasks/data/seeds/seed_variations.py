"""Varies a seed problem: the same story with other numbers.

They are drawn by hash, calculated anew, and verified by another route.
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
"""Per seed: where several divisions must come out even, one draw in hundreds does."""
MAX_CHOICES = 10_000
NEAR = 1e-6
"""How near to a whole number a float must be to be looked at."""
STEPS = tuple(sign * 10**power for power in range(MAX_DECIMALS + 6, -1, -1) for sign in (5, 1))
AN = re.compile(r"(?:8|11(?!\d)|18(?!\d))")


def seed_variations(seed: Seed, program: Program) -> Iterator[Seed]:
    """The seed with other numbers, all different, in an order that depends on the seed's id alone.

    Every pair of numbers of a variation, and each with 0 and 1, compares as in the seed, and none needs more decimals:
    what was whole, positive, smaller, a part or a plural still is.
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
    """Numbers for the free sources. Floats only leave out what cannot be: _sensible_values decides exactly."""
    choices = {place: _choices(program, place) for place in program.free}
    drawn = hashlib.shake_128(seed.id.encode()).digest(4 * NUM_DRAWS * len(choices))
    hashed = np.frombuffer(drawn, "<u4").astype(np.uint64).reshape(len(choices), NUM_DRAWS)
    scales = {place: 10 ** num_decimals(program.sources[place].value) for place in choices}
    picked = [(row * len(units) >> 32).astype(np.int64) for row, units in zip(hashed, choices.values(), strict=True)]
    columns = {place: np.array(units)[pick] for pick, (place, units) in zip(picked, choices.items(), strict=True)}
    may_be = _may_be_sensible(program, {place: units / scales[place] for place, units in columns.items()})
    rows = zip(*(units[may_be].tolist() for units in columns.values()), strict=True)
    for row in dict.fromkeys(rows):
        yield {place: Fraction(units, scales[place]) for place, units in zip(columns, row, strict=True)}


def _may_be_sensible(program: Program, columns: dict[int, NDArray[np.float64]]) -> NDArray[np.bool_]:
    values: list[Any] = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for place, source in enumerate(program.sources):
            values.append(
                columns.get(place, float(source.value)) if source.tree is None else _float_value(source.tree, values)
            )
        good = np.ones(NUM_DRAWS, dtype=np.bool_)
        last, last_old = -np.inf, None
        for place in program.ordered:
            source = program.sources[place]
            scaled = values[place] * 10.0**source.num_decimals
            good &= np.abs(scaled - np.round(scaled)) < NEAR
            good &= (values[place] > last) | (source.value == last_old)
            last, last_old = values[place], source.value
    return good


def _float_value(tree: Tree, values: Sequence[Any]) -> Any:
    if isinstance(tree, tuple):
        return APPLY[tree[0]](_float_value(tree[1], values), np.float64(_float_value(tree[2], values)))
    return values[tree] if isinstance(tree, int) else float(tree)


def _sensible_values(program: Program, given: dict[int, Fraction]) -> list[Fraction] | None:
    """All numbers of a variation; None where they compare otherwise, coincide otherwise, or need more decimals than the
    seed's."""
    try:
        values = program.values(given)
    except ZeroDivisionError:
        return None
    last_old, last_new = None, Fraction(0)
    for place in program.ordered:
        old, new = program.sources[place].value, values[place]
        if 10 ** program.sources[place].num_decimals % new.denominator:
            return None
        if (old > 0) != (new > 0) or (old > 1) != (new > 1) or (old < 1) != (new < 1):
            return None
        if last_old is not None and (new != last_new if old == last_old else new <= last_new):
            return None
        last_old, last_new = old, new
    olds = [source.value for source in program.sources]
    return values if len(set(zip(olds, values, strict=True))) == len(set(olds)) == len(set(values)) else None


def _choices(program: Program, place: int) -> Sequence[int]:
    """What could stand in a quantity's place, in units of its last decimal: of its size, as round, with its article,
    within its unit."""
    source = program.sources[place]
    scale = 10 ** num_decimals(source.value)
    units = int(source.value * scale)
    step = next(step for step in STEPS if units % step == 0 and (units // step >= 4 or step == 1))
    low, high = max(step, min(units * 6 // 10, units - 2 * step)), max(units * 15 // 10, units + 2 * step)
    before, after = _around(program, place)
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


def _around(program: Program, place: int) -> tuple[str, str]:
    """The text on both sides of a quantity in the question."""
    at = next(
        index for index, piece in enumerate(program.question) if isinstance(piece, Slot) and piece.source == place
    )
    before, after = program.question[at - 1], program.question[at + 1]
    assert isinstance(before, str) and isinstance(after, str)
    return before, after


def check_variation(seed: Seed, program: Program, made: Seed) -> str:
    """Why a variation is not kept; empty where it is right. By another route than the one that made it: calculations
    and answer are checked in the text, every number is traced, and the text is read as a program anew, which must be
    the seed's and with its numbers give it back.
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
    old = again.values({place: program.sources[place].value for place in again.free})
    replayed = (write(program.question, old), write(program.solution, old), write(program.answer, old))
    return "" if replayed == (seed.question, seed.solution, seed.answer) else "not_reversible"


def _untraced(seed: Seed, program: Program, made: Seed) -> set[Fraction]:
    """Numbers of a solution that stand neither in its question, nor as the result of a calculation, nor unchanged in
    the seed."""
    known = {
        source.value
        for place, source in enumerate(program.sources)
        if source.tree is None and place not in program.free
    }
    known |= {Fraction(number) for number in ORDINAL.findall(seed.solution)}
    for number in written_numbers(made.question):
        known.add(number.value)
        if SHARE.match(made.question, number.end):
            share = number.value / 100
            known |= {share, 1 + share, 1 - share, 100 + number.value, 100 - number.value}
    known |= {number.value for _, right in ANNOTATION.findall(made.solution) for number in written_numbers(right)}
    return {number.value for number in written_numbers(made.solution)} - known
