"""FLOPs that a phase takes per token of its budget, forward and backward. Pure: the plan and the record of a run use
it."""

from __future__ import annotations

from configs.schema import PpoObjective, TrainingRecipe
from model.architecture.counts import training_flops_per_token, unembedding_saved
from tasks.training.schedule.schedules import trains_mtp


def phase_flops_per_token(recipe: TrainingRecipe, attended_tokens: float, weights_are_frozen: bool = False) -> float:
    """As `training_flops_per_token`, with the critic of PPO, which has a scalar head. Sampling and scoring answers is
    not in it."""
    flops = training_flops_per_token(recipe.model, attended_tokens, weights_are_frozen, trains_mtp=trains_mtp(recipe))
    if not isinstance(recipe.objective, PpoObjective):
        return flops
    critic = recipe.critic_recipe.model
    return flops + training_flops_per_token(critic, attended_tokens) - 6 * unembedding_saved(critic)
