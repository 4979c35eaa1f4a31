"""What an earlier run measured of a phase, and which measurement tells a plan how fast a phase will be. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from configs.schema import TrainingRecipe, TrainingResources
from tasks.training.plan.phase_flops import phase_flops_per_token

EQUAL = ("model", "adapter", "sequence_length", "dtype", "num_threads")
"""Parts of a recipe that must be equal in a phase and in the run that tells its speed."""

KEY_DIGITS = 12
"""Of a phase's key, where the plan names it."""


@dataclass(frozen=True)
class MeasuredPhase:
    """A phase that was trained on this kind of machine."""

    key: str
    recipe: dict[str, Any]
    """As it was hashed into the key."""
    num_ranks: int
    num_tokens: int
    seconds: float
    """Steps with the sampling of answers, measurements and saves: without start, waiting and what was lost."""
    num_positions: int
    """Positions that held a document's token; the budget of a policy phase counts the padding of its answers too."""
    attended_tokens: float
    memory_bytes: int
    """The most that rank 0 held: of an accelerator, else resident, with libraries and the file cache that it maps."""
    committed_at: float


def nearest(
    measured: Iterable[MeasuredPhase], recipe: TrainingRecipe, resources: TrainingResources
) -> MeasuredPhase | None:
    """The newest measurement of work of the same kind, first of the same phase; None where there is none."""
    own = recipe.model_dump(mode="json")
    alike = [
        each for each in measured if each.num_ranks == resources.num_ranks and kind_of(each.recipe) == kind_of(own)
    ]
    return max(alike, key=lambda each: (each.recipe["phase"] == recipe.phase, each.committed_at), default=None)


def kind_of(recipe: dict[str, Any]) -> list[Any]:
    """What is equal in recipes of work of the same kind. Raises KeyError for the recipe of another version."""
    course = recipe["course"]
    return [
        *(recipe[name] for name in EQUAL),
        recipe["objective"]["kind"],
        recipe["optimizer"]["kind"],
        course["peak_batch_tokens"],
    ]


def seconds_per_flop(measured: MeasuredPhase, recipe: TrainingRecipe) -> float:
    """Of all ranks: the seconds that were measured, over what the budget would take if no position were padding. The
    plan counts the budget too, so its hours have the padding's share of that run; the recipe is of the same kind."""
    return measured.seconds / (_flops(measured, recipe) * measured.num_tokens)


def flops_per_second(measured: MeasuredPhase, recipe: TrainingRecipe) -> float:
    """Of all ranks, over the seconds that were measured, at the positions that held a token; the recipe is of the same
    kind."""
    return _flops(measured, recipe) * measured.num_positions / measured.seconds


def _flops(measured: MeasuredPhase, recipe: TrainingRecipe) -> float:
    return phase_flops_per_token(recipe, measured.attended_tokens, recipe.adapter.kind != "none")
