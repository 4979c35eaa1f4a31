"""Whether weights with an adapter merged in compute what the weights and the adapter beside them compute.

In: the frozen weights, the adapter's tensors and the merged ones. Out: how far the logits of some rows differ, as a
share of the largest logit. Layers run one after the other, each through both ways, so one layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from configs.schema import AdapterRecipe, ModelRecipe
from model.architecture.adapters import add_adapters
from model.architecture.rotary import rotary_tables
from model.architecture.routes import recorded_routes, trunk_routers
from model.architecture.transformer import Glm4Moe, run_layers
from model.formats.checkpoint_names import checkpoint_names
from tasks.training.state.tensor_sources import generator_of

MAX_MERGE_ERROR = 1e-6
"""Largest difference between two logits, as a share of the largest logit."""
NUM_ROWS, NUM_POSITIONS = 4, 64

Module = TypeVar("Module", bound=nn.Module)
Read = Callable[[str], Tensor]
"""A whole tensor by its name in a checkpoint."""


def merge_error(model: ModelRecipe, adapter: AdapterRecipe, beside: Read, merged: Read) -> float:
    """The largest difference of a logit over the largest logit, on rows of random tokens.

    `beside` reads the frozen weights and the adapter, `merged` the weights with it merged in. Matrices multiply in
    float64: what is left is the rounding of the merged matrices to float32, and of norms and routers, which compute in
    float32 anyway. Both ways use the same experts, because the smallest difference may swap two with equal scores.
    """
    # The codes of 4 bits stand for the matrices that `beside` reads, so qlora computes as lora does.
    kind = "lora" if adapter.kind == "qlora" else adapter.kind
    with torch.device("meta"):
        adapted, plain = Glm4Moe(model), Glm4Moe(model)
        add_adapters(adapted, adapter.model_copy(update={"kind": kind, "dropout": 0.0}))
    token_ids_BT = torch.randint(model.vocab_size, (NUM_ROWS, NUM_POSITIONS), generator=generator_of(0, "merge check"))
    with torch.no_grad():
        difference, largest = _logit_difference(adapted, plain, token_ids_BT, beside, merged)
    return difference / largest


def _logit_difference(
    adapted: Glm4Moe, plain: Glm4Moe, token_ids_BT: Tensor, beside: Read, merged: Read
) -> tuple[float, float]:
    """(the largest difference, the largest logit)."""
    positions_T = torch.arange(token_ids_BT.shape[1])
    rotary = rotary_tables(positions_T, plain.recipe.rotary_dim, plain.rope_theta)
    hidden_BTD = other_BTD = _filled(plain.model.embed_tokens, "model.embed_tokens.", beside)(token_ids_BT)
    for number in range(plain.recipe.num_hidden_layers):
        prefix = f"model.layers.{number}."
        layer = _filled(adapted.model.layers[number], prefix, beside)
        with recorded_routes([layer]) as routes:
            hidden_BTD = run_layers([layer], hidden_BTD, rotary, None, None, None).hidden_BTD
        layer = _filled(plain.model.layers[number], prefix, merged)
        for router, experts_TK in zip(trunk_routers([layer]), routes, strict=True):
            router.replayed_TK = experts_TK
        other_BTD = run_layers([layer], other_BTD, rotary, None, None, None).hidden_BTD
    norm, head = _filled(plain.model.norm, "model.norm.", beside), _filled(plain.lm_head, "lm_head.", beside)
    logits_BTV = head(norm(hidden_BTD))
    return (logits_BTV - head(norm(other_BTD))).abs().max().item(), logits_BTV.abs().max().item()


def _filled(module: Module, prefix: str, read: Read) -> Module:
    """A copy of a module of the meta device with its tensors read, in float64."""
    module = deepcopy(module).double().to_empty(device="cpu")
    for name, tensor in module.state_dict().items():
        names = checkpoint_names(prefix + name, tensor.shape[0])
        for part, each in zip([tensor] if names == [prefix + name] else tensor, names, strict=True):
            part.copy_(read(each))
    return module
