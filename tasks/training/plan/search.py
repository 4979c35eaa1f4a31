"""Searches the topology in which a phase's steps take the least time on its ranks: `glm46 plan SCALE --search`.

It tries tensor, pipeline, context and expert parallelism, recomputation, rows per micro-batch, and compiling where no
axis divides the layers. The ZeRO stage is another one only where none fits at its own; everything else stays. What no
engine can train, what qlora cannot divide, and what needs more than MEMORY_USED of a rank's memory is left out. Tensor
parallelism stays inside a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from configs.schema import TrainingRecipe, TrainingResources
from tasks.training.plan.launch_rules import unavailable_training, uncompiled_layers
from tasks.training.plan.machine import MEMORY_USED, Machine
from tasks.training.plan.rank_memory import rank_memory
from tasks.training.plan.step_time import StepTime, step_time
from tasks.training.plan.topology import data_parallel, impossible_topology

PIPELINES, CONTEXTS, ROWS = (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4, 8)
OTHER_ZERO_STAGES = (1, 3)
"""1 goes with a pipeline, 3 also divides the weights."""
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Found:
    """A topology with its step and the memory of its fullest rank."""

    resources: TrainingResources
    step: StepTime
    memory_bytes: int

    def describe(self) -> str:
        """In one line."""
        own = self.resources
        compiled = ", layers compiled" if own.compile_layers else ""
        filled = f"tokens {own.micro_batch_tokens}" if own.micro_batch_tokens else f"rows {own.micro_batch_sequences}"
        return (
            f"data {data_parallel(own)} x tensor {own.tensor_parallel} x pipeline {own.pipeline_parallel} x context "
            f"{own.context_parallel}, experts {own.expert_parallel}, ZeRO {own.zero_stage}, recompute {own.recompute}, "
            f"{filled}{compiled}: {self.step.seconds:.3g} s a step, {self.step.mfu:.1%} of peak, "
            f"{self.memory_bytes / 1e9:.1f} GB"
        )


def evaluate(recipe: TrainingRecipe, resources: TrainingResources, attended_tokens: float, machine: Machine) -> Found:
    """The topology as it is."""
    memory = rank_memory(recipe, resources).device
    return Found(resources, step_time(recipe, resources, attended_tokens, machine), memory)


def find_topology(
    recipe: TrainingRecipe, resources: TrainingResources, attended_tokens: float, machine: Machine
) -> Found | None:
    """The fastest one that fits, or None. Of equally fast ones the first tried: the one that divides less."""
    for stage in dict.fromkeys((resources.zero_stage, *OTHER_ZERO_STAGES)):
        own = resources.model_copy(update={"zero_stage": stage})
        if (found := _fastest(recipe, own, attended_tokens, machine)) is not None:
            return found
    return None


def _fastest(
    recipe: TrainingRecipe, resources: TrainingResources, attended_tokens: float, machine: Machine
) -> Found | None:
    tried = [
        (step_time(recipe, candidate, attended_tokens, machine).seconds, number, candidate)
        for number, candidate in enumerate(_candidates(resources, recipe))
    ]
    for _, _, candidate in sorted(tried, key=lambda each: each[:2]):
        if rank_memory(recipe, candidate).device <= MEMORY_USED * resources.device_memory_bytes:
            return evaluate(recipe, candidate, attended_tokens, machine)
    return None


def least_memory(recipe: TrainingRecipe, resources: TrainingResources) -> float:
    """Bytes of the fullest rank in the topology that needs least; infinite where no engine can train any. Only those
    with full recomputation and one row at a time are tried: others need more."""
    tried = _candidates(resources, recipe, recomputes=("full",), rows_at_once=(1,))
    return min((rank_memory(recipe, candidate).device for candidate in tried), default=float("inf"))


def _candidates(
    resources: TrainingResources,
    recipe: TrainingRecipe,
    recomputes: tuple[str, ...] = RECOMPUTE,
    rows_at_once: tuple[int, ...] = ROWS,
) -> Iterator[TrainingResources]:
    tensors = [size for size in (1, 2, 4, 8) if size <= resources.ranks_per_node]
    every = recipe.model.n_routed_experts
    own_reasons = set(unavailable_training(recipe, resources))  # another topology does not mend these
    experts = [size for size in range(1, every + 1) if every % size == 0]
    for tensor, pipeline, context, recompute, expert, rows in product(
        tensors, PIPELINES, CONTEXTS, recomputes, experts, rows_at_once
    ):
        candidate = resources.model_copy(
            update={
                "tensor_parallel": tensor,
                "pipeline_parallel": pipeline,
                "context_parallel": context,
                "expert_parallel": expert,
                "recompute": recompute,
                "recompute_every_layers": 1,
                "micro_batch_sequences": rows,
                "micro_batch_tokens": 0,
                "compile_layers": False,
            }
        )
        has_code = own_reasons.issuperset(unavailable_training(recipe, candidate))
        if has_code and not impossible_topology(recipe, candidate):
            yield candidate
            compiled = candidate.model_copy(update={"compile_layers": True})
            if not uncompiled_layers(recipe, compiled):
                yield compiled
