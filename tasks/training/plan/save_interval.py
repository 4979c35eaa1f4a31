"""Derives after how many steps a phase saves: so that saves, and the steps that failures repeat, cost least together.

Young's first-order optimum (doi 10.1145/361147.361115): sqrt(2 x seconds of a save x seconds between failures). The
loss is flat around it: at half the interval or twice, a quarter more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema import TrainingResources
from tasks.training.plan.machine import HOST_COPY_BYTES_PER_SECOND, HOURS_TO_FAILURE
from tasks.training.plan.planned_needs import size

NEAR_ENOUGH = 0.005
"""Share of the time: an interval that loses at most so much more than the best one is left as it is."""


@dataclass(frozen=True)
class SaveInterval:
    """Of a phase on accelerators."""

    steps: int
    """As configured."""
    best_steps: int
    seconds_per_step: float
    state_bytes: int
    """Of one checkpoint."""
    lost: float
    """Share of the time that goes to saves and to steps taken again, as configured."""
    least_lost: float
    """The same with `best_steps`."""

    @property
    def is_near_enough(self) -> bool:
        return self.lost - self.least_lost <= NEAR_ENOUGH

    def describe(self, phase: str) -> str:
        """What another interval would change, and how to set it."""
        now, best = (steps * self.seconds_per_step / 60 for steps in (self.steps, self.best_steps))
        return (
            f"a save every {self.steps:,} steps ({now:,.1f} minutes) loses {self.lost:.1%} of the time to saves and to "
            f"steps that failures repeat, one every {self.best_steps:,} ({best:,.1f} minutes) {self.least_lost:.1%}, "
            f"and writes {size(self.state_bytes / best / 60)}/s: "
            f"--set phases.{phase}.resources.save_interval_steps={self.best_steps}"
        )


def best_seconds_between_saves(save_seconds: float, seconds_to_failure: float) -> float:
    """`save_seconds`: for which training waits."""
    return math.sqrt(2 * save_seconds * seconds_to_failure)


def save_interval(
    state_bytes: int, resources: TrainingResources, seconds_per_step: float, num_steps: int
) -> SaveInterval:
    """`state_bytes`: of one checkpoint to continue from."""
    save_seconds = state_bytes / resources.num_ranks / HOST_COPY_BYTES_PER_SECOND
    seconds_to_failure = HOURS_TO_FAILURE * 3600 / resources.num_ranks

    def lost(steps: int) -> float:
        between = steps * seconds_per_step
        return save_seconds / between + between / 2 / seconds_to_failure

    best = best_seconds_between_saves(save_seconds, seconds_to_failure) / seconds_per_step
    configured, best_steps = min(resources.save_interval_steps, num_steps), min(max(1, round(best)), num_steps)
    return SaveInterval(configured, best_steps, seconds_per_step, state_bytes, lost(configured), lost(best_steps))
