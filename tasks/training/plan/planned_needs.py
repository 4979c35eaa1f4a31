"""What a phase needs beside its ranks, and what a scale costs: values, and their tables for the terminal."""

from __future__ import annotations

from pydantic import BaseModel

NEEDS_TITLES = (
    "phase",
    "rank-hours",
    "cost",
    "failures",
    "lost to them",
    "to saves",
    "weights",
    "state",
    "disk",
    "tokens on disk",
    "reads",
    "each rank sends",
    "smallest world",
)


class PlannedNeeds(BaseModel):
    """Of one phase; what is lost is derived for accelerators only, and 0 on CPUs. Hours, cost and rates are 0 where no
    engine can train the phase."""

    rank_hours: float
    """Ranks times hours, with what is lost."""
    cost: float
    """Of these hours, in the currency of the prices: of the phase's own ranks, not of a server that samples for it."""
    num_failures: float
    """Expected interruptions, at HOURS_TO_FAILURE (tasks/training/plan/machine.py)."""
    failure_hours: float
    """Wall time that they take: a restart each, and half of the steps between two saves."""
    save_hours: float
    """Wall time in which training waits for copies of checkpoints to host memory."""
    num_checkpoints: int
    weights_bytes: int
    """The released checkpoint in the phase's dtype."""
    state_bytes: int
    """One checkpoint to continue from: masters and moments in float32, of what the phase trains."""
    disk_bytes: int
    """The checkpoints that are kept and the one being written, with the weights."""
    save_bytes_per_second: float
    """What shared storage takes in on average: a checkpoint in each save interval."""
    data_bytes: int
    """The phase's tokens as ids; the repeated ones are counted again."""
    data_bytes_per_second: float
    """What all ranks read of them, at the plan's speed."""
    sent_bytes_per_second: dict[str, float]
    """Average of one rank by axis, in and out of its node; empty on CPUs."""
    smallest_world: int
    """The fewest ranks, as a power of two, whose memory holds the phase in any topology; 0 where none was searched or
    none does."""

    @property
    def lost_hours(self) -> float:
        return self.failure_hours + self.save_hours


class PlannedCost(BaseModel):
    """Of the scale, in the currency of the prices."""

    currency: str
    rank_hour: float
    """Price of one rank for an hour; 0 where all phases run on CPUs."""
    rank_hours: float
    ranks: float
    """Cost of all phases."""
    kilowatt_hours: float
    """Energy of all phases, by the power that the prices name for a rank."""
    data: float
    personnel: float

    @property
    def total(self) -> float:
        return self.ranks + self.data + self.personnel

    def describe(self, scale: str) -> str:
        """In one line, with units."""
        beside = [f"data {amount(self.data)}", f"people {amount(self.personnel)}"]
        if not self.data + self.personnel:
            beside = [f"the prices name no data and no people for {scale}"]
        return (
            f"{amount(self.total)} {self.currency}: {self.rank_hours:,.1f} rank-hours {amount(self.ranks)}, "
            f"{', '.join(beside)}; {amount(self.kilowatt_hours)} kWh"
        )


def needs_row(name: str, needs: PlannedNeeds) -> tuple[str, ...]:
    """Cells under NEEDS_TITLES; "-" for what follows from hours where there are none."""
    spent = (
        f"{needs.rank_hours:,.1f}",
        amount(needs.cost),
        f"{needs.num_failures:,.1f}",
        f"{needs.failure_hours:,.1f} h",
        f"{needs.save_hours:,.1f} h",
    )
    rates = f"{size(needs.data_bytes_per_second)}/s", f"{size(sum(needs.sent_bytes_per_second.values()))}/s"
    if not needs.rank_hours:
        spent, rates = ("-",) * len(spent), ("-",) * len(rates)
    return (
        name,
        *spent,
        *map(size, (needs.weights_bytes, needs.state_bytes, needs.disk_bytes, needs.data_bytes)),
        *rates,
        f"{needs.smallest_world:,}" if needs.smallest_world else "-",
    )


def amount(value: float) -> str:
    """Money: whole units from 100 on, else cents."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def size(number: float) -> str:
    """Bytes in a unit that leaves few digits, as the plan prints them."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number / 1e6:,.1f} MB"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with equally wide columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
