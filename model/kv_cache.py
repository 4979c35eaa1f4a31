"""Keys and values of the tokens seen so far, preallocated for a batch of left-padded rows."""

import torch
from torch import Tensor

from configs.schema import ModelRecipe


class KVCache:
    """One buffer per trunk layer, (B, S, G, H), filled to `num_tokens`. The first `num_padding_B` positions of a row are never seen."""

    def __init__(
        self,
        recipe: ModelRecipe,
        batch_size: int,
        max_tokens: int,
        *,
        num_padding_B: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if max_tokens > recipe.max_position_embeddings:
            raise ValueError(
                f"{max_tokens} positions (prompt and new tokens) exceed max_position_embeddings ({recipe.max_position_embeddings}): "
                f"shorten the prompt or max_new_tokens"
            )
        shape = (recipe.num_hidden_layers, batch_size, max_tokens, recipe.num_key_value_heads, recipe.head_dim)
        self.key_LBSGH = torch.zeros(shape, dtype=dtype, device=device)
        self.value_LBSGH = torch.zeros(shape, dtype=dtype, device=device)
        self.num_padding_B = num_padding_B
        self.num_tokens = 0

    def append(self, layer: int, key_BTGH: Tensor, value_BTGH: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new positions of one layer and return all of that layer's; `advance` moves on once every layer has stored."""
        end = self.num_tokens + key_BTGH.shape[1]
        self.key_LBSGH[layer, :, self.num_tokens : end] = key_BTGH
        self.value_LBSGH[layer, :, self.num_tokens : end] = value_BTGH
        return self.key_LBSGH[layer, :, :end], self.value_LBSGH[layer, :, :end]

    def advance(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def visible_BTS(self, num_new: int) -> Tensor | None:
        """Which cached and new positions (S) each new position (T) may see; None where plain causal attention or no mask says the same."""
        if self.num_padding_B is None and (num_new == 1 or self.num_tokens == 0):
            return None
        device = self.key_LBSGH.device
        key_positions_S = torch.arange(self.num_tokens + num_new, device=device)
        query_positions_T = key_positions_S[self.num_tokens :]
        visible_TS = key_positions_S[None, :] <= query_positions_T[:, None]
        if self.num_padding_B is None:
            return visible_TS[None]
        # A padding position sees itself: a row of nothing but masked scores would be NaN.
        is_real_BS = key_positions_S[None, :] >= self.num_padding_B[:, None]
        is_self_TS = key_positions_S[None, :] == query_positions_T[:, None]
        return visible_TS[None] & (is_real_BS[:, None, :] | is_self_TS[None])
