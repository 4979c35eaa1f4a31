"""What a scale means before anything runs: parameters, tokens, steps, compute and memory, all by formula."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from model.counts import count_parameters, kv_cache_bytes_per_token, training_flops_per_token, training_state_bytes
from tasks.training.schedules import learning_rate_at, sequences_at

if TYPE_CHECKING:
    from configs.schema import Scale


class PlannedParameters(BaseModel):
    """Counts under the rules that public numbers use (model/counts.py)."""

    body: int
    mtp_layers: int
    embeddings: int
    body_and_mtp: int
    total: int
    active: int


class PlannedPhase(BaseModel):
    """One phase on its course."""

    name: str
    objective: str
    num_tokens: int
    num_steps: int
    sequence_length: int
    first_learning_rate: float
    last_learning_rate: float
    training_flops: float
    """Floating-point operations of the whole phase, forward and backward."""


class Plan(BaseModel):
    """The whole scale."""

    scale: str
    parameters: PlannedParameters
    phases: tuple[PlannedPhase, ...]
    training_state_bytes: int
    """Weights, gradients, master weights and momentum over all ranks, without activations."""
    kv_cache_bytes_per_token: int

    def describe(self) -> str:
        """The plan in lines for a terminal."""
        counts = self.parameters
        lines = [
            f"scale {self.scale}",
            f"  parameters   {counts.total:,} in all: body {counts.body:,}, MTP {counts.mtp_layers:,}, embeddings {counts.embeddings:,}",
            f"  active       {counts.active:,} per predicted token",
            f"  state        {self.training_state_bytes / 2**30:,.2f} GiB: weights, gradients, master weights, momentum, all ranks",
            f"  KV cache     {self.kv_cache_bytes_per_token:,} bytes per token in bf16",
        ]
        for phase in self.phases:
            lines.append(
                f"  {phase.name:<24} {phase.objective:<9} {phase.num_tokens:,} tokens in {phase.num_steps:,} steps, sequences of "
                f"{phase.sequence_length}, learning rate {phase.first_learning_rate:.3g} .. {phase.last_learning_rate:.3g}, "
                f"{phase.training_flops:.3g} FLOPs"
            )
        return "\n".join(lines)


def plan_training(scale: Scale) -> Plan:
    """The plan of a scale. Raises ValueError where budgets and schedules do not fit."""
    counts = count_parameters(scale.model.recipe)
    return Plan(
        scale=scale.scale,
        parameters=PlannedParameters(
            body=counts.body, mtp_layers=counts.mtp_layers, embeddings=counts.embeddings,
            body_and_mtp=counts.body_and_mtp, total=counts.total, active=counts.active,
        ),
        phases=tuple(_plan_phase(scale, index) for index in range(len(scale.phases))),
        training_state_bytes=training_state_bytes(scale.model.recipe),
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(scale.model.recipe),
    )  # fmt: skip


def _plan_phase(scale: Scale, index: int) -> PlannedPhase:
    recipe = scale.training_recipe(scale.phases[index])
    end = recipe.course_start_tokens + recipe.num_tokens
    tokens, num_steps, first = recipe.course_start_tokens, 0, 0.0
    while tokens < end:
        tokens = min(end, tokens + sequences_at(recipe.course, recipe.sequence_length, tokens) * recipe.sequence_length)
        num_steps += 1
        first = first or learning_rate_at(recipe.course, recipe.course_num_tokens, tokens)
    return PlannedPhase(
        name=recipe.phase, objective=recipe.objective.kind, num_tokens=recipe.num_tokens, num_steps=num_steps,
        sequence_length=recipe.sequence_length,
        first_learning_rate=first, last_learning_rate=learning_rate_at(recipe.course, recipe.course_num_tokens, end),
        training_flops=training_flops_per_token(recipe.model, recipe.sequence_length) * recipe.num_tokens,
    )  # fmt: skip
