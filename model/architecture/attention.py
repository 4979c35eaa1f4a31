"""Grouped-query attention of GLM-4.5/4.6: biased q/k/v, optional QK-norm, partial RoPE, causal softmax, unbiased
output."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import ModelRecipe
from model.architecture.kv_cache import KVCache
from model.architecture.norm import RMSNorm
from model.architecture.rotary import rotate_heads
from model.kernels import attention_kernel


class WithinDocuments(NamedTuple):
    """Causal visibility inside documents: position t sees starts[t] .. t. A (B, T, T) mask would be the size of the
    scores."""

    starts_BT: Tensor
    """int32."""
    bounds: Tensor
    """Where documents begin in the flattened positions of all rows, int32; the last entry is the number of these
    positions. On an accelerator that number fills the places up to a bound of the number of documents."""


Visible = Tensor | WithinDocuments | None
"""A mask (B, T, S), true where position T may see position S; documents; or None for plain causal attention over the
row (for one new token after a cache: to everything before it)."""


def attend(query_BTNH: Tensor, key_BSGH: Tensor, value_BSGH: Tensor, visible_BTS: Visible) -> Tensor:
    """Softmax attention, (B, T, N, H): the part of attention in which positions meet."""
    if not isinstance(visible_BTS, Tensor) and attention_kernel.fits(query_BTNH, key_BSGH):
        starts_BT = (
            torch.zeros(query_BTNH.shape[:2], dtype=torch.int32) if visible_BTS is None else visible_BTS.starts_BT
        )
        return attention_kernel.CausalAttention.apply(query_BTNH, key_BSGH, value_BSGH, starts_BT)
    if isinstance(visible_BTS, WithinDocuments):
        return attend_by_document(query_BTNH, key_BSGH, value_BSGH, visible_BTS)
    mixed_BNTH = F.scaled_dot_product_attention(
        query_BTNH.transpose(1, 2),
        key_BSGH.transpose(1, 2),
        value_BSGH.transpose(1, 2),
        attn_mask=None if visible_BTS is None else visible_BTS[:, None],
        is_causal=visible_BTS is None and query_BTNH.shape[1] > 1,
        enable_gqa=query_BTNH.shape[2] != key_BSGH.shape[2],
    )
    return mixed_BNTH.transpose(1, 2)


def attend_by_document(query_BTNH: Tensor, key_BTGH: Tensor, value_BTGH: Tensor, documents: WithinDocuments) -> Tensor:
    """Causal attention over each document by itself: flash attention over unequal lengths on a GPU, else one call per
    document."""
    query_RNH, key_RGH, value_RGH = query_BTNH.flatten(0, 1), key_BTGH.flatten(0, 1), value_BTGH.flatten(0, 1)
    if query_BTNH.device.type != "cpu" and query_BTNH.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        longest = query_BTNH.shape[1]  # a bound: the exact length would have to be read on the host
        mixed_RNH = varlen_attn(
            query_RNH,
            key_RGH,
            value_RGH,
            documents.bounds,
            documents.bounds,
            longest,
            longest,
            window_size=(-1, 0),
            enable_gqa=True,
        )
        assert isinstance(mixed_RNH, Tensor)
        return mixed_RNH.view_as(query_BTNH)
    bounds = documents.bounds.tolist()
    pieces = [slice(*pair) for pair in pairwise(bounds)]
    apart = [attend(query_RNH[None, piece], key_RGH[None, piece], value_RGH[None, piece], None) for piece in pieces]
    return torch.cat(apart, dim=1).view_as(query_BTNH)


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
        self.attend: Callable[[Tensor, Tensor, Tensor, Visible], Tensor] = attend
        """The seam of sequence parallelism (tasks/training/parallel/sequence_parallel.py)."""

    def forward(
        self,
        hidden_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        *,
        visible_BTS: Visible = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        heads = (*hidden_BTD.shape[:2], -1, self.head_dim)
        query_BTNH = rotate_heads(self.q_proj(hidden_BTD).view(heads), self.q_norm, *rotary)
        key_BSGH = rotate_heads(self.k_proj(hidden_BTD).view(heads), self.k_norm, *rotary)
        value_BSGH = self.v_proj(hidden_BTD).view(heads)
        if cache is not None:
            key_BSGH, value_BSGH = cache.append(layer, key_BSGH, value_BSGH)
        return self.o_proj(self.attend(query_BTNH, key_BSGH, value_BSGH, visible_BTS).flatten(2))


def visible_within_segments(segment_ids_BT: Tensor, max_documents: int | None = None) -> WithinDocuments:
    """Causal visibility inside documents, which are runs of one document number. `max_documents` bounds the number of
    runs: with it an accelerator does not wait until the host has counted them."""
    positions_T = torch.arange(segment_ids_BT.shape[1], device=segment_ids_BT.device, dtype=torch.int32)
    is_first_BT = torch.ones_like(segment_ids_BT, dtype=torch.bool)
    is_first_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    starts_BT = torch.where(is_first_BT, positions_T, 0).cummax(dim=1).values
    is_first_R = is_first_BT.flatten()
    if max_documents is None or segment_ids_BT.device.type == "cpu":
        begins = is_first_R.nonzero().flatten()
    else:
        begins = torch.nonzero_static(is_first_R, size=max_documents, fill_value=segment_ids_BT.numel()).flatten()
    return WithinDocuments(starts_BT, torch.cat([begins, begins.new_tensor([segment_ids_BT.numel()])]).to(torch.int32))
