"""The experts that a server says it used for an answer's tokens, as training replays them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tasks.training.policy.rollout_connection import EngineError, ServerAnswer

if TYPE_CHECKING:
    from configs.schema import ModelRecipe

START_WITH = "start the server with --enable-return-routed-experts (`glm46 serve ... --rollouts --routes`)"


def read_routes(named: str, answer: ServerAnswer, num_prompt_tokens: int, recipe: ModelRecipe) -> Tensor:
    """int16 (L, T, K) of the trunk's layers with experts and the tokens that were read, which are all but the last.
    Servers name some of layers without experts too. Raises EngineError, which begins with `named`, for experts that no
    router chooses: a server whose kernels report none has zeros."""
    if answer.experts is None:
        raise EngineError(f"{named} names no experts: {START_WITH}, or set routes to ignore")
    num_tokens = num_prompt_tokens + len(answer.token_ids) - 1
    shape = (num_tokens, recipe.num_hidden_layers, recipe.num_experts_per_tok)
    if answer.experts.size != np.prod(shape):
        raise EngineError(
            f"{named} names {answer.experts.size} experts, and {num_tokens} tokens that were read have "
            f"{np.prod(shape)} in {recipe.num_hidden_layers} layers"
        )
    routes_TLK = answer.experts.reshape(shape)[:, recipe.first_k_dense_replace :].astype(np.int64)
    is_foreign = (routes_TLK < 0) | (routes_TLK >= recipe.n_routed_experts)
    if is_foreign.any() or (np.diff(np.sort(routes_TLK)) == 0).any():
        raise EngineError(
            f"{named} names experts that no router of {recipe.n_routed_experts} chooses, or one twice for a token: set "
            f"routes to ignore, or use kernels that report them"
        )
    return torch.from_numpy(routes_TLK.astype(np.int16)).permute(1, 0, 2)
