"""Measures where the wall time of a phase went: productive, checkpoints, waiting, lost. Rank 0 writes time.json; report
and exporter read it.

A stretch is what one start of the ranks, or the way on after a rollback, did. Steps that a later stretch took again are
lost, and so is the time between two stretches: detection, queue, start, and steps after the last line.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from configs.files.atomic_files import replacing

TIME_FILE = "time.json"
DEVICE = "device"


@dataclass(frozen=True)
class Stretch:
    """Steps that followed each other in one process; times are seconds since the epoch."""

    first_step: int
    """Step of the checkpoint that it began from."""
    opened_at: float
    last_step: int
    seen_at: float
    wait_seconds: float = 0.0
    """For data; sampling of answers is work."""
    pause_seconds: float = 0.0
    """Measurements and checkpoints."""


@dataclass(frozen=True)
class EffectiveTime:
    """Seconds of a phase from its submission to the last thing that its ranks wrote down."""

    productive: float
    paused: float
    """Held-out measurements, and the part of checkpoints that training waits for."""
    waiting: float
    """In the queue and for the ranks' first start, and for data."""
    data_wait: float
    """Of the waiting what was for data, in all stretches."""
    lost: float

    @property
    def total(self) -> float:
        return self.productive + self.paused + self.waiting + self.lost

    @property
    def share(self) -> float:
        """Productive seconds over all."""
        return self.productive / self.total


class TimeLog:
    """Begins a stretch; `seen` writes how far it is."""

    def __init__(self, work_dir: Path, step: int, device: str) -> None:
        """`device` names what each rank computes on: prices and power of a rank go by it."""
        self._path = work_dir / TIME_FILE
        submitted = work_dir / "command.json"
        opened_at = time.time()
        self._before = _read(self._path) or {
            "submitted_at": submitted.stat().st_mtime if submitted.exists() else opened_at,
            "stretches": [],
        }
        self._before[DEVICE] = device
        self._stretch = Stretch(step, opened_at, step, opened_at)
        self._opened = time.monotonic()

    def waited(self, seconds: float) -> None:
        self._stretch = replace(self._stretch, wait_seconds=self._stretch.wait_seconds + seconds)

    def paused(self, seconds: float) -> None:
        self._stretch = replace(self._stretch, pause_seconds=self._stretch.pause_seconds + seconds)

    def seen(self, step: int) -> None:
        """Write that this step was reached."""
        self._stretch = replace(self._stretch, last_step=step, seen_at=self._now())
        values = {**self._before, "stretches": [*self._before["stretches"], asdict(self._stretch)]}
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps(values))

    def _now(self) -> float:
        """The time by the clock as it was when the stretch began, whatever it was set to since."""
        return self._stretch.opened_at + time.monotonic() - self._opened


def _read(path: Path) -> dict[str, Any] | None:
    """What earlier starts wrote. A power cut can leave an empty file, which must not end the training that it
    measures."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError:
        print(f"{path} is damaged: the time of earlier starts counts as waiting", flush=True)
        return None


def device_of(data: bytes) -> str:
    """What each rank computed on, of the content of time.json: cpu, or the accelerator's name; empty where the phase
    was trained by a version that did not write it."""
    return json.loads(data).get(DEVICE, "")


def effective_time(data: bytes) -> EffectiveTime | None:
    """Of the content of time.json; None before any time passed. A clock that was set back counts as no time."""
    values = json.loads(data)
    stretches = [Stretch(**each) for each in values["stretches"]]
    if not stretches:
        return None
    productive = paused = data_wait = lost = 0.0
    started = max(0.0, stretches[0].opened_at - values["submitted_at"])
    for number, own in enumerate(stretches):
        later = stretches[number + 1 :]
        worked = max(0.0, own.seen_at - own.opened_at - own.pause_seconds - own.wait_seconds)
        num_steps = own.last_step - own.first_step
        kept = min([own.last_step, *(each.first_step for each in later)]) - own.first_step
        share = max(0, kept) / num_steps if num_steps else 0.0
        productive += share * worked
        lost += (1 - share) * worked
        paused += own.pause_seconds
        data_wait += own.wait_seconds
        if later:
            lost += max(0.0, later[0].opened_at - own.seen_at)
    measured = EffectiveTime(productive, paused, started + data_wait, data_wait, lost)
    return measured if measured.total > 0 else None
