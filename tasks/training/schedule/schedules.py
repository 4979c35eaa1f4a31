"""Learning rate, batch and rows, router bias rate and MTP weight as functions of a course's token position.

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
    """Rate of the optimizer step that ends at `tokens`: linear from 0 to the peak, then a cosine to the final rate at
    the course's end.

    It takes the step's end and not its start, so that the first step moves and the last one has the final rate.
    """
    warmup_tokens = round(course.warmup_share * course_num_tokens)
    if tokens < warmup_tokens:
        return course.peak_learning_rate * tokens / warmup_tokens
    progress = min(1.0, (tokens - warmup_tokens) / max(1, course_num_tokens - warmup_tokens))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return course.final_learning_rate + (course.peak_learning_rate - course.final_learning_rate) * cosine


def batch_rampup_tokens(course: CourseRecipe, course_num_tokens: int) -> int:
    """Tokens over which the batch grows."""
    return round(course.batch_rampup_share * course_num_tokens)


def batch_tokens_at(course: CourseRecipe, course_num_tokens: int, tokens: int) -> int:
    """Tokens per optimizer step for the step that starts at `tokens`: between the first and the last batch the nearest
    multiple of their greatest common divisor to the line from one to the other.

    So copies and micro-batches that divide these two divide every batch of the growth, and no rank computes a filler.
    The rule knows nothing of a topology, which must not change a result."""
    rampup_tokens = batch_rampup_tokens(course, course_num_tokens)
    if tokens >= rampup_tokens:
        return course.peak_batch_tokens
    multiple = math.gcd(course.start_batch_tokens, course.peak_batch_tokens)
    num_multiples = (course.peak_batch_tokens - course.start_batch_tokens) // multiple
    return course.start_batch_tokens + multiple * ((2 * num_multiples * tokens + rampup_tokens) // (2 * rampup_tokens))


def value_at(waypoints: tuple[Waypoint, ...], course_num_tokens: int, tokens: int) -> float:
    """Value of a piecewise-constant schedule for the step that starts at `tokens`, a position before the course's
    end."""
    assert tokens < course_num_tokens, (tokens, course_num_tokens)
    return next(waypoint.value for waypoint in waypoints if tokens < round(waypoint.until_share * course_num_tokens))


def sequences_at(course: CourseRecipe, course_num_tokens: int, sequence_length: int, tokens: int) -> int:
    """Sequences of the step that starts at `tokens`: the batch rounded to whole sequences, at least one."""
    return max(1, round(batch_tokens_at(course, course_num_tokens, tokens) / sequence_length))


def plan_step(recipe: TrainingRecipe, num_tokens: int) -> StepPlan:
    """The step that starts after `num_tokens` of the phase; the last one takes the rest of the budget."""
    first_row, total_rows = num_tokens // recipe.sequence_length, recipe.num_tokens // recipe.sequence_length
    start_tokens = recipe.course_start_tokens + num_tokens
    num_rows = min(
        sequences_at(recipe.course, recipe.course_num_tokens, recipe.sequence_length, start_tokens),
        total_rows - first_row,
    )
    return StepPlan(first_row, num_rows, start_tokens, start_tokens + num_rows * recipe.sequence_length)


def trains_mtp(recipe: TrainingRecipe) -> bool:
    """Whether the MTP loss weighs anything in some step of the phase."""
    return any(value > 0 for value in _mtp_weights(recipe))


def rests_mtp(recipe: TrainingRecipe) -> bool:
    """Whether the MTP loss weighs nothing in some step of the phase."""
    return any(value == 0 for value in _mtp_weights(recipe))


def _mtp_weights(recipe: TrainingRecipe) -> list[float]:
    start, stop = recipe.course_start_tokens, recipe.course_start_tokens + recipe.num_tokens
    values, begun = [], 0
    for waypoint in recipe.course.mtp_loss_weight:
        ends = round(waypoint.until_share * recipe.course_num_tokens)
        if begun < stop and ends > start:
            values.append(waypoint.value)
        begun = ends
    return values
