"""What is refused before anything starts: what has no code yet, then topologies that no engine could train, each with the fix."""

from __future__ import annotations

from configs.schema import PolicyObjective, TrainingRecipe, TrainingResources
from tasks.training.topology import refuse_impossible_topology

OBJECTIVES = ("pretrain", "sft", "grpo")
LAUNCHERS = ("local",)


def refuse_impossible_training(recipe: TrainingRecipe, resources: TrainingResources) -> None:
    """Raises ValueError that names the values and the fix."""
    if recipe.objective.kind not in OBJECTIVES:
        raise ValueError(f"phase {recipe.phase}: objective {recipe.objective.kind} cannot be trained, only {', '.join(OBJECTIVES)} can")
    if recipe.adapter.kind != "none":
        raise ValueError(f"phase {recipe.phase}: adapter.kind {recipe.adapter.kind} cannot be trained: set adapter.kind to none")
    if resources.launcher not in LAUNCHERS:
        raise ValueError(f"phase {recipe.phase}: launcher {resources.launcher} is not available: set launcher to {LAUNCHERS[0]}")
    if isinstance(recipe.objective, PolicyObjective) and resources.num_ranks > 1:
        raise ValueError(f"phase {recipe.phase}: num_ranks {resources.num_ranks} cannot train {recipe.objective.kind}: set num_ranks to 1")
    if isinstance(recipe.objective, PolicyObjective) and resources.zero_stage > 0:
        raise ValueError(
            f"phase {recipe.phase}: zero_stage {resources.zero_stage} cannot train {recipe.objective.kind}: answers are sampled from the "
            "weights as they lie, by one rank, which has nobody to divide them with. Set zero_stage to 0"
        )
    refuse_impossible_topology(recipe, resources)


def refuse_too_few_prompts(recipe: TrainingRecipe, num_prompts: int) -> None:
    """Raises ValueError where a policy phase would ask its prompts more often than max_epochs."""
    assert isinstance(recipe.objective, PolicyObjective), recipe.objective
    num_groups = recipe.num_tokens // recipe.sequence_length // recipe.objective.samples_per_prompt
    if num_groups > recipe.max_epochs * num_prompts:
        raise ValueError(
            f"phase {recipe.phase}: {num_groups} groups of answers need {num_groups / num_prompts:.1f} passes over {num_prompts} prompts, "
            f"max_epochs is {recipe.max_epochs}: raise it or synthesize.num_prompts, or lower num_tokens"
        )
