"""Assigns pieces to the slots of a phase, part by part: an interleaved stream, or rows filled by best fit. Memory holds
one part.

Where the mixture has waypoints, the phase is read in slices of rows, and rows are shuffled only inside their slice. A
stream follows the schedule to within one document per domain at every position; best fit does so at the end of every
part, and no part crosses the end of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.packing.best_fit import num_rows, place_pieces, row_shapes
from tasks.data.packing.domain_pieces import LENGTH
from tasks.data.packing.domain_queue import DomainPieces, Queue
from tasks.data.packing.mixture_schedule import split_tokens
from tasks.data.packing.mixture_shares import MixtureSchedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from configs.schema import PackingRecipe

    I64 = NDArray[np.int64]

MAX_SLICES = 64
MIN_SLICE_ROWS = 64
"""Least rows per slice; with fewer, best fit has too few choices: 0.93 of the slots filled with 16 rows, 0.97 with 64
(tests/data/packing/test_packing_mixtures.py)."""
PART_UNITS = 1 << 19
"""About as many pieces are in a part."""
MAX_PART_TOKENS = 1 << 30
"""Slots in a part are int32."""


@dataclass(frozen=True)
class PlacedUnits:
    """A part: units (tasks/data/packing/domain_pieces.py) in the order of their slots."""

    units: I64
    kept: I64
    """Number of tokens of each unit that are read."""
    slots: I64


def slice_rows(recipe: PackingRecipe) -> int | None:
    """Rows per slice of a phase with waypoints; None for one mixture, where the phase is one slice."""
    if isinstance(recipe.mixture, dict):
        return None
    return max(MIN_SLICE_ROWS, -(-(recipe.num_tokens // recipe.sequence_length) // MAX_SLICES))


def part_tokens(domains: Iterable[DomainPieces]) -> int:
    """Tokens of a part that reads of these domains."""
    return min(MAX_PART_TOKENS, int(PART_UNITS * min(domain.tokens_per_unit for domain in domains)))


def place_stream(
    queues: dict[str, Queue], shares: dict[str, int], schedule: MixtureSchedule, part_tokens: int
) -> Iterator[PlacedUnits]:
    """`shares` tokens of each domain, interleaved by the schedule; the last piece of each domain is cut where its
    tokens end."""
    num_parts = -(-sum(shares.values()) // part_tokens)
    read, slot = dict.fromkeys(queues, 0), 0
    for part in range(1, num_parts + 1):
        columns = []
        for number, (domain, queue) in enumerate(queues.items()):
            of_domain = shares[domain]
            until = of_domain if part == num_parts else int(of_domain * schedule.share_until(domain, part / num_parts))
            if until <= read[domain]:
                continue
            ends = queue.hold(until - read[domain])
            units = queue.take(np.ones(int(np.searchsorted(ends, until - read[domain])) + 1, dtype=bool))
            starts = read[domain] + ends[: len(units)] - units[:, LENGTH]
            kept = np.minimum(units[:, LENGTH], of_domain - starts)
            position = schedule.position_of(domain, starts / of_domain)
            columns.append((units, kept, position, np.full(len(units), number)))
            read[domain] += int(ends[len(units) - 1])
        if not columns:  # the part before ended with a document longer than a part
            continue
        units, kept, position, number = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.lexsort((number, position))
        units, kept = units[order], kept[order]
        yield PlacedUnits(units, kept, slot + np.cumsum(kept) - kept)
        slot += int(kept.sum())


def place_best_fit(
    queues: dict[str, Queue], schedule: MixtureSchedule, recipe: PackingRecipe, row_slots: int, part_tokens: int
) -> Iterator[PlacedUnits]:
    """Fill the rows with pieces of all domains. Pieces that do not fit into a part are used in the next one; those that
    do not fit into the last one, less than a row, in the next phase of the course."""
    wanted = recipe.num_tokens // recipe.sequence_length
    of_slice, of_part = slice_rows(recipe) or wanted, max(MIN_SLICE_ROWS, part_tokens // row_slots)
    read = dict.fromkeys(queues, 0)
    for begin in range(0, wanted, of_slice):
        end = min(begin + of_slice, wanted)
        for first in range(begin, end, of_part):
            last = min(first + of_part, end)
            units, slots = _fill_rows(queues, read, schedule, last / wanted, last - first, row_slots)
            yield PlacedUnits(units, units[:, LENGTH], slots + first * row_slots)


def _fill_rows(
    queues: dict[str, Queue],
    read: dict[str, int],
    schedule: MixtureSchedule,
    position: float,
    rows: int,
    row_slots: int,
) -> tuple[I64, I64]:
    """Units and slots of rows that end at `position` in the phase; adds their tokens to `read`."""
    areas = schedule.weights[0] if schedule.is_constant else schedule.until(position)
    weights = {domain: area for domain, area in zip(schedule.domains, areas.tolist(), strict=True) if domain in queues}
    volume = rows * row_slots  # enough tokens for the rows

    def more(num_tokens: int) -> dict[str, int]:
        wanted = split_tokens(weights, num_tokens + sum(read.values()))
        return {domain: max(0, wanted[domain] - read[domain]) for domain in queues}

    spare = len(queues)  # rounding may give a domain more of fewer tokens
    ends = {domain: queues[domain].hold(wanted + spare) for domain, wanted in more(volume).items()}

    def taken(num_tokens: int) -> dict[str, int]:
        return {
            domain: 1 + int(np.searchsorted(ends[domain], wanted)) if wanted else 0
            for domain, wanted in more(num_tokens).items()
        }

    def rows_of(num_tokens: int) -> int:
        lengths = [queues[domain].held[:number, LENGTH] for domain, number in taken(num_tokens).items()]
        return num_rows(row_shapes(np.concatenate(lengths), row_slots))

    numbers = taken(_least_tokens(rows_of, lambda amount: sum(taken(amount).values()), rows, volume, row_slots))
    lengths = np.concatenate([queues[domain].held[:number, LENGTH] for domain, number in numbers.items()])
    piece, slot = place_pieces(lengths, row_shapes(lengths, row_slots), row_slots)
    is_read = np.zeros(len(lengths), dtype=bool)
    is_read[piece[slot < volume]] = True
    place = np.cumsum(is_read) - 1  # of each piece among those that are read
    bounds = np.cumsum(list(numbers.values()))[:-1]
    parts = []
    for domain, own in zip(numbers, np.split(is_read, bounds), strict=True):
        parts.append(queues[domain].take(own))
        read[domain] += int(parts[-1][:, LENGTH].sum())
    within = slot < volume
    return np.concatenate(parts)[place[piece[within]]], slot[within]


def _least_tokens(
    rows_of: Callable[[int], int], units_of: Callable[[int], int], rows: int, high: int, row_slots: int
) -> int:
    """The least number of tokens, to within a piece, that fill `rows` rows, as `high` tokens do: searched from where
    their ratio leads, in steps that double, then by bisection."""
    low, reach = 0, row_slots
    middle = high * rows // rows_of(high)
    while high - low > 1 and units_of(high) - units_of(low) > 1:
        middle = middle if low < middle < high else (low + high) // 2
        if rows_of(middle) >= rows:
            high, middle = middle, middle - reach
        else:
            low, middle = middle, middle + reach
        reach *= 2
    return high
