"""The smaller worlds with which a phase may go on where nodes are missing.

A world is a number of whole nodes. The axes and the batch stay, so that only the copies of the model become fewer: the
losses are those of the full world but for the order of sums.
"""

from __future__ import annotations

from configs.schema import TrainingRecipe, TrainingResources
from tasks.training.plan.rank_memory import rank_memory
from tasks.training.plan.topology import impossible_topology


def num_nodes(resources: TrainingResources) -> int:
    """Nodes of a job; with the launcher `local` it has one."""
    return 1 if resources.launcher == "local" else resources.num_ranks // resources.ranks_per_node


def smaller_worlds(recipe: TrainingRecipe, resources: TrainingResources) -> list[TrainingResources]:
    """Those that can be trained and need no more memory than a rank has, the largest first."""
    missing = range(1, min(resources.queue.max_missing_nodes, num_nodes(resources) - 1) + 1)
    worlds = [_without(resources, number) for number in missing]
    return [world for world in worlds if not reasons_against(recipe, world, resources)]


def refuse_no_smaller_world(recipe: TrainingRecipe, resources: TrainingResources) -> list[str]:
    """Why the phase cannot go on without nodes, where it is asked to; empty where it can or is not asked to."""
    asked = resources.queue.max_missing_nodes
    if not asked or smaller_worlds(recipe, resources):
        return []
    why = ["the job has one node"]
    if num_nodes(resources) > 1:
        why = reasons_against(recipe, _without(resources, 1), resources)
    return [f"queue.max_missing_nodes {asked}: no smaller world can be trained ({'; '.join(why)}). Set it to 0"]


def reasons_against(recipe: TrainingRecipe, world: TrainingResources, full: TrainingResources) -> list[str]:
    """Why a smaller world cannot be trained."""
    reasons = impossible_topology(recipe, world)
    if reasons:
        return reasons
    needed, most = rank_memory(recipe, world).device, max(full.device_memory_bytes, rank_memory(recipe, full).device)
    return [f"on {num_nodes(world)} nodes a rank needs {needed} bytes of {most}"] if needed > most else []


def _without(resources: TrainingResources, missing: int) -> TrainingResources:
    """The same resources with fewer nodes, of which none may be missing."""
    return resources.model_copy(
        update={
            "num_ranks": resources.num_ranks - missing * resources.ranks_per_node,
            "queue": resources.queue.model_copy(update={"max_missing_nodes": 0}),
        }
    )
