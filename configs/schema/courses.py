"""Courses: schedules that consecutive phases share, and the names of phases."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen

TEXT, POLICY = ("pretrain", "sft"), ("grpo", "gspo", "ppo")
PHASE_TEMPLATES = {
    "pretrain_general": TEXT,
    "pretrain_code_reasoning": TEXT,
    "mid_repo_code": TEXT,
    "mid_reasoning": TEXT,
    "mid_long_context": TEXT,
    "mid_domain": TEXT,
    "sft": ("sft",),
    "reward_model": ("reward",),
    "rl_cold_start": ("sft",),
    "rl_rejection_sampling": ("rejection_sampling",),
    "rl_reasoning": POLICY,
    "rl_agentic": POLICY,
    "rl_alignment": (*POLICY, "dpo"),
    "distillation": ("distillation",),
}
"""Names of phases, each with the kinds of objective that a phase of that name trains for."""
PhaseName = Annotated[str, Field(pattern=rf"^({'|'.join(PHASE_TEMPLATES)})(_[a-z0-9]+)*$")]
"""A phase of the recipe; a repeated or specialised one adds a suffix: mid_reasoning_2, mid_domain_medical."""


def allowed_objectives(phase: PhaseName) -> tuple[str, ...]:
    """The kinds of objective that the name of a phase allows."""
    return next(kinds for name, kinds in PHASE_TEMPLATES.items() if phase == name or phase.startswith(f"{name}_"))


class Waypoint(Frozen):
    """A step of a piecewise-constant schedule: `value` holds until this share of the course's tokens has been seen."""

    until_share: float = Field(gt=0, le=1)
    value: float = Field(ge=0)


class RouterBiasRule(Frozen):
    """How the bias of a router's expert moves after an optimizer step."""

    kind: Literal["sign", "ratio"]
    """sign: by the rate, up or down (report). ratio: by the rate times 1 - the expert's tokens over the mean (S1)."""
    max_bias: float = Field(ge=0)
    """Bound on the size of a bias (S1: 5.0); 0: none."""


class CourseRecipe(Frozen):
    """Schedules over the token axis that consecutive phases share; their positions are shares of the course's
    tokens."""

    name: str
    phases: tuple[PhaseName, ...] = Field(min_length=1)
    peak_learning_rate: float = Field(gt=0)
    """Report: 2.5e-4, for Muon with update RMS 0.2."""
    final_learning_rate: float = Field(ge=0)
    """Report: 2.5e-5 at the end of mid-training, by cosine."""
    warmup_share: float = Field(ge=0, le=1)
    """Linear from 0; the report does not give the length."""
    start_batch_tokens: int = Field(gt=0)
    peak_batch_tokens: int = Field(gt=0)
    batch_rampup_share: float = Field(ge=0, le=1)
    """Share over which the batch grows from start to peak (report: 16M -> 64M over the first 500B of 23.1T): along a
    line, in multiples of their greatest common divisor, so that copies that divide both divide every batch."""
    router_bias_rate: tuple[Waypoint, ...] = Field(min_length=1)
    """Loss-free balancing update (report: 0.001 for 15T tokens, then 0)."""
    router_bias_rule: RouterBiasRule
    mtp_loss_weight: tuple[Waypoint, ...] = Field(min_length=1)
    """Report: 0.3 for 15T tokens, then 0.1."""
    balance_loss_weight: float = Field(ge=0)
    """Sequence-level balance loss (report: 1e-4)."""

    @model_validator(mode="after")
    def _batch_grows(self) -> Self:
        if self.peak_batch_tokens < self.start_batch_tokens:
            raise ValueError(
                f"course {self.name}: peak_batch_tokens ({self.peak_batch_tokens}) is below start_batch_tokens "
                f"({self.start_batch_tokens})"
            )
        for name in ("router_bias_rate", "mtp_loss_weight"):
            shares = [waypoint.until_share for waypoint in getattr(self, name)]
            if shares != sorted(set(shares)) or shares[-1] != 1.0:
                raise ValueError(f"course {self.name}: {name} has until_share {shares}: let them rise and end at 1.0")
        return self


class CourseSection(Frozen):
    recipe: CourseRecipe
