"""Computes how many of a phase's tokens each domain has: by one mixture, or by waypoints and lines.

At a waypoint the weights are normalised over the domains that have text (mixture_shares.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.packing.mixture_shares import MixtureSchedule

if TYPE_CHECKING:
    from configs.schema import PackingRecipe

NOTHING_READ: Mapping[str, float] = MappingProxyType({})
"""Epochs by domain at the start of a course."""


def schedule_mixture(recipe: PackingRecipe, available: dict[str, int]) -> MixtureSchedule:
    """The schedule over the domains with tokens. Raises ValueError where there are none at a waypoint."""
    constant = isinstance(recipe.mixture, dict)
    present = sorted(domain for domain in recipe.domains if available[domain])
    rows = []
    for point in recipe.waypoints:
        weights: dict[str, float] = {**point.mixture}
        row = np.array([float(weights.get(domain, 0.0)) for domain in present])
        if not row.sum():
            where = "" if constant else f" at_share {point.at_share}"
            raise ValueError(
                f"none of the mixture's domains {', '.join(weights)}{where} has text: name domains that the data has"
            )
        rows.append(row if constant else row / row.sum())
    return MixtureSchedule(tuple(present), np.array([point.at_share for point in recipe.waypoints]), np.array(rows))


def allot_tokens(
    recipe: PackingRecipe, available: dict[str, int], num_tokens: int, epochs_before: Mapping[str, float] = NOTHING_READ
) -> dict[str, int]:
    """Tokens of the whole phase per domain that has text, with an exact sum. `available`: tokens of one epoch of a
    domain; `epochs_before`: passes over it in earlier phases of the course. Raises ValueError where a domain would be
    read more often than max_epochs."""
    schedule = schedule_mixture(recipe, available)
    weights = dict(
        zip(
            schedule.domains,
            (schedule.weights[0] if schedule.is_constant else schedule.until(1.0)).tolist(),
            strict=True,
        )
    )
    shares = split_tokens(weights, num_tokens)
    held = {domain: (recipe.max_epochs - epochs_before.get(domain, 0.0)) * available[domain] for domain in weights}
    over = {domain: amount for domain, amount in shares.items() if amount > held[domain]}
    if over:
        fits = _fitting_tokens(recipe, held, weights)
        worst = "; ".join(
            f"{domain} has {available[domain]:,} tokens, {amount:,} are asked for"
            + (f" after {epochs_before[domain]:.2f} passes in earlier phases" if epochs_before.get(domain) else "")
            for domain, amount in over.items()
        )
        fix = (
            f"lower num_tokens to at most {fits:,}, raise max_epochs, or add text"
            if fits
            else "raise max_epochs, or add text"
        )
        raise ValueError(
            f"the mixture needs more than max_epochs ({recipe.max_epochs}) passes over the course: {worst}; {fix}"
        )
    return shares


def slots_of(recipe: PackingRecipe, num_rows: int) -> int:
    """Tokens that rows need: in a stream a row shares its last target with the next row, in best fit each has its
    own."""
    return (
        num_rows * recipe.sequence_length + 1 if recipe.packing == "stream" else num_rows * (recipe.sequence_length + 1)
    )


def _fitting_tokens(recipe: PackingRecipe, held: dict[str, float], weights: dict[str, float]) -> int:
    """The largest budget of whole rows for which no domain gives more than it holds up to max_epochs."""
    total = sum(weights.values())
    num_rows = (
        int(min(held[domain] * total / weight for domain, weight in weights.items() if weight))
        // recipe.sequence_length
    )
    low, high = 0, num_rows + 2  # rounding to whole tokens may spare one
    while high - low > 1:
        middle = (low + high) // 2
        fits = all(amount <= held[domain] for domain, amount in split_tokens(weights, slots_of(recipe, middle)).items())
        low, high = (middle, high) if fits else (low, middle)
    return low * recipe.sequence_length


def split_tokens(weights: dict[str, float], num_tokens: int) -> dict[str, int]:
    """`num_tokens` divided by weight, with an exact sum: the rest goes to the largest remainders."""
    total = sum(weights.values())
    exact = {domain: num_tokens * weight / total for domain, weight in weights.items()}
    shares = {domain: math.floor(amount) for domain, amount in exact.items()}
    for domain in sorted(weights, key=lambda name: (shares[name] - exact[name], name))[
        : num_tokens - sum(shares.values())
    ]:
        shares[domain] += 1
    return shares
