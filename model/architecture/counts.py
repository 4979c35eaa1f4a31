"""Counts parameters, FLOPs and bytes per token of a recipe by formula, without building the model.

The public numbers follow different rules. GLM-4.5/4.6's "355B" is the body with the MTP layer, without embeddings.
Air's "106B" is the body without MTP. The Hub's "357B" adds embedding and unembedding to the first.
"""

from dataclasses import dataclass

from configs.schema import AdapterRecipe, AdapterTarget, ModelRecipe

FOUR_BIT_BLOCK = 64
"""Elements of a matrix in 4 bits that share a scale of 8 bits (model/architecture/four_bit.py)."""
FOUR_BIT_GROUP = 256
"""Scales that share a range, a float32."""


@dataclass(frozen=True)
class ParameterCounts:
    """Learned parameters. Router biases are buffers, but are counted with the MoE layers, as the checkpoint holds
    them."""

    attention_per_layer: int
    expert: int
    moe_layer: int
    dense_layer: int
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
        """Parameters that compute one predicted token: the body and the unembedding. The embedding is a look-up, MTP is
        not needed."""
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
    dense_layer = attention + 2 * hidden + 3 * hidden * recipe.intermediate_size
    dense_layers = recipe.first_k_dense_replace * dense_layer
    num_moe = recipe.num_hidden_layers - recipe.first_k_dense_replace
    mtp_extra = 2 * hidden * hidden + 3 * hidden
    return ParameterCounts(
        attention_per_layer=attention,
        expert=expert,
        moe_layer=moe_layer,
        dense_layer=dense_layer,
        mtp_layers=recipe.num_nextn_predict_layers * (moe_layer + mtp_extra),
        body=dense_layers + num_moe * moe_layer + hidden,
        embeddings=2 * recipe.vocab_size * hidden,
        active_body=dense_layers + num_moe * active_moe_layer + hidden,
        active_mtp=recipe.num_nextn_predict_layers * (active_moe_layer + mtp_extra),
    )


def unembedding_saved(recipe: ModelRecipe) -> int:
    """Parameters of the unembedding beyond those of a reward model's scalar head, which takes its place."""
    return (recipe.vocab_size - 1) * recipe.hidden_size


@dataclass(frozen=True)
class TrainedCounts:
    """Parameters that a phase trains; `expert` is those of one routed expert, the layers' counts leave routed experts
    out."""

    dense_layer: int
    moe_layer: int
    expert: int
    outside: int
    """Embedding, unembedding, final norm and what the MTP layer adds to its MoE layer."""
    num_mtp: int
    """MTP layers among the trained ones."""

    def total(self, recipe: ModelRecipe) -> int:
        """All trained parameters."""
        num_moe = recipe.num_hidden_layers - recipe.first_k_dense_replace + self.num_mtp
        moe_layer = self.moe_layer + recipe.n_routed_experts * self.expert
        return recipe.first_k_dense_replace * self.dense_layer + num_moe * moe_layer + self.outside


def count_trained(recipe: ModelRecipe, adapter: AdapterRecipe) -> TrainedCounts:
    """All parameters, or those of an adapter: LoRA adds rank * (in + out) to each of its target matrices in the trunk;
    DoRA adds one magnitude per output row as well."""
    counts, hidden, width = count_parameters(recipe), recipe.hidden_size, recipe.moe_intermediate_size
    if adapter.kind == "none":
        moe_layer = counts.moe_layer - recipe.n_routed_experts * counts.expert
        outside = counts.embeddings + hidden + recipe.num_nextn_predict_layers * (2 * hidden * hidden + 3 * hidden)
        return TrainedCounts(counts.dense_layer, moe_layer, counts.expert, outside, recipe.num_nextn_predict_layers)
    num_query, num_kv = recipe.num_attention_heads * recipe.head_dim, recipe.num_key_value_heads * recipe.head_dim
    attention = [(hidden, num_query), (hidden, num_kv), (hidden, num_kv), (num_query, hidden)]

    def added(target: AdapterTarget, matrices: list[tuple[int, int]]) -> int:
        if target not in adapter.targets:
            return 0
        low_rank = sum(adapter.rank * (inputs + outputs) for inputs, outputs in matrices)
        return low_rank + (sum(outputs for _, outputs in matrices) if adapter.kind == "dora" else 0)

    def gated_mlp(inner: int) -> list[tuple[int, int]]:
        return [(hidden, inner), (hidden, inner), (inner, hidden)] if inner else []

    return TrainedCounts(
        dense_layer=added("attention", attention) + added("dense_mlp", gated_mlp(recipe.intermediate_size)),
        moe_layer=added("attention", attention) + added("shared_experts", gated_mlp(recipe.n_shared_experts * width)),
        expert=added("routed_experts", gated_mlp(width)),
        outside=0,
        num_mtp=0,
    )


def four_bit_bytes(num_elements: int) -> int:
    """Bytes of one matrix in 4 bits, with its scales: 4.127 bits for each element of a large one."""
    num_blocks = -(-num_elements // FOUR_BIT_BLOCK)
    return -(-num_elements // 2) + num_blocks + 4 * -(-num_blocks // FOUR_BIT_GROUP) + 4


def training_flops_per_token(
    recipe: ModelRecipe, attended_tokens: float, weights_are_frozen: bool = False, *, trains_mtp: bool = True
) -> float:
    """Forward and backward: 6 per active parameter, plus 12 * L * (heads * head_dim) * s / 2 for causal attention over
    s positions.

    `attended_tokens` is s: the length of a row, or where attention stays inside documents the mean over tokens of their
    document's length (sum of squared lengths / sum of lengths). A trained MTP layer counts as a layer and as a second
    pass through the unembedding. Frozen weights need no gradient of their own: 4 instead of 6 (the adapters' own part
    is below a hundredth).
    """
    num_mtp = recipe.num_nextn_predict_layers * trains_mtp
    num_layers = recipe.num_hidden_layers + num_mtp
    counts = count_parameters(recipe)
    active = counts.active + num_mtp * (counts.active_mtp + recipe.vocab_size * recipe.hidden_size)
    attention = 12 * num_layers * recipe.num_attention_heads * recipe.head_dim * attended_tokens / 2
    return (4 if weights_are_frozen else 6) * active + attention


def logits_per_chunk(device_type: str) -> int:
    """Logits that the loss holds at once (model/architecture/losses.py). 32 MiB in float32 stay near a CPU's caches and
    still feed the matrix product; on an accelerator 512 MiB in bfloat16 are thousands of rows, which keep all
    multiprocessors busy."""
    return (8 if device_type == "cpu" else 256) * 1024 * 1024


def kv_cache_bytes_per_token(recipe: ModelRecipe, bytes_per_element: int = 2) -> int:
    """Keys and values of the trunk's layers."""
    return 2 * recipe.num_hidden_layers * recipe.num_key_value_heads * recipe.head_dim * bytes_per_element
