"""GLM-4.5/4.6 (`glm4_moe`) as single-device mathematics: token ids in, logits or losses out.

Parameter names are the checkpoint's, except that a layer's experts are stacked.

Shape letters: B batch, T positions, S cached positions, D model, N query heads, G kv heads, H head dim, F expert
hidden, E experts, K experts per token, R routed token copies, V vocabulary, L layers with experts (the MTP layer's
last).
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from configs.schema import ModelRecipe
from model.architecture.attention import visible_within_segments
from model.architecture.decoder_layer import DecoderLayer, LayerOutput
from model.architecture.kv_cache import KVCache
from model.architecture.losses import LanguageHead
from model.architecture.moe import Router
from model.architecture.mtp import MtpLayer, mtp_targets
from model.architecture.norm import RMSNorm
from model.architecture.preferences import (
    Preference,
    ScoreHead,
    direct_preference_loss,
    mean_over_parts,
    scored_preference_loss,
)
from model.architecture.rotary import rotary_tables
from model.architecture.routes import replay_routes
from model.architecture.values import ValueTargets, clipped_value_loss


class Losses(NamedTuple):
    """Unweighted float32 scalars."""

    lm: Tensor
    """Mean cross-entropy of the next token over the targets kept, weighted where weights were given; of preference
    pairs the mean loss of a pair."""
    mtp: Tensor
    """Mean cross-entropy of the token after it; 0 without an MTP layer."""
    balance: Tensor
    """Sequence-level balance loss, summed over layers with experts, averaged over sequences."""


class ModelOutput(NamedTuple):
    losses: Losses | None
    expert_counts_LE: Tensor
    """Routed copies per expert, int64; rows follow the trunk's MoE layers, then the MTP layer's where it ran."""
    logits_BTV: Tensor | None
    target_scores_BT: Tensor | None = None
    """Where targets were to be scored: their log-probabilities, of a scalar head its values; float32. There are no
    losses then."""


class LayersOutput(NamedTuple):
    """Result of a run of layers: hidden states, and per layer with experts its balance loss and counts."""

    hidden_BTD: Tensor
    balance: list[Tensor]
    counts: list[Tensor]


def run_layers(
    layers: Iterable[nn.Module],
    hidden_BTD: Tensor,
    rotary: tuple[Tensor, Tensor],
    visible_BTS: Tensor | None,
    cache: KVCache | None,
    gaps_BT: Tensor | None,
) -> LayersOutput:
    """Run the layers one after the other, without the final norm."""
    balance, counts = [], []
    for layer in layers:
        output = layer(hidden_BTD, rotary, visible_BTS=visible_BTS, cache=cache, gaps_BT=gaps_BT)
        hidden_BTD = output.hidden_BTD
        if output.counts_E is not None:
            balance.append(output.balance_loss)
            counts.append(output.counts_E)
    return LayersOutput(hidden_BTD, balance, counts)


def pair_for_mtp(embedded_BTD: Tensor, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """What the MTP layer takes at positions 0..T-2: the embedding of the token after each, and its hidden state."""
    return embedded_BTD[:, 1:], hidden_BTD[:, :-1]


class Decoder(nn.Module):
    """The trunk and the MTP layer, under the checkpoint's prefix `model.`."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(recipe.vocab_size, recipe.hidden_size)
        trunk = [DecoderLayer(recipe, layer) for layer in range(recipe.num_hidden_layers)]
        self.layers = nn.ModuleList([*trunk, *(MtpLayer(recipe) for _ in range(recipe.num_nextn_predict_layers))])
        self.norm = RMSNorm(recipe.hidden_size, recipe.rms_norm_eps)
        self.run_layers: Callable[..., LayersOutput] = run_layers
        """How the trunk's layers are run: tasks/training/parallel/recompute.py replaces it by runs of blocks."""


