"""How far a router spreads the tokens that a checkpoint is calibrated with over its experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertCoverage:
    """Of the experts of all layers. Every expert is calibrated on every token nevertheless."""

    num_experts: int
    least_routed_tokens: int
    """Tokens that the router sent to the expert that it chose least; 0 without experts."""
    idle_experts: tuple[str, ...]
    """Those that the router chose for none of the tokens, by their names in the checkpoint."""


def expert_coverage(routed: Mapping[int, Tensor]) -> ExpertCoverage:
    """`routed` has, by layer, the tokens that the router sent to each expert; none for a model without experts."""
    counts = {
        f"model.layers.{layer}.mlp.experts.{expert}": count
        for layer in sorted(routed)
        for expert, count in enumerate(routed[layer].tolist())
    }
    idle = tuple(name for name, count in counts.items() if not count)
    return ExpertCoverage(len(counts), int(min(counts.values(), default=0)), idle)
