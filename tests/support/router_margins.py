"""Router decisions that rounding cannot make: what every comparison of two ways to compute one model rests on.

An expert is chosen where its selection score is among the K highest. Where the K-th and the next differ by less than
the order of a sum moves them, the processor decides, and the two ways compute different functions. `clear_routing`
asserts that no such decision was made while it is entered. Where one was: another seed, with twice the margin to have
some to spare, or fewer tokens. Where weights come out of a training, whose bits are the processor's own, or bfloat16
computes: `with_every_expert` of tests/support/model_recipes.py, which decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from model.architecture.moe import Router

MIN_MARGIN = 1e-4
"""Of a score in float32, a hundred times what another order of its sums moves."""


@contextmanager
def clear_routing() -> Iterator[None]:
    """Assert that every decision of every router that runs in this process has MIN_MARGIN."""
    margins = [math.inf]

    def watch(module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
        if isinstance(module, Router):
            margins.append(least_margin(module, output[2].detach()))

    hook = register_module_forward_hook(watch)
    try:
        yield
    finally:
        hook.remove()
    assert min(margins) >= MIN_MARGIN, (
        f"two experts are {min(margins):.1e} apart, rounding may choose between them: take another seed"
    )


def least_margin(router: Router, scores_TE: Tensor) -> float:
    """Between the last expert that is in and the first that is not: as selected, and in a training pass as the balance
    loss counts."""
    num_chosen = router.num_experts_per_tok
    if num_chosen == scores_TE.shape[1] or not len(scores_TE):
        return math.inf
    decided = [scores_TE + router.e_score_correction_bias, *([scores_TE] if torch.is_grad_enabled() else [])]
    best = torch.stack(decided).topk(num_chosen + 1).values
    return float((best[..., -2] - best[..., -1]).min())
