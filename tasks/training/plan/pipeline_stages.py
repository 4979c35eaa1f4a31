"""Divides trunk layers among the stages of a pipeline. Pure: `glm46 plan` and the refusals use it without torch.

The first stage also holds the embedding. The last one also holds the MTP layer and the unembedding, which both the
trunk and MTP pass through. Each counts as one layer (the unembedding once per pass), and all stages get as equal a sum
as whole layers allow: 92 layers on 8 stages are 11 + 6 x 12 + 9. The number of stages need not divide the number of
layers. Public recipes of 92 layers on 8 stages fail because they demand it (Megatron-Bridge #5551).
"""

from __future__ import annotations

from configs.schema import ModelRecipe


def stage_layers(recipe: ModelRecipe, num_stages: int) -> tuple[range, ...]:
    """Trunk layers by stage, at least one each."""
    assert num_stages <= recipe.num_hidden_layers, (
        num_stages,
        recipe.num_hidden_layers,
    )  # tasks/training/plan/topology.py refused it
    beside = [0] * num_stages
    beside[0] += 1
    beside[-1] += 1 + 2 * recipe.num_nextn_predict_layers
    depths = [1] * num_stages
    for _ in range(recipe.num_hidden_layers - num_stages):
        # Equal sums: each layer goes to the stage with the smallest sum so far.
        stage = min(range(num_stages), key=lambda stage: (depths[stage] + beside[stage], beside[stage], stage))
        depths[stage] += 1
    starts = [sum(depths[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + depth) for start, depth in zip(starts, depths, strict=True))


def describe_stages(recipe: ModelRecipe, num_stages: int) -> str:
    """Depths in order, runs of equal ones shortened: 11 + 6 x 12 + 9."""
    runs: list[list[int]] = []
    for layers in stage_layers(recipe, num_stages):
        if runs and runs[-1][0] == len(layers):
            runs[-1][1] += 1
        else:
            runs.append([len(layers), 1])
    return " + ".join(str(depth) if times == 1 else f"{times} x {depth}" for depth, times in runs)
