"""Which experts the trunk's routers choose: recorded in a pass, or given to it.

Routes are (L, B, T, K), L being the trunk's layers with experts. Replaying those of a rollout makes training compute
with the experts that sampling computed with (routing replay, arXiv 2510.11370): a score near another one is otherwise
enough for two arithmetics to choose different experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from model.architecture.moe import MixtureOfExperts, Router

FREE = -1
"""A route that nobody recorded: the router chooses."""


def trunk_routers(layers: Sequence[nn.Module]) -> list[Router]:
    """The routers of these layers, in their order."""
    return [module for layer in layers for module in layer.modules() if isinstance(module, Router)]


@contextmanager
def recorded_routes(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """In the context each pass through the layers adds what every router chose by itself, (B x T, K), router by
    router: also where other experts were given to it."""
    routers, recorded = trunk_routers(layers), []
    for router in routers:
        router.record = recorded.append
    try:
        yield recorded
    finally:
        for router in routers:
            router.record = None


def own_routes(layers: Sequence[nn.Module], routes_LBTK: Tensor) -> list[tuple[Router, Tensor]]:
    """The routers of the trunk that are here, in their order, each with the routes of the positions that are here,
    (B x T, K), of those of the whole trunk and whole rows."""
    first = len(layers) - len(routes_LBTK)  # layers without experts come first
    return [
        (module.gate, module.own_positions(routes_LBTK[number - first]).flatten(0, 1))
        for number, layer in enumerate(layers)
        for module in layer.modules()
        if isinstance(module, MixtureOfExperts)
    ]


def replay_routes(layers: Sequence[nn.Module], routes_LBTK: Tensor | None) -> None:
    """Give the routers of the trunk's layers the experts of the next pass, FREE ones left to them; None gives none.
    They are kept until the next call, because a backward pass may compute activations again."""
    for router in trunk_routers(layers):
        router.replayed_TK = None
    for router, routes_TK in [] if routes_LBTK is None else own_routes(layers, routes_LBTK):
        router.replayed_TK = routes_TK.long()


def route_differences(chosen: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Of two (..., K) how many of the kept routes were not chosen, and how many are not FREE: two scalars, int64."""
    is_kept = kept != FREE
    is_chosen = (kept.unsqueeze(-1) == chosen.unsqueeze(-2)).any(-1)
    return (is_kept & ~is_chosen).sum(), is_kept.sum()


def free_routes(num_layers: int, *shape: int, device: torch.device | None = None) -> Tensor:
    """Routes (L, *shape) that nobody recorded; int16, for up to 32,767 experts."""
    return torch.full((num_layers, *shape), FREE, dtype=torch.int16, device=device)
