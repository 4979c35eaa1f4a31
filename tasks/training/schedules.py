"""What changes along a course, as functions of its token position: learning rate, batch and rows, router bias rate, MTP weight.

A course is the token axis that consecutive phases share, so a function of the position needs no state and no restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema import CourseRecipe, TrainingRecipe, Waypoint


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step: rows [first_row, first_row + num_rows) of the phase, at which position of the course."""

    first_row: int
    num_rows: int
    start_tokens: int
    """Course position before the step."""
    end_tokens: int


def learning_rate_at(course: CourseRecipe, course_num_tokens: int, tokens: int) -> float:
    """Rate of the optimizer step that ends at `tokens`: linear from 0 to the peak, then a cosine to the final rate at the course's end.

    The step's end and not its start, so that the first step moves and the last one has the final rate.
    """
    if tokens < course.warmup_tokens:
        return course.peak_learning_rate * tokens / course.warmup_tokens
    progress = min(1.0, (tokens - course.warmup_tokens) / max(1, course_num_tokens - course.warmup_tokens))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return course.final_learning_rate + (course.peak_learning_rate - course.final_learning_rate) * cosine


def batch_tokens_at(course: CourseRecipe, tokens: int) -> int:
    """Tokens per optimizer step for the step that starts at `tokens`."""
    if tokens >= course.batch_rampup_tokens:
        return course.peak_batch_tokens
    growth = course.peak_batch_tokens - course.start_batch_tokens
    return course.start_batch_tokens + growth * tokens // course.batch_rampup_tokens


def value_at(waypoints: tuple[Waypoint, ...], tokens: int) -> float:
    """Value of a piecewise-constant schedule for the step that starts at `tokens`. Raises ValueError behind the last waypoint."""
    for waypoint in waypoints:
        if tokens < waypoint.until_tokens:
            return waypoint.value
    raise ValueError(f"schedule ends at {waypoints[-1].until_tokens} tokens, but the course goes on at {tokens}: extend its last waypoint")


def sequences_at(course: CourseRecipe, sequence_length: int, tokens: int) -> int:
    """Sequences of the step that starts at `tokens`: the batch rounded to whole sequences, at least one."""
    return max(1, round(batch_tokens_at(course, tokens) / sequence_length))


def plan_step(recipe: TrainingRecipe, num_tokens: int) -> StepPlan:
    """The step that starts after `num_tokens` of the phase; the last one takes what the budget leaves."""
    first_row, total_rows = num_tokens // recipe.sequence_length, recipe.num_tokens // recipe.sequence_length
    start_tokens = recipe.course_start_tokens + num_tokens
    num_rows = min(sequences_at(recipe.course, recipe.sequence_length, start_tokens), total_rows - first_row)
    return StepPlan(first_row, num_rows, start_tokens, start_tokens + num_rows * recipe.sequence_length)
