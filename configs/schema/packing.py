"""How token ids become the rows of a phase: mixtures and packing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from configs.schema.base import Domain, Frozen

Packing = Literal["stream", "best_fit"]
"""stream: documents one after the other, cut where rows end, attention over document ends (report, pre-training).
best_fit: whole documents in rows with the fewest gaps, attention inside documents, no target across them (report,
mid-training; every SFT)."""
MixtureWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MixtureWaypoint(Frozen):
    """A mixture at one position of its phase; between two waypoints it changes linearly."""

    at_share: float = Field(ge=0, le=1)
    """Share of the phase's tokens."""
    mixture: dict[Domain, MixtureWeight] = Field(min_length=1)


def _waypoints_span_the_phase(
    mixture: dict[Domain, float] | tuple[MixtureWaypoint, ...],
) -> dict[Domain, float] | tuple[MixtureWaypoint, ...]:
    for weights in [mixture] if isinstance(mixture, dict) else [waypoint.mixture for waypoint in mixture]:
        if not any(weights.values()):
            raise ValueError(f"mixture {weights} gives every domain the weight 0: give one of them more")
    shares = [0.0, 1.0] if isinstance(mixture, dict) else [waypoint.at_share for waypoint in mixture]
    if len(shares) < 2 or shares != sorted(set(shares)) or (shares[0], shares[-1]) != (0.0, 1.0):
        raise ValueError(
            f"mixture has waypoints at_share {shares}: let them rise from 0.0 to 1.0, or state one mixture without "
            f"waypoints"
        )
    return mixture


def _mixture_kind(mixture: object) -> str:
    """Chosen before the mixture is read, so that an error message names the kind that was written."""
    return "waypoints" if isinstance(mixture, list | tuple) else "weights"


Mixture = Annotated[
    Annotated[dict[Domain, MixtureWeight], Field(min_length=1), Tag("weights")]
    | Annotated[tuple[MixtureWaypoint, ...], Field(min_length=1), Tag("waypoints")],
    Discriminator(_mixture_kind),
    AfterValidator(_waypoints_span_the_phase),
]
"""One mixture for a whole phase, or waypoints from its first token to its last."""


def mixture_waypoints(mixture: Mixture) -> tuple[MixtureWaypoint, ...]:
    """A single mixture as two equal waypoints."""
    if not isinstance(mixture, dict):
        return mixture
    return MixtureWaypoint(at_share=0.0, mixture=mixture), MixtureWaypoint(at_share=1.0, mixture=mixture)


class PackingRecipe(Frozen):
    """The part of a phase that decides its packed rows. Made by `PhaseRecipe.packing_recipe`."""

    num_tokens: int = Field(gt=0)
    sequence_length: int = Field(gt=1)
    packing: Packing
    mixture: Mixture
    bucket_weights: tuple[Annotated[float, Field(ge=0)], ...]
    max_epochs: float = Field(gt=0)
    fim_rate: float = Field(ge=0, le=1)
    seed: int

    @property
    def waypoints(self) -> tuple[MixtureWaypoint, ...]:
        """The waypoints of the mixture; a single mixture gives two equal ones."""
        return mixture_waypoints(self.mixture)

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Domains with a weight at some position of the phase, in the order in which they are first named."""
        return tuple(
            dict.fromkeys(name for point in self.waypoints for name, weight in point.mixture.items() if weight)
        )


class PairPackingRecipe(Frozen):
    """The settings on which the token ids of preference pairs depend. Made by the flow."""

    sequence_length: int = Field(gt=1)
