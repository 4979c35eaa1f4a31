"""Parameters, FLOPs and memory of a recipe by formula, without building the model.

Which rule gives which public number: GLM-4.5/4.6's "355B" is the body with the MTP layer, without embeddings; Air's "106B" is the body
without MTP; the Hub's "357B" adds embedding and unembedding to the former.
"""

from dataclasses import dataclass

from configs.schema import ModelRecipe

BYTES_PER_PARAMETER_TRAINING = {"weights": 2, "gradients": 4, "master": 4, "momentum": 4}
"""bf16 weights, fp32 gradient accumulation, master weights and Muon's one momentum."""


@dataclass(frozen=True)
class ParameterCounts:
    """Learned parameters; router biases, which are buffers, are counted with the MoE layers as the checkpoint holds them."""

    attention_per_layer: int
    expert: int
    moe_layer: int
    mtp_layers: int
    body: int
    """Trunk layers and the final norm: no embeddings, no MTP."""
    embeddings: int
    """Embedding and unembedding together."""
    active_body: int
    """Parameters of the body that one token passes through."""
    active_mtp: int

    @property
    def body_and_mtp(self) -> int:
        return self.body + self.mtp_layers

    @property
    def total(self) -> int:
        return self.body_and_mtp + self.embeddings

    @property
    def active(self) -> int:
        """What one predicted token costs: the body and the unembedding. The embedding is a look-up, MTP an extra."""
        return self.active_body + self.embeddings // 2


def count_parameters(recipe: ModelRecipe) -> ParameterCounts:
    """Counts by formula: a MoE layer is attention + 2H + (E + shared) * 3HF + E*H + E."""
    hidden, experts = recipe.hidden_size, recipe.n_routed_experts
    num_query, num_kv = recipe.num_attention_heads * recipe.head_dim, recipe.num_key_value_heads * recipe.head_dim
    attention = 2 * hidden * num_query + 2 * hidden * num_kv
    attention += (num_query + 2 * num_kv) * recipe.attention_bias + 2 * recipe.head_dim * recipe.use_qk_norm
    expert = 3 * hidden * recipe.moe_intermediate_size
    router = experts * hidden + experts
    moe_layer = attention + 2 * hidden + (experts + recipe.n_shared_experts) * expert + router
    active_moe_layer = moe_layer - (experts - recipe.num_experts_per_tok) * expert
    dense_layers = recipe.first_k_dense_replace * (attention + 2 * hidden + 3 * hidden * recipe.intermediate_size)
    num_moe = recipe.num_hidden_layers - recipe.first_k_dense_replace
    mtp_extra = 2 * hidden * hidden + 3 * hidden
    return ParameterCounts(
        attention_per_layer=attention,
        expert=expert,
        moe_layer=moe_layer,
        mtp_layers=recipe.num_nextn_predict_layers * (moe_layer + mtp_extra),
        body=dense_layers + num_moe * moe_layer + hidden,
        embeddings=2 * recipe.vocab_size * hidden,
        active_body=dense_layers + num_moe * active_moe_layer + hidden,
        active_mtp=recipe.num_nextn_predict_layers * (active_moe_layer + mtp_extra),
    )


def training_flops_per_token(recipe: ModelRecipe, sequence_length: int) -> float:
    """Forward and backward: 6 per active parameter, plus 12 * L * (heads * head_dim) * s / 2 for causal attention over s positions.

    An MTP layer counts as a layer and as a second pass through the unembedding.
    """
    num_mtp = recipe.num_nextn_predict_layers
    num_layers = recipe.num_hidden_layers + num_mtp
    counts = count_parameters(recipe)
    active = counts.active + counts.active_mtp + num_mtp * recipe.vocab_size * recipe.hidden_size
    return 6 * active + 12 * num_layers * recipe.num_attention_heads * recipe.head_dim * sequence_length / 2


def kv_cache_bytes_per_token(recipe: ModelRecipe, bytes_per_element: int = 2) -> int:
    """Keys and values of the trunk's layers."""
    return 2 * recipe.num_hidden_layers * recipe.num_key_value_heads * recipe.head_dim * bytes_per_element


def training_state_bytes(recipe: ModelRecipe) -> int:
    """Weights, gradients, master weights and momentum of all parameters over all ranks together, without activations."""
    return count_parameters(recipe).total * sum(BYTES_PER_PARAMETER_TRAINING.values())
