"""How many answers of a policy phase are sampled at once, as many as rollout_cache_bytes hold keys and values for.

Pure: the plan uses it too.
"""

from __future__ import annotations

from configs.schema import TrainingRecipe, TrainingResources
from model.architecture.counts import kv_cache_bytes_per_token

BLOCK_POSITIONS = 16
"""Caches are made in blocks of this many positions (model/kernels/decoding_kernel.cpp)."""


def answer_cache_bytes(recipe: TrainingRecipe, resources: TrainingResources) -> int:
    """Bytes of keys and values of one answer of full length with its prompt, for a rank's share of the heads and
    layers. The MTP layer has a cache too."""
    positions = -(-(recipe.sequence_length + 1) // BLOCK_POSITIONS) * BLOCK_POSITIONS
    element = 2 if recipe.dtype == "bfloat16" else 4
    num_layers = recipe.model.num_hidden_layers
    per_layer = kv_cache_bytes_per_token(recipe.model, element) // num_layers
    layers = num_layers + recipe.model.num_nextn_predict_layers
    return positions * per_layer * layers // (resources.tensor_parallel * resources.pipeline_parallel)


def answers_at_once(recipe: TrainingRecipe, resources: TrainingResources, num_answers: int) -> int:
    """At least one, whatever rollout_cache_bytes is: tasks/training/plan/topology.py refuses a budget that holds
    none."""
    return max(1, min(num_answers, resources.rollout_cache_bytes // answer_cache_bytes(recipe, resources)))
