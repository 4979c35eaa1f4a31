"""Spikes: which step is one, what is kept of it, and which steps are left out after training has gone back.

spikes.jsonl in the work directory is both evidence and memory: a rollback that a kill interrupts reads there what to
leave out. What was left out is part of the state. So the result does not depend on where checkpoints were or how
often the run was killed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.files.atomic_files import replace_durably
from configs.schema import Frozen, SpikeRecipe

SPIKES_FILE = "spikes.jsonl"
MAD_TO_DEVIATION = 1.4826
"""1 over the 0.75 quantile of the normal distribution."""


class TakenStep(Frozen):
    """What the next steps are compared with."""

    loss: float
    grad_norm: float


class SkippedSteps(Frozen):
    """Steps whose rows are passed over; the last one spiked."""

    first_step: int
    last_step: int


class SpikeError(RuntimeError):
    """A step spiked; raised on all ranks before the optimizer changed anything."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(f"step {spike.step}: {spike.reason}")
        self.spike = spike


class TooManySpikesError(RuntimeError):
    """A step spiked and no rollback is left."""


@dataclass(frozen=True)
class Spike:
    """A step that is not taken, in the numbers it was judged by."""

    step: int
    reason: str
    loss: float
    grad_norm: float
    median_loss: float | None
    """Of the window; None before it is full, as are the next two."""
    loss_deviation: float | None
    """Standard deviation of the window's losses, estimated from their median absolute deviation."""
    median_grad_norm: float | None


def find_spike(
    recipe: SpikeRecipe, recent: Sequence[TakenStep], step: int, loss: float, grad_norm: float, loss_is_a_measure: bool
) -> Spike | None:
    """A `Spike` where the step is one, None where it is sound. A surrogate loss, which is no measure of the model, only
    has to be finite."""
    is_full = len(recent) >= recipe.window_steps
    median_loss, deviation = median_and_deviation([taken.loss for taken in recent]) if is_full else (None, None)
    median_norm = statistics.median(taken.grad_norm for taken in recent) if is_full else None
    reasons = []
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        reasons.append(f"loss {loss:g} and gradient norm {grad_norm:g} are not both finite")
    elif median_loss is not None and deviation is not None and median_norm is not None:
        bound = max(median_loss + recipe.max_loss_deviations * deviation, recipe.min_loss_ratio * median_loss)
        if loss_is_a_measure and loss > bound:
            reasons.append(
                f"loss {loss:g} is above {bound:g} (median {median_loss:g}, standard deviation {deviation:g})"
            )
        if grad_norm > recipe.max_grad_norm_ratio * median_norm:
            reasons.append(
                f"gradient norm {grad_norm:g} is above {recipe.max_grad_norm_ratio:g} x the median {median_norm:g}"
            )
    if not reasons:
        return None
    return Spike(
        step,
        f"{' and '.join(reasons)} of {recipe.window_steps} steps" if is_full else reasons[0],
        loss,
        grad_norm,
        median_loss,
        deviation,
        median_norm,
    )


def median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the standard deviation that normally distributed values of this median absolute deviation would
    have."""
    median = statistics.median(values)
    return median, MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in values)


def extend_window(
    recipe: SpikeRecipe, recent: tuple[TakenStep, ...], loss: float, grad_norm: float
) -> tuple[TakenStep, ...]:
    """The window after one more sound step."""
    return (*recent, TakenStep(loss=loss, grad_norm=grad_norm))[-recipe.window_steps :]


def skipped_by(recipe: SpikeRecipe, spike: Spike) -> SkippedSteps:
    """Which steps are left out because of a spike."""
    return SkippedSteps(first_step=max(1, spike.step - recipe.skip_steps + 1), last_step=spike.step)


def is_skipped(skipped: Sequence[SkippedSteps], step: int) -> bool:
    return any(part.first_step <= step <= part.last_step for part in skipped)


def num_counted_rollbacks(recipe: SpikeRecipe, skipped: Sequence[SkippedSteps], step: int) -> int:
    """Rollbacks because of spikes within the window of steps before this one."""
    return sum(part.last_step > step - recipe.rollback_window_steps for part in skipped)


def read_skipped(work_dir: Path) -> tuple[SkippedSteps, ...]:
    """The steps that the spikes so far left out, in the order of the spikes."""
    lines = [line for line in _lines(work_dir) if line["rolled_back"]]
    return tuple(SkippedSteps(first_step=line["first_skipped_step"], last_step=line["step"]) for line in lines)


def record_spike(
    work_dir: Path, spike: Spike, skipped: SkippedSteps, rolled_back: bool, evidence: dict[str, object]
) -> None:
    """Append a spike durably, unless it is recorded already by a start that was killed while it rolled back."""
    line = {
        "step": spike.step,
        "first_skipped_step": skipped.first_step,
        "rolled_back": rolled_back,
        "reason": spike.reason,
        "loss": _json_number(spike.loss),
        "grad_norm": _json_number(spike.grad_norm),
        "median_loss": spike.median_loss,
        "loss_deviation": spike.loss_deviation,
        "median_grad_norm": spike.median_grad_norm,
        **evidence,
    }
    lines = _lines(work_dir)
    if any(known["step"] == spike.step and known["rolled_back"] == rolled_back for known in lines):
        return
    text = "".join(json.dumps(each, allow_nan=False) + "\n" for each in (*lines, line))
    replace_durably(work_dir / SPIKES_FILE, text.encode())


def too_many_spikes(
    recipe: SpikeRecipe, spike: Spike, num_rollbacks: int, position: str, work_dir: Path
) -> TooManySpikesError:
    """The error that the user reads when training stops."""
    return TooManySpikesError(
        f"step {spike.step}: {spike.reason}; {position}. The optimizer step was not taken, and after {num_rollbacks} "
        f"rollbacks in {recipe.rollback_window_steps} steps "
        f"(spikes.max_rollbacks {recipe.max_rollbacks}) training stops. Losses, norms and the documents of every "
        f"spike are in "
        f"{work_dir / SPIKES_FILE}: look at these documents, lower the learning rate, or raise spikes.max_rollbacks"
    )


def _lines(work_dir: Path) -> list[dict]:
    path = work_dir / SPIKES_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
