"""What is refused before anything starts: combinations of recipe and resources that cannot be trained, with the fix."""

from __future__ import annotations

from collections.abc import Iterator

from configs.schema import TrainingRecipe, TrainingResources
from tasks.training.schedules import StepPlan, plan_step

OBJECTIVES = ("pretrain",)
ZERO_STAGES = (0,)
"""Stages whose numbers are held to stage 0's by a test."""


def refuse_impossible_training(recipe: TrainingRecipe, resources: TrainingResources) -> None:
    """Raises ValueError that names the values and the fix."""
    if recipe.objective.kind not in OBJECTIVES:
        raise ValueError(f"phase {recipe.phase}: objective {recipe.objective.kind} cannot be trained, only {', '.join(OBJECTIVES)} can")
    if resources.zero_stage not in ZERO_STAGES:
        raise ValueError(f"phase {recipe.phase}: zero_stage {resources.zero_stage} is not available: set one of {ZERO_STAGES}")
    if resources.num_ranks > 1:
        smallest = min(_steps(recipe), key=lambda plan: plan.num_rows)
        if smallest.num_rows < resources.num_ranks:
            raise ValueError(
                f"phase {recipe.phase}: {resources.num_ranks} ranks cannot share the step at {smallest.start_tokens} tokens, it has "
                f"{smallest.num_rows} sequences: set num_ranks to at most that, or change num_tokens or the batch"
            )


def _steps(recipe: TrainingRecipe) -> Iterator[StepPlan]:
    num_tokens = 0
    while num_tokens < recipe.num_tokens:
        plan = plan_step(recipe, num_tokens)
        yield plan
        num_tokens = plan.end_tokens - recipe.course_start_tokens
