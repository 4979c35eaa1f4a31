"""The bounds of a gate: per figure what was measured, what is allowed and the verdict."""

from __future__ import annotations

import math
from typing import Literal

from infra.step import Record
from tasks.evaluation.intervals import Interval

Outcome = Literal["held", "broken", "undecided"]


class Bound(Record):
    """One bound of a decision."""

    figure: str
    against: str = ""
    """The checkpoint that the figure was compared with: start, champion or anchor; empty for a floor or a ceiling."""
    value: float | None
    """The measured value; in a comparison, candidate minus the other. None where it is not finite."""
    interval: Interval | None = None
    """95 % interval of a comparison, or of what a format loses."""
    limit: float | None
    """The bound on `value`, or on one end of the interval; None where the value only has to be finite."""
    is_own: bool = False
    """Whether the phase is trained for this figure."""
    num_items: int = 0
    """Independent items that were compared."""
    noise_floor: float = 0.0
    """What the compared figure differs by where only chance does (comparisons.Difference); 0 where none is known."""
    outcome: Outcome
    """undecided: there are too few items to decide whether the bound is held."""
    is_refusal: bool
    """Whether the bound refuses the candidate: a broken one does, an undecided one where it is required."""
    sentence: str
    """All of this in words."""


class Verdict:
    """Collects the bounds of a decision."""

    def __init__(self) -> None:
        self.bounds: list[Bound] = []

    @property
    def is_held(self) -> bool:
        """Whether no bound refuses."""
        return not any(bound.is_refusal for bound in self.bounds)

    def floor(self, figure: str, value: float, needed: float, remark: str = "") -> None:
        """A figure that must reach a bound; one that is not finite does not."""
        self._limit(figure, value, needed, value >= needed, f"at least {needed} needed{remark}")

    def ceiling(
        self, figure: str, value: float, allowed: float, remark: str = "", interval: Interval | None = None
    ) -> None:
        """A figure that must not exceed a bound; one that is not finite does. The value decides, the interval is
        shown beside it."""
        shown = "" if interval is None else f" (95 % interval {interval[0]:.4f} to {interval[1]:.4f})"
        words = f"at most {allowed:.6g} allowed{remark}{shown}"
        self._limit(figure, value, allowed, value <= allowed, words, interval)

    def finite(self, figure: str, value: float) -> None:
        """A figure that other figures are compared with: it must be finite."""
        self._limit(figure, value, None, math.isfinite(value), "must be finite")

    def unmeasured(self, figure: str, against: str, is_refusal: bool) -> None:
        """The figure that a phase is trained for, where the suite has nothing to measure it by."""
        self.bounds.append(
            Bound(
                figure=figure,
                against=against,
                value=None,
                limit=None,
                outcome="undecided",
                is_refusal=is_refusal,
                sentence=f"{figure}, which the phase is trained for, is not compared with the {against}'s: undecided, "
                "the suite has nothing to measure it by",
            )
        )

    def _limit(
        self,
        figure: str,
        value: float,
        limit: float | None,
        is_held: bool,
        words: str,
        interval: Interval | None = None,
    ) -> None:
        measured = round(value, 6) if math.isfinite(value) else None
        shown = f"is {value}" if measured is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        self.bounds.append(
            Bound(
                figure=figure,
                value=measured,
                interval=interval,
                limit=limit,
                outcome="held" if is_held else "broken",
                is_refusal=not is_held,
                sentence=f"{figure} {shown}, {words}",
            )
        )