class Glm4Moe(nn.Module):
    """`rope_theta` overrides the recipe's, for phases that train at another base than the released model's. A reward
    model (`is_scored`) has a scalar head in place of the unembedding, and no MTP layer."""

    def __init__(self, recipe: ModelRecipe, rope_theta: float | None = None, is_scored: bool = False) -> None:
        super().__init__()
        self.recipe = recipe
        self.rope_theta = recipe.rope_theta if rope_theta is None else rope_theta
        self.model = Decoder(recipe)
        self.is_scored = is_scored
        if is_scored:
            assert not recipe.num_nextn_predict_layers, "a reward model predicts no token"
            self.score = ScoreHead(recipe.hidden_size)
        else:
            self.lm_head = LanguageHead(recipe.hidden_size, recipe.vocab_size)
        self.num_slices = 1
        """Number of equal slices into which the positions of hidden states are divided; this rank holds one (tensor
        parallelism)."""
        self.part, self.num_parts = 0, 1
        """Which equal part of a row's positions this rank takes (sequence parallelism); segment ids are those of the
        whole row."""
        self.sum_over_parts: Callable[[Tensor], Tensor] | None = None
        """Adds up over the ranks that hold parts of the same rows; None where a rank has whole rows."""
        self.runs_mtp = True
        """Whether the MTP loss is computed. If not, it is 0 and the experts of the MTP layer count no token."""
        self.pair_for_mtp: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = pair_for_mtp
        self.begin_rows: Callable[[Tensor, int], None] | None = None
        """Is told the numbers of the rows of a pass that trains, and their length, where adapters leave out inputs
        (model/architecture/adapters.py)."""
        self._has_replayed = False
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Matrices and embeddings from N(0, initializer_range), norms 1, biases 0, in the order of the parameters."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, self.recipe.initializer_range, generator=generator)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
        for module in self.modules():
            if isinstance(module, Router):
                module.e_score_correction_bias.zero_()

    def forward(
        self,
        token_ids_BT: Tensor,
        *,
        target_ids_BT: Tensor | None = None,
        target_weights_BT: Tensor | None = None,
        temperature: float = 1.0,
        scores_targets: bool = False,
        segment_ids_BT: Tensor | None = None,
        max_documents: int | None = None,
        mtp_segment_ids_BT: Tensor | None = None,
        mtp_target_ids_BT: Tensor | None = None,
        preference: Preference | None = None,
        values: ValueTargets | None = None,
        routes_LBTK: Tensor | None = None,
        gaps_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> ModelOutput:
        """Losses when `target_ids_BT` (token t+1 per position, -100 to leave out) is given, logits when it is not.

        `target_weights_BT` weighs the next token's cross-entropy per position and `temperature` divides its logits: a
        policy gradient is that of the distribution the answers were sampled from. Neither touches the MTP loss.
        `scores_targets` gives the targets' log-probabilities in place of losses, or the values of a scalar head.
        `segment_ids_BT` (document number per position) keeps attention inside documents and takes MTP targets of
        another document out of the loss; `max_documents` bounds how many runs of one number its rows have.
        `mtp_segment_ids_BT` does only the latter, for rows whose attention runs over document ends as in
        pre-training; `mtp_target_ids_BT` gives those targets themselves, for parts of rows: the targets of a part's
        last positions come after the part. Whether a document's last position is trained to predict the next
        document's first token is decided by `target_ids_BT`. `preference` makes neighbouring rows pairs, whose loss
        takes the place of the next token's cross-entropy, and `values` are those of a critic, whose loss does.
        `routes_LBTK` are the experts that the trunk's layers use (model/architecture/routes.py). `gaps_BT` is true at
        the positions of whole rows that hold no token, which go to no expert; None where there are none.
        """
        assert cache is None or (target_ids_BT is None and segment_ids_BT is None), "a cache serves generation only"
        embedded_BTD = self.model.embed_tokens(token_ids_BT)
        trunk = self.run_trunk(embedded_BTD, segment_ids_BT, cache, max_documents, routes_LBTK, gaps_BT)
        if target_ids_BT is None:
            return ModelOutput(None, self.stack_counts(trunk.counts), self.lm_head(self.model.norm(trunk.hidden_BTD)))
        return self.losses(
            trunk,
            embedded_BTD,
            target_ids_BT,
            target_weights_BT=target_weights_BT,
            temperature=temperature,
            scores_targets=scores_targets,
            segment_ids_BT=segment_ids_BT,
            max_documents=max_documents,
            mtp_segment_ids_BT=mtp_segment_ids_BT,
            mtp_target_ids_BT=mtp_target_ids_BT,
            preference=preference,
            values=values,
            gaps_BT=gaps_BT,
        )

    def losses(
        self,
        trunk: LayersOutput,
        embedded_BTD: Tensor,
        target_ids_BT: Tensor,
        *,
        target_weights_BT: Tensor | None = None,
        temperature: float = 1.0,
        scores_targets: bool = False,
        segment_ids_BT: Tensor | None = None,
        max_documents: int | None = None,
        mtp_segment_ids_BT: Tensor | None = None,
        mtp_target_ids_BT: Tensor | None = None,
        preference: Preference | None = None,
        values: ValueTargets | None = None,
        gaps_BT: Tensor | None = None,
    ) -> ModelOutput:
        """Losses from the trunk's layers and the embeddings, as in `forward`; a pipeline's last stage begins here."""
        hidden_BTD = self.model.norm(trunk.hidden_BTD)
        if scores_targets:
            scored_BT = (
                self.score.values(hidden_BTD)
                if self.is_scored
                else self.lm_head(hidden_BTD / temperature, target_ids_BT, scores_targets=True)
            )
            return ModelOutput(None, self.stack_counts(trunk.counts), None, scored_BT)
        if values is not None:
            lm = clipped_value_loss(self.score, hidden_BTD, target_ids_BT, values)
        elif preference is not None:
            lm = mean_over_parts(self._preference_loss(hidden_BTD, target_ids_BT, preference), self.num_parts)
        else:
            lm = self.lm_head(
                hidden_BTD / temperature if temperature != 1.0 else hidden_BTD, target_ids_BT, target_weights_BT
            )
        mtp, balance, counts = lm.new_zeros(()), trunk.balance, trunk.counts
        if self.recipe.num_nextn_predict_layers and not self.runs_mtp:
            counts = [*counts, torch.zeros(self.recipe.n_routed_experts, dtype=torch.int64, device=lm.device)]
        elif self.recipe.num_nextn_predict_layers and target_ids_BT.shape[1] > 1:
            output = self.run_mtp(embedded_BTD, hidden_BTD, segment_ids_BT, max_documents, gaps_BT)
            if mtp_target_ids_BT is None:
                segments = mtp_segment_ids_BT if mtp_segment_ids_BT is not None else segment_ids_BT
                mtp_target_ids_BT = mtp_targets(target_ids_BT, segments)
            mtp = self.lm_head(output.hidden_BTD, mtp_target_ids_BT)
            if output.counts_E is not None:
                balance, counts = [*balance, output.balance_loss], [*counts, output.counts_E]
        # The balance losses of a sequence's parts add up to its own. The factor makes their mean over the parts equal
        # to it.
        total_balance = torch.stack(balance).sum() * self.num_parts if balance else lm.new_zeros(())
        return ModelOutput(Losses(lm, mtp, total_balance), self.stack_counts(counts), None)

    def _preference_loss(self, hidden_BTD: Tensor, target_ids_BT: Tensor, preference: Preference) -> Tensor:
        if self.is_scored:
            return scored_preference_loss(self.score, hidden_BTD, preference)
        return direct_preference_loss(self.lm_head, hidden_BTD, target_ids_BT, preference, self.sum_over_parts)

    def hidden_states(
        self,
        token_ids_BT: Tensor,
        cache: KVCache | None = None,
        routes_LBTK: Tensor | None = None,
        gaps_BT: Tensor | None = None,
    ) -> Tensor:
        """The trunk's normalised hidden states, (B, T, D): what `lm_head` takes."""
        embedded_BTD = self.model.embed_tokens(token_ids_BT)
        trunk = self.run_trunk(embedded_BTD, None, cache, routes_LBTK=routes_LBTK, gaps_BT=gaps_BT)
        return self.model.norm(trunk.hidden_BTD)

    def run_trunk(
        self,
        embedded_BTD: Tensor,
        segment_ids_BT: Tensor | None,
        cache: KVCache | None,
        max_documents: int | None = None,
        routes_LBTK: Tensor | None = None,
        gaps_BT: Tensor | None = None,
    ) -> LayersOutput:
        """The trunk's layers, of a pipeline stage those that it holds; segments, routes and gaps as in `forward`."""
        num_new = embedded_BTD.shape[1] * self.num_slices
        visible_BTS = None if segment_ids_BT is None else visible_within_segments(segment_ids_BT, max_documents)
        if cache is not None:
            visible_BTS = cache.visible_BTS(num_new)
        rotary = self._rotary(num_new, self.part * num_new, embedded_BTD.device)
        if cache is not None:
            rotary = rotary_tables(cache.positions(num_new), self.recipe.rotary_dim, self.rope_theta)
        trunk = self.trunk_layers
        if routes_LBTK is not None or self._has_replayed:
            replay_routes(trunk, routes_LBTK)
            self._has_replayed = routes_LBTK is not None
        output = self.model.run_layers(trunk, embedded_BTD, rotary, visible_BTS, cache, gaps_BT)
        if cache is not None:
            cache.advance(num_new)
        return output

    @property
    def trunk_layers(self) -> list[nn.Module]:
        return [*self.model.layers[: self.recipe.num_hidden_layers]]

    def run_mtp(
        self,
        embedded_BTD: Tensor,
        hidden_BTD: Tensor,
        segment_ids_BT: Tensor | None,
        max_documents: int | None = None,
        gaps_BT: Tensor | None = None,
    ) -> LayerOutput:
        """The MTP layer at positions 0..T-2, from the trunk's embeddings and normalised hidden states of all T
        positions."""
        num_positions = hidden_BTD.shape[1] * self.num_slices
        rotary = self._rotary(
            num_positions - (self.part == self.num_parts - 1), self.part * num_positions, hidden_BTD.device
        )
        # By the document of the hidden state, not of the next token: otherwise a document's first position would see
        # the document before.
        visible_BTS = None if segment_ids_BT is None else visible_within_segments(segment_ids_BT[:, :-1], max_documents)
        return self.model.layers[-1](
            *self.pair_for_mtp(embedded_BTD, hidden_BTD),
            rotary,
            visible_BTS,
            gaps_BT=None if gaps_BT is None else gaps_BT[:, 1:],  # after a row's last token there is no next one
        )

    def _rotary(self, num_positions: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + num_positions, device=device)
        return rotary_tables(positions, self.recipe.rotary_dim, self.rope_theta)

    def stack_counts(self, counts: list[Tensor]) -> Tensor:
        """(L, E); a model without experts has no row."""
        if counts:
            return torch.stack(counts)
        return torch.zeros(0, self.recipe.n_routed_experts, dtype=torch.int64, device=next(self.parameters()).device)
