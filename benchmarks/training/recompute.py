"""Bytes kept for the backward pass by each kind of activation recomputation: python -m benchmarks.training.recompute

A model of eight layers, one micro-batch of 4 x 256 tokens in float32 on a CPU. `ours` is the kind `full` with one layer
per block, `peer` keeps everything (`none`); `kinds` holds bytes and the seconds of one forward and backward pass of
every kind, the best of four in turn.
"""

from __future__ import annotations

import math
import time
from typing import Literal

import torch
from torch import Tensor

from benchmarks.results import report
from benchmarks.training.train_step import RECIPE
from model.architecture.transformer import Glm4Moe
from tasks.training.parallel.recompute import recompute_activations

BATCH, LENGTH, ROUNDS = 4, 256, 4
KINDS: tuple[tuple[Literal["none", "selective", "full"], int], ...] = (
    ("none", 1),
    ("selective", 1),
    ("full", 1),
    ("full", 2),
    ("full", 4),
)


def kept_bytes(model: Glm4Moe, token_ids_BT: Tensor) -> tuple[int, Tensor]:
    """Bytes of all tensors that the forward pass keeps for the backward pass, each storage once, weights left out; and
    the loss."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}
    kept = []  # alive until counted: a freed storage's address is used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = model(token_ids_BT[:, :-1], target_ids_BT=token_ids_BT[:, 1:]).losses
    return sum(storages.values()), losses.lm + 0.3 * losses.mtp + 1e-4 * losses.balance


def main() -> None:
    recipe = RECIPE.model_copy(update={"num_hidden_layers": 8, "num_nextn_predict_layers": 1})
    token_ids_BT = torch.randint(0, recipe.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(46))
    models = {}
    for kind, every_layers in KINDS:
        model = models[f"{kind} {every_layers}"] = Glm4Moe(recipe)
        recompute_activations(model, kind, every_layers)
    kinds: dict[str, dict[str, float]] = {name: {"bytes": 0, "seconds": math.inf} for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            started = time.perf_counter()
            kinds[name]["bytes"], loss = kept_bytes(model, token_ids_BT)
            loss.backward()
            kinds[name]["seconds"] = min(kinds[name]["seconds"], round(time.perf_counter() - started, 3))
    report(
        "recompute",
        ours=kinds["full 1"]["bytes"],
        peer=kinds["none 1"]["bytes"],
        unit="bytes kept per micro-batch",
        lower_is_better=True,
        kinds=kinds,
    )


if __name__ == "__main__":
    main()
