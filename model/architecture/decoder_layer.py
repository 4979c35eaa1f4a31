"""One pre-norm decoder layer: attention, then a dense MLP or a mixture of experts, each on a residual branch."""

from typing import NamedTuple

from torch import Tensor, nn

from configs.schema import ModelRecipe
from model.architecture.attention import Attention
from model.architecture.gated_mlp import GatedMlp
from model.architecture.kv_cache import KVCache
from model.architecture.moe import MixtureOfExperts
from model.architecture.norm import RMSNorm


class LayerOutput(NamedTuple):
    hidden_BTD: Tensor
    balance_loss: Tensor | None
    """None, like the counts, in a dense layer."""
    counts_E: Tensor | None


class DecoderLayer(nn.Module):
    def __init__(self, recipe: ModelRecipe, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(recipe.hidden_size, recipe.rms_norm_eps)
        self.self_attn = Attention(recipe)
        self.post_attention_layernorm = RMSNorm(recipe.hidden_size, recipe.rms_norm_eps)
        is_dense = layer < recipe.first_k_dense_replace
        self.mlp = GatedMlp(recipe.hidden_size, recipe.intermediate_size) if is_dense else MixtureOfExperts(recipe)

    def forward(
        self,
        hidden_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        *,
        visible_BTS: Tensor | None = None,
        cache: KVCache | None = None,
        gaps_BT: Tensor | None = None,
    ) -> LayerOutput:
        # A layer's number only where it is asked for: with it each layer would be compiled by itself.
        cached = {} if cache is None else {"cache": cache, "layer": self.layer}
        attended_BTD = self.self_attn(self.input_layernorm(hidden_BTD), rotary, visible_BTS=visible_BTS, **cached)
        hidden_BTD = hidden_BTD + attended_BTD
        normed_BTD = self.post_attention_layernorm(hidden_BTD)
        if isinstance(self.mlp, GatedMlp):
            return LayerOutput(hidden_BTD + self.mlp(normed_BTD), None, None)
        branch = self.mlp(normed_BTD, gaps_BT)
        return LayerOutput(hidden_BTD + branch.hidden_BTD, branch.balance_loss, branch.counts_E)
