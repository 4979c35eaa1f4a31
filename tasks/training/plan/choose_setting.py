"""Chooses the setting of a phase that the plan would take instead, with its hours, its cost and the lines that set it.

A phase is searched on its own ranks (tasks/training/plan/search.py). The lines are options of `glm46 config`.
"""

from __future__ import annotations

from pydantic import BaseModel

from configs.schema import Prices, TrainingRecipe, TrainingResources
from tasks.training.plan.machine import MEMORY_USED, Machine
from tasks.training.plan.phase_flops import phase_flops_per_token
from tasks.training.plan.phase_needs import phase_needs, phase_save_interval
from tasks.training.plan.planned_needs import amount
from tasks.training.plan.search import Found, find_topology

SEARCHED = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "zero_stage",
    "recompute",
    "recompute_every_layers",
    "micro_batch_sequences",
    "micro_batch_tokens",
    "compile_layers",
    "save_interval_steps",
)
"""Settings of a phase's resources that a search may change."""
ON_CPUS = "no other setting is searched: the time of CPUs is measured or assumed, not derived from a topology"


class PlannedChoice(BaseModel):
    """The fastest setting of a phase that fits its ranks."""

    topology: str
    """In words, with seconds of a step and memory."""
    settings: tuple[str, ...]
    """`phases.NAME.resources.KEY=VALUE` of what differs; empty where the configured one is the fastest."""
    mfu: float
    hours: float
    """Of the phase, without what is lost to failures and saves, as the plan counts hours."""
    cost: float
    """Of its rank-hours, with what is lost."""
    memory_bytes: int

    def describe(self, currency: str) -> list[str]:
        """In lines: the choice, and how to set it."""
        if not self.settings:
            return ["the configured setting is the fastest that fits"]
        lines = " ".join(f"--set {setting}" for setting in self.settings)
        return [
            f"would choose {self.topology}; {self.hours:,.1f} hours, {amount(self.cost)} {currency}",
            f"glm46 config: {lines}",
        ]


def choose_setting(
    name: str,
    recipe: TrainingRecipe,
    resources: TrainingResources,
    attended_tokens: float,
    machine: Machine,
    prices: Prices,
) -> tuple[PlannedChoice | None, str]:
    """The choice, or None and the reason why there is none. `name`: of the phase in its scale's file."""
    if resources.device == "cpu":
        return None, ON_CPUS
    found = find_topology(recipe, resources, attended_tokens, machine)
    if found is None:
        return None, (
            f"no other setting: no topology of {resources.num_ranks} ranks in nodes of {resources.ranks_per_node} "
            f"trains it in {MEMORY_USED:.0%} of a rank's memory; change num_ranks, the batch or the offloading"
        )
    return _choice(name, recipe, resources, attended_tokens, machine, prices, found), ""


def _choice(
    name: str,
    recipe: TrainingRecipe,
    resources: TrainingResources,
    attended_tokens: float,
    machine: Machine,
    prices: Prices,
    found: Found,
) -> PlannedChoice:
    flops = phase_flops_per_token(recipe, attended_tokens, recipe.adapter.kind != "none") * recipe.num_tokens
    hours = flops / (resources.num_ranks * resources.peak_flops_per_second * found.step.mfu) / 3600
    saves = phase_save_interval(recipe, found.resources, hours)
    chosen = found.resources
    if not saves.is_near_enough:
        chosen = chosen.model_copy(update={"save_interval_steps": saves.best_steps})
    return PlannedChoice(
        topology=found.describe(),
        settings=tuple(
            f"phases.{name}.resources.{key}={str(getattr(chosen, key)).lower()}"
            for key in SEARCHED
            if getattr(chosen, key) != getattr(resources, key)
        ),
        mfu=found.step.mfu,
        hours=hours,
        cost=phase_needs(recipe, chosen, found.step, hours, prices, machine).cost,
        memory_bytes=found.memory_bytes,
    )
