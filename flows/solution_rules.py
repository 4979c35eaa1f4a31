"""Refuses a phase of rejection sampling that has too few right answers to train on."""

from __future__ import annotations

import math

from configs.schema import PhaseSection, mixture_waypoints
from tasks.data.records.documents import CHAT
from tasks.evaluation.sample_solutions import SampledSolutions


def refuse_too_few_solutions(phase: PhaseSection, solutions: SampledSolutions) -> None:
    """Raises ValueError where the phase would read the kept answers more often than max_epochs, or none is kept."""
    recipe = phase.recipe
    shares = [point.mixture[CHAT] / sum(point.mixture.values()) for point in mixture_waypoints(recipe.mixture)]
    least = math.ceil(recipe.num_tokens * min(shares) / recipe.max_epochs)
    if solutions.num_kept and solutions.num_kept_tokens >= least:
        return
    reached = ", ".join(f"pass@{point.k} {point.share:.4f}" for point in solutions.pass_at)
    raise ValueError(
        f"phase {phase.name}: {solutions.num_right} of {solutions.num_answers} answers to {solutions.num_prompts} "
        f"prompts are right ({reached or 'no prompt leaves room for an answer'}); {solutions.num_kept} of them are "
        f"kept and hold {solutions.num_kept_tokens} tokens, num_tokens ({recipe.num_tokens}) in max_epochs "
        f"({recipe.max_epochs:g}) needs at least {least}: raise objective.samples_per_prompt, max_kept_per_prompt or "
        f"max_epochs, bring more prompts (synthesize.num_prompts for generated ones), lower num_tokens, or start from "
        f"weights that answer better"
    )
