"""Multi-token prediction: one more decoder layer that predicts the token after the next one.

It follows the DeepSeek-V3 report, section 2.2. At position t it takes the trunk's normalised hidden state h_t and the
embedding of token t+1 and predicts token t+2. Embedding and unembedding are the trunk's own, as in GLM-4.6's
checkpoint.
"""

import torch
from torch import Tensor, nn

from configs.schema import ModelRecipe
from model.architecture.decoder_layer import DecoderLayer, LayerOutput
from model.architecture.kv_cache import KVCache
from model.architecture.losses import IGNORED
from model.architecture.norm import RMSNorm


class SharedHead(nn.Module):
    """The norm before the shared unembedding; a module of its own because the checkpoint names it
    `shared_head.norm`."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.norm = RMSNorm(recipe.hidden_size, recipe.rms_norm_eps)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.norm(hidden_BTD)


class MtpLayer(DecoderLayer):
    """Stored as layer `num_hidden_layers`, with a decoder layer's names beside its own."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__(recipe, recipe.num_hidden_layers)
        self.enorm = RMSNorm(recipe.hidden_size, recipe.rms_norm_eps)
        self.hnorm = RMSNorm(recipe.hidden_size, recipe.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * recipe.hidden_size, recipe.hidden_size, bias=False)
        self.shared_head = SharedHead(recipe)

    def forward(
        self,
        next_embedded_BTD: Tensor,
        hidden_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        visible_BTS: Tensor | None = None,
        cache: KVCache | None = None,
        gaps_BT: Tensor | None = None,
    ) -> LayerOutput:
        """Hidden states ready for the unembedding, from the embedding of token t+1 and the trunk's hidden state at
        t."""
        joined = torch.cat([self.enorm(next_embedded_BTD), self.hnorm(hidden_BTD)], dim=-1)
        output = super().forward(self.eh_proj(joined), rotary, visible_BTS=visible_BTS, cache=cache, gaps_BT=gaps_BT)
        return LayerOutput(self.shared_head(output.hidden_BTD), output.balance_loss, output.counts_E)


def mtp_targets(target_ids_BT: Tensor, segment_ids_BT: Tensor | None) -> Tensor:
    """Targets of positions 0..T-2, (B, T-1): token t+2, or -100 where it belongs to another document than position t.

    With `segment_ids_BT` the last of them is dropped as well: it is one token after the row's end, whose document
    number is not known.
    """
    targets = target_ids_BT[:, 1:]
    if segment_ids_BT is None:
        return targets
    is_same = torch.zeros_like(targets, dtype=torch.bool)
    is_same[:, :-1] = segment_ids_BT[:, 2:] == segment_ids_BT[:, :-2]
    return targets.masked_fill(~is_same, IGNORED)
