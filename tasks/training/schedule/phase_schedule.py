"""Describes in words what changes along a phase: start, position on the course, RoPE base, batch growth, waypoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.training.schedule.schedules import batch_rampup_tokens

if TYPE_CHECKING:
    from configs.schema import PhaseSection, TrainingRecipe, Waypoint


def describe_schedule(recipe: TrainingRecipe, before: PhaseSection | None) -> str:
    """`before` is the phase that it starts from; None for the first. Positions are tokens of the course."""
    start, stop, total = (
        recipe.course_start_tokens,
        recipe.course_start_tokens + recipe.num_tokens,
        recipe.course_num_tokens,
    )
    course = recipe.course
    parts = [f"tokens {start:,} .. {stop:,} of course {course.name} ({start / total:.1%} .. {stop / total:.1%})"]
    if before is not None:
        parts.insert(0, f"starts from {before.name}")
    changes = before is not None and before.recipe.rope_theta != recipe.rope_theta
    earlier = f"{before.recipe.rope_theta:,.0f} -> " if before is not None and changes else ""
    parts.append(f"RoPE base {earlier}{recipe.rope_theta:,.0f}{' from its start' if changes else ''}")
    warmup = round(course.warmup_share * total)
    if start < warmup:
        parts.append(f"learning rate warms up until {warmup:,}")
    rampup = batch_rampup_tokens(course, total)
    if start < rampup:
        parts.append(
            f"batch grows {course.start_batch_tokens:,} -> {course.peak_batch_tokens:,} tokens until {rampup:,}"
        )
    parts.append(f"router bias rate {_values(course.router_bias_rate, start, stop, total)}")
    parts.append(f"MTP weight {_values(course.mtp_loss_weight, start, stop, total)}")
    return "; ".join(parts)


def _values(waypoints: Sequence[Waypoint], start: int, stop: int, total: int) -> str:
    """The values that hold between two positions, each with the token up to which it holds."""
    inside, begin = [], 0
    for waypoint in waypoints:
        end = round(waypoint.until_share * total)
        if begin < stop and end > start:
            inside.append((waypoint.value, end))
        begin = end
    return ", then ".join(f"{value:g}{f' until {end:,}' if end < stop else ''}" for value, end in inside)
