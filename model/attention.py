"""Grouped-query attention of GLM-4.5/4.6: biased q/k/v, optional QK-norm, partial RoPE, causal softmax, unbiased output."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import ModelRecipe
from model.kv_cache import KVCache
from model.norm import RMSNorm
from model.rotary import rotate


def attend(query_BTNH: Tensor, key_BSGH: Tensor, value_BSGH: Tensor, visible_BTS: Tensor | None) -> Tensor:
    """Softmax attention, (B, T, N, H): the part of attention in which positions meet."""
    mixed_BNTH = F.scaled_dot_product_attention(
        query_BTNH.transpose(1, 2),
        key_BSGH.transpose(1, 2),
        value_BSGH.transpose(1, 2),
        attn_mask=None if visible_BTS is None else visible_BTS[:, None],
        is_causal=visible_BTS is None and query_BTNH.shape[1] > 1,
        enable_gqa=query_BTNH.shape[2] != key_BSGH.shape[2],
    )
    return mixed_BNTH.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        num_query, num_kv = recipe.num_attention_heads * recipe.head_dim, recipe.num_key_value_heads * recipe.head_dim
        self.head_dim = recipe.head_dim
        self.q_proj = nn.Linear(recipe.hidden_size, num_query, bias=recipe.attention_bias)
        self.k_proj = nn.Linear(recipe.hidden_size, num_kv, bias=recipe.attention_bias)
        self.v_proj = nn.Linear(recipe.hidden_size, num_kv, bias=recipe.attention_bias)
        self.o_proj = nn.Linear(num_query, recipe.hidden_size, bias=False)
        if recipe.use_qk_norm:
            self.q_norm = RMSNorm(recipe.head_dim, recipe.rms_norm_eps)
            self.k_norm = RMSNorm(recipe.head_dim, recipe.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = attend
        """The seam of sequence parallelism (tasks/training/sequence_parallel.py)."""

    def forward(
        self,
        hidden_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        *,
        visible_BTS: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """`visible_BTS` is true where position T may see position S; None is plain causal attention over the row (or, for one new
        token after a cache, attention to everything before it)."""
        heads = (*hidden_BTD.shape[:2], -1, self.head_dim)
        query_BTNH = rotate(self.q_norm(self.q_proj(hidden_BTD).view(heads)), *rotary)
        key_BSGH = rotate(self.k_norm(self.k_proj(hidden_BTD).view(heads)), *rotary)
        value_BSGH = self.v_proj(hidden_BTD).view(heads)
        if cache is not None:
            key_BSGH, value_BSGH = cache.append(layer, key_BSGH, value_BSGH)
        return self.o_proj(self.attend(query_BTNH, key_BSGH, value_BSGH, visible_BTS).flatten(2))


def visible_within_segments(segment_ids_BT: Tensor) -> Tensor:
    """Causal visibility inside documents, (B, T, T): a position sees the earlier positions with its own document number."""
    is_same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return is_same_BTS.tril()
