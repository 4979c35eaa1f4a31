"""The report about what training took: rank-hours, and the energy and the money that they are taken to need."""

from __future__ import annotations

import fnmatch
import json
from collections import defaultdict
from typing import TYPE_CHECKING

from tasks.report.report_inputs import ReportedPhases
from tasks.report.report_page import paragraph
from tasks.training.watch.effective_time import TIME_FILE, device_of

if TYPE_CHECKING:
    from configs.schema import Prices

RANK_LOGS = "logs/rank-*.log"


def energy_note(phases: ReportedPhases, prices: Prices) -> str:
    """Rank-hours of each phase, and their energy and cost, by the device that its ranks computed on. Empty where every
    phase's weights were imported."""
    hours: dict[str, float] = defaultdict(float)
    for phase in (*phases, *phases.reward_models):
        if TIME_FILE in phase.checkpoint.manifest.evidence:
            num_ranks = len(fnmatch.filter(phase.checkpoint.manifest.evidence, RANK_LOGS))
            times = phase.checkpoint.path(TIME_FILE).read_bytes()
            hours[device_of(times)] += _held_seconds(times) * num_ranks / 3600
    return "".join(paragraph(_sentences(device, spent, prices), "soft") for device, spent in sorted(hours.items()))


def _held_seconds(times: bytes) -> float:
    """Seconds in which the ranks worked, of the content of time.json: a job that waits in a queue, before its first
    start or between two, has no ranks."""
    return sum(max(0.0, each["seen_at"] - each["opened_at"]) for each in json.loads(times)["stretches"])


def _sentences(device: str, hours: float, prices: Prices) -> str:
    took = f"The phases took {hours:.2f} rank-hours on {device or 'an unrecorded device'}, without queue and starts."
    machine = _priced_as(device, prices)
    if machine is None:
        return (
            f"{took} Their energy and cost are not known: rank_watts and rank_hour of configs/prices/guide.yaml name "
            f"{', '.join(sorted(prices.rank_watts))}."
        )
    watts, price = prices.rank_watts[machine], prices.rank_hour[machine]
    return (
        f"{took} At {watts:g} W a rank that is an estimated {hours * watts / 1000:.3f} kWh, at {price:g} "
        f"{prices.currency} an hour {hours * price:.2f} {prices.currency}; power and price are assumptions for "
        f"{machine} (configs/prices/guide.yaml)."
    )


def _priced_as(device: str, prices: Prices) -> str | None:
    """The entry of the prices that a device's name holds: h100 for an NVIDIA H100 80GB HBM3; None where there is
    none."""
    named = [name for name in prices.rank_watts if name in prices.rank_hour and name in device.lower()]
    return max(named, key=len, default=None)
