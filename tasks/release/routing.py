"""Whether two models choose the same experts for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def routing_agreement(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float | None:
    """Share of positions and layers at which both choose the same set of experts; each tensor has the sorted choices of
    one text, (layers, tokens, experts per token). None without experts."""
    import torch

    if not ours:
        return None
    same_LT = (torch.cat(list(ours), 1) == torch.cat(list(theirs), 1)).all(-1)
    return round(float(same_LT.double().mean()), 6)


def chosen_experts(checkpoint_dir: Path, rows: Sequence[Sequence[int]], device: str) -> list[Tensor]:
    """The sorted choices of a checkpoint's routers for every row, in our own engine; none without experts."""
    import torch

    from model.architecture.moe import Router
    from model.device import open_device
    from model.formats.hf_checkpoint import load_model

    model = load_model(checkpoint_dir, device=open_device(device))
    chosen: list[Tensor] = []
    trunk = model.model.layers[: model.recipe.num_hidden_layers]
    for router in (module for module in trunk.modules() if isinstance(module, Router)):
        router.register_forward_hook(lambda _module, _inputs, result: chosen.append(result[0].sort(-1).values))
    texts = []
    with torch.inference_mode():
        for row in rows:
            chosen.clear()
            model(torch.tensor([row], device=next(model.parameters()).device))
            texts += [torch.stack(chosen).cpu()] if chosen else []
    return texts
