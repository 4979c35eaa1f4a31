"""How much of a phase each domain has up to any position: one mixture, or waypoints and lines.

A domain's share up to a position is the area under its line. So the shares of the whole phase are exact, and the
position at which a domain has had so much follows without steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F64 = NDArray[np.float64]


@dataclass(frozen=True)
class MixtureSchedule:
    """Weights over a phase of the domains that have text."""

    domains: tuple[str, ...]
    positions: F64
    """Positions of the waypoints: 0.0 to 1.0."""
    weights: F64
    """One row per waypoint, one column per domain. A single mixture is two equal rows, not normalised."""

    @property
    def is_constant(self) -> bool:
        """Whether the shares are the same everywhere."""
        return bool((self.weights == self.weights[0]).all())

    def until(self, position: float) -> F64:
        """Area under each domain's line from 0 to a position."""
        ends = np.clip(position, self.positions[:-1], self.positions[1:])
        width = (ends - self.positions[:-1])[:, None]
        return ((self.weights[:-1] + 0.5 * self._slopes() * width) * width).sum(axis=0)

    def share_until(self, domain: str, position: float) -> float:
        """The share of its own tokens that a domain has had at a position."""
        if self.is_constant:
            return position
        column = self.domains.index(domain)
        return float(self.until(position)[column] / self.until(1.0)[column])

    def position_of(self, domain: str, share: F64) -> F64:
        """Positions in the phase at which a domain has had these ascending shares, in [0, 1], of its own tokens."""
        if self.is_constant:
            return share
        column = self.domains.index(domain)
        areas = np.array([self.until(position)[column] for position in self.positions])
        wanted = share * areas[-1]
        segment = np.clip(np.searchsorted(areas, wanted, side="right") - 1, 0, len(areas) - 2)
        start, slope = self.weights[segment, column], self._slopes()[segment, column]
        area = wanted - areas[segment]
        root = start + np.sqrt(np.maximum(start * start + 2 * slope * area, 0.0))
        return self.positions[segment] + np.divide(2 * area, root, out=np.zeros_like(area), where=root > 0)

    def _slopes(self) -> F64:
        return np.diff(self.weights, axis=0) / np.diff(self.positions)[:, None]
