"""Counts the optimizer steps of a phase without a loop over them: 23 trillion tokens are planned in milliseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema import TrainingRecipe
from tasks.training.schedule.schedules import batch_rampup_tokens, plan_step


@dataclass(frozen=True)
class PhaseSteps:
    """Figures over all steps of a phase, as the sequence of `plan_step` gives them."""

    num_steps: int
    first_rows: int
    """Rows of the first step."""
    min_rows: int
    max_rows: int
    common_rows: int
    """Greatest common divisor of the rows of all steps."""
    smallest_at_tokens: int
    """Course position of the first step that has min_rows."""
    first_end_tokens: int
    """Course position after the first step: where its learning rate is read."""


_RECENT: list[tuple[TrainingRecipe, PhaseSteps]] = []


def summarize_steps(recipe: TrainingRecipe) -> PhaseSteps:
    """Walks the steps while the batch grows. After that all are alike except the last, which takes the rest of the
    budget. The recipe asked for last is not walked again: a plan asks for each phase's many times."""
    for known, steps in _RECENT:
        if known is recipe:
            return steps
    steps = _walk(recipe)
    _RECENT[:] = [(recipe, steps)]
    return steps


def _walk(recipe: TrainingRecipe) -> PhaseSteps:
    total_rows = recipe.num_tokens // recipe.sequence_length
    sizes: list[tuple[int, int]] = []
    row = 0
    while row < total_rows:
        plan = plan_step(recipe, row * recipe.sequence_length)
        sizes.append((plan.num_rows, plan.start_tokens))
        row += plan.num_rows
        if plan.start_tokens >= batch_rampup_tokens(recipe.course, recipe.course_num_tokens):
            break
    repeats, rest = divmod(total_rows - row, sizes[-1][0])
    smallest = min(sizes)
    if rest and rest < smallest[0]:
        smallest = (rest, recipe.course_start_tokens + (total_rows - rest) * recipe.sequence_length)
    return PhaseSteps(
        num_steps=len(sizes) + repeats + bool(rest),
        first_rows=sizes[0][0],
        min_rows=smallest[0],
        max_rows=max(size for size, _ in sizes),
        common_rows=math.gcd(*(size for size, _ in sizes), rest),
        smallest_at_tokens=smallest[1],
        first_end_tokens=recipe.course_start_tokens + sizes[0][0] * recipe.sequence_length,
    )
