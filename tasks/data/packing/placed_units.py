"""Assigns pieces to the slots of a phase: an interleaved stream, or rows filled by best fit.

Where the mixture has waypoints, the phase is read in slices of rows, and rows are shuffled only inside their slice. A
stream follows the schedule to within one document per domain at every position; best fit does so at the end of every
slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.packing.best_fit import num_rows, place_pieces, row_shapes
from tasks.data.packing.course_position import DomainPosition
from tasks.data.packing.domain_pieces import Pieces, ordered_units
from tasks.data.packing.mixture_schedule import allot_tokens, schedule_mixture, slots_of, split_tokens
from tasks.data.packing.mixture_shares import MixtureSchedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from configs.schema import PackingRecipe

    I64 = NDArray[np.int64]

MAX_SLICES = 64
MIN_SLICE_ROWS = 64
"""Least rows per slice; with fewer, best fit has too few choices: 0.93 of the slots filled with 16 rows, 0.97 with 64
(tests/data/packing/test_packing_mixtures.py)."""


@dataclass(frozen=True)
class PlacedUnits:
    """Units (tasks/data/packing/domain_pieces.py) in the order of their slots."""

    units: I64
    kept: I64
    """Number of tokens of each unit that are read."""
    slots: I64
    queues: dict[str, I64]
    """Units of each domain, in its order, from which `units` were taken."""


def slice_rows(recipe: PackingRecipe) -> int | None:
    """Rows per slice of a phase with waypoints; None for one mixture, where the phase is one slice."""
    if isinstance(recipe.mixture, dict):
        return None
    return max(MIN_SLICE_ROWS, -(-(recipe.num_tokens // recipe.sequence_length) // MAX_SLICES))


def place_stream(pieces: dict[str, Pieces], recipe: PackingRecipe, positions: dict[str, DomainPosition]) -> PlacedUnits:
    """The domains' pieces from their positions on, interleaved by the schedule; the last piece of each domain is cut
    where its tokens end."""
    available = {domain: given.num_tokens for domain, given in pieces.items()}
    shares = allot_tokens(
        recipe, available, slots_of(recipe, recipe.num_tokens // recipe.sequence_length), epochs_read(positions)
    )
    schedule = schedule_mixture(recipe, available)
    queues = {
        domain: ordered_units(domain, pieces[domain], positions[domain], num_tokens, recipe.seed)
        for domain, num_tokens in shares.items()
        if num_tokens
    }
    parts = []
    for number, (domain, part) in enumerate(queues.items()):
        num_tokens = shares[domain]
        ends = np.cumsum(part[:, 3])
        part = part[: int(np.searchsorted(ends, num_tokens)) + 1]
        kept = part[:, 3].copy()
        kept[-1] -= ends[len(part) - 1] - num_tokens
        parts.append(
            (
                part,
                kept,
                schedule.position_of(domain, (np.cumsum(kept) - kept) / num_tokens),
                np.full(len(part), number),
            )
        )
    units, kept, position, domain_number = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((domain_number, position))
    units, kept = units[order], kept[order]
    return PlacedUnits(units, kept, np.cumsum(kept) - kept, queues)


def place_best_fit(
    pieces: dict[str, Pieces], recipe: PackingRecipe, positions: dict[str, DomainPosition], row_slots: int
) -> PlacedUnits:
    """Fill the rows with pieces of all domains, slice by slice. Pieces that do not fit into a slice are used in the
    next one; those that do not fit into the last one, less than a row, in the next phase of the course."""
    available = {domain: given.num_tokens for domain, given in pieces.items()}
    wanted = recipe.num_tokens // recipe.sequence_length
    most = allot_tokens(recipe, available, slots_of(recipe, wanted), epochs_read(positions))
    step = slice_rows(recipe)
    spare = (
        0 if step is None else row_slots * (MAX_SLICES + 1)
    )  # a slice takes each domain past its share by less than a row
    queues = {
        domain: ordered_units(domain, pieces[domain], positions[domain], amount + spare, recipe.seed)
        for domain, amount in most.items()
        if amount
    }
    left = queues
    schedule = schedule_mixture(recipe, available)
    read = dict.fromkeys(queues, 0)
    placed: list[tuple[I64, I64]] = []
    for first in range(0, wanted, step or wanted):
        last = min(first + (step or wanted), wanted)
        chosen, slots, left = _fill_slice(left, read, schedule, last / wanted, last - first, row_slots)
        placed.append((chosen, slots + first * row_slots))
    units, slots = (np.concatenate(column) for column in zip(*placed, strict=True))
    return PlacedUnits(units, units[:, 3], slots, queues)


def epochs_read(positions: dict[str, DomainPosition]) -> dict[str, float]:
    """Passes over each domain that the phases before have taken."""
    return {domain: position.epochs for domain, position in positions.items()}


def _fill_slice(
    queues: dict[str, I64], read: dict[str, int], schedule: MixtureSchedule, position: float, rows: int, row_slots: int
) -> tuple[I64, I64, dict[str, I64]]:
    """Units and slots of a slice that ends at `position` in the phase, and the rest of the queues; adds its tokens to
    `read`."""
    ends = {domain: np.cumsum(queue[:, 3]) for domain, queue in queues.items()}
    areas = schedule.weights[0] if schedule.is_constant else schedule.until(position)
    weights = {domain: area for domain, area in zip(schedule.domains, areas.tolist(), strict=True) if domain in queues}

    def taken(num_tokens: int) -> dict[str, int]:
        wanted = split_tokens(weights, num_tokens + sum(read.values()))
        return {
            domain: 1 + int(np.searchsorted(ends[domain], wanted[domain] - read[domain]))
            if wanted[domain] > read[domain]
            else 0
            for domain in queues
        }

    def units_of(num_tokens: int) -> I64:
        return np.concatenate([queues[domain][:number] for domain, number in taken(num_tokens).items()])

    low, high = 0, rows * row_slots  # rows of `high` are enough by volume
    while high - low > 1:
        middle = (low + high) // 2
        units = units_of(middle)
        enough = len(units) > 0 and num_rows(row_shapes(units[:, 3], row_slots)) >= rows
        low, high = (low, middle) if enough else (middle, high)
    numbers, units = taken(high), units_of(high)
    piece, slot = place_pieces(units[:, 3], row_shapes(units[:, 3], row_slots), row_slots)
    is_read = np.zeros(len(units), dtype=bool)
    is_read[piece[slot < rows * row_slots]] = True
    left, start = {}, 0
    for domain, number in numbers.items():
        own = is_read[start : start + number]
        read[domain] += int(queues[domain][:number][own, 3].sum())
        left[domain] = np.concatenate([queues[domain][:number][~own], queues[domain][number:]])
        start += number
    within = slot < rows * row_slots
    return units[piece[within]], slot[within], left
