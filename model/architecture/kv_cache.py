"""Keys and values of the tokens seen so far, preallocated for a batch whose rows may have different lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.schema import ModelRecipe


def check_positions(recipe: ModelRecipe, max_tokens: int) -> None:
    """Raises ValueError for more tokens than the model has positions."""
    if max_tokens > recipe.max_position_embeddings:
        raise ValueError(
            f"{max_tokens} positions (prompt and new tokens) exceed max_position_embeddings "
            f"({recipe.max_position_embeddings}): "
            f"shorten the prompt or max_new_tokens"
        )


class KVCache:
    """One buffer per layer of `layers`, (B, S, G, H). Row b is filled to `lengths[b]`: new tokens come after that, and
    a token sees the positions up to its own. What a row holds beyond its length is never seen. So padding after a row's
    new tokens does no harm, and `cut` removes tokens by shortening the length."""

    def __init__(
        self,
        recipe: ModelRecipe,
        batch_size: int,
        num_positions: int,
        *,
        layers: range,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (len(layers), batch_size, num_positions, recipe.num_key_value_heads, recipe.head_dim)
        self.key_LBSGH = torch.zeros(shape, dtype=dtype, device=device)
        self.value_LBSGH = torch.zeros(shape, dtype=dtype, device=device)
        self.first_layer = layers.start
        self.lengths = [0] * batch_size

    def positions(self, num_new: int) -> Tensor:
        """Of the new tokens: (T,) where all rows are equally long, else (B, T)."""
        new_T = torch.arange(num_new, device=self.key_LBSGH.device)
        if self._is_even():
            return new_T + self.lengths[0]
        return torch.tensor(self.lengths, device=new_T.device)[:, None] + new_T

    def append(self, layer: int, key_BTGH: Tensor, value_BTGH: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new positions of one layer and return all of that layer's; `advance` moves on once every layer has
        stored."""
        num_new = key_BTGH.shape[1]
        end = max(self.lengths) + num_new
        key_BSGH, value_BSGH = (
            self.key_LBSGH[layer - self.first_layer, :, :end],
            self.value_LBSGH[layer - self.first_layer, :, :end],
        )
        if self._is_even():
            key_BSGH[:, -num_new:], value_BSGH[:, -num_new:] = key_BTGH, value_BTGH
        else:
            rows_B1 = torch.arange(len(self.lengths), device=key_BSGH.device)[:, None]
            key_BSGH[rows_B1, self.positions(num_new)] = key_BTGH
            value_BSGH[rows_B1, self.positions(num_new)] = value_BTGH
        return key_BSGH, value_BSGH

    def advance(self, num_tokens: int) -> None:
        self.lengths = [length + num_tokens for length in self.lengths]

    def cut(self, lengths: Sequence[int]) -> None:
        """Forget what comes after the given length of each row."""
        self.lengths = list(lengths)

    def visible_BTS(self, num_new: int) -> Tensor | None:
        """Which cached and new positions (S) each new position (T) may see; None where plain causal attention, or no
        mask, does the same."""
        if self._is_even() and (num_new == 1 or self.lengths[0] == 0):
            return None
        positions = self.positions(num_new)
        visible_TS = torch.arange(max(self.lengths) + num_new, device=positions.device) <= positions[..., None]
        return visible_TS if visible_TS.dim() == 3 else visible_TS[None]

    def _is_even(self) -> bool:
        return min(self.lengths) == max(self.lengths)
