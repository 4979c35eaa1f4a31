"""The position of a phase after an optimizer step: state.json."""

from __future__ import annotations

from pydantic import Field

from configs.schema import Frozen
from tasks.training.state.measurements import Measurement
from tasks.training.state.spikes import SkippedSteps, TakenStep


class StepLosses(Frozen):
    """Losses of one optimizer step, averaged over its targets; unweighted."""

    lm: float
    mtp: float
    balance: float


class PolicyProgress(Frozen):
    """What a policy objective carries from step to step."""

    mean_rewards: tuple[float, ...]
    """Of each step of the phase."""
    num_constant_steps: int
    """Number of latest steps in a row in which no group had two different rewards."""
    num_critic_updates: int = 0
    """Updates of the critic in this phase, which its moments have seen."""
    num_refilled: dict[str, int] = Field(default_factory=dict)
    """Further prompts of each domain that were asked in this phase in place of groups of equal rewards: the prompts of
    later groups come after them."""


class Position(Frozen):
    """state.json: the position of a phase after an optimizer step."""

    course: str
    phase: str
    step: int
    """Optimizer steps of this phase."""
    num_tokens: int
    """Tokens of this phase; the next row of the packed order is num_tokens / sequence_length."""
    course_tokens: int
    """Tokens of the course, this phase's included."""
    optimizer_steps: int
    """Steps that the moments have seen, over all phases that continued them: AdamW's bias correction counts them."""
    torch_random_state: str
    """Hex."""
    losses: StepLosses | None
    """Of the last step; none before the first."""
    policy: PolicyProgress | None
    """None where answers are not sampled."""
    recent: tuple[TakenStep, ...] = ()
    """What the next step is compared with, to find a spike."""
    skipped: tuple[SkippedSteps, ...] = ()
    """Steps of this phase that are left out, in the order in which their spikes were found: one entry per rollback."""
    best: Measurement | None = None
    """Of the measurements so far; none before the first."""
    last: Measurement | None = None
    weights_step: int | None = None
    """The step whose weights and moments these are, where the phase left those of its best measurement; else None."""
