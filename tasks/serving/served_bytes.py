"""The bytes of a served model on each GPU by formula: weights in a format, keys and values of a token.

Pure. Nothing is loaded: config.json is enough. Norms and biases are left out (below a thousandth); a GPU that holds a
smaller part than another is counted as the fullest one.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import ModelRecipe
from model.architecture.counts import count_parameters

BFLOAT16 = "bfloat16"
TWO_BYTES = 2
"""Of what no format rounds: embedding, unembedding, router and the MTP layer are served in bfloat16."""


@dataclass(frozen=True)
class WeightFormat:
    """How matrices are stored."""

    name: str
    expert_bytes: float
    """Per parameter of routed and shared experts."""
    other_bytes: float
    """Per parameter of attention and dense MLPs."""
    group: int = 0
    """Inputs that share a scale: a GPU's part of an expert must be whole groups. 0: any part will do."""


_W4 = 0.5 + 2.5 / 128
"""4 bits, and for each group of 128 a scale of two bytes and a zero point of half a byte."""
FORMATS = {
    each.name: each
    for each in (
        WeightFormat(BFLOAT16, 2, 2),
        WeightFormat("fp8", 1, 1),
        WeightFormat("FP8_DYNAMIC", 1, 1),
        WeightFormat("FP8_EXPERTS", 1, 2),
        WeightFormat("FP8_BLOCK", 1 + 4 / 128**2, 1 + 4 / 128**2, group=128),
        WeightFormat("W4A16", _W4, _W4, group=128),
    )
}
"""Formats of vLLM and SGLang: `fp8` is made while loading; those with capitals are checkpoints of `quantized_formats`
(both 4-bit ones are W4A16)."""


@dataclass(frozen=True)
class Layout:
    """How a model is divided: each of `dp` attention groups has its own requests on `tp` GPUs per pipeline stage, and
    the experts of a stage are divided among its tp x dp GPUs."""

    tp: int
    pp: int
    dp: int
    ep: int
    """GPUs among which whole experts are divided; 1: each expert is cut by rows instead."""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}, dp {self.dp}, ep {self.ep}"


def weight_bytes(model: ModelRecipe, stored: WeightFormat, layout: Layout, *, with_mtp: bool) -> float:
    """Bytes on the fullest GPU. Without drafts the engines leave the MTP layer on disk."""
    counts, hidden = count_parameters(model), model.hidden_size
    layers = -(-model.num_hidden_layers // layout.pp)
    routed = model.n_routed_experts * counts.expert
    shared = model.n_shared_experts * counts.expert
    router = model.n_routed_experts * (hidden + 1)
    moe = stored.expert_bytes * (routed / (layout.tp * layout.dp) + shared / layout.tp) + TWO_BYTES * router
    dense = stored.other_bytes * 3 * hidden * model.intermediate_size / layout.tp
    attention = stored.other_bytes * _attention(model, layout.tp)
    dense_layers = min(model.first_k_dense_replace, layers) if layout.pp == 1 else 0
    total = layers * attention + dense_layers * dense + (layers - dense_layers) * moe
    vocabulary = TWO_BYTES * model.vocab_size * hidden / layout.tp
    total += vocabulary * (2 if layout.pp == 1 else 1)
    if with_mtp:
        total += (
            model.num_nextn_predict_layers
            * TWO_BYTES
            * (
                routed / (layout.tp * layout.dp)
                + shared / layout.tp
                + router
                + _attention(model, layout.tp)
                + 2 * hidden * hidden
            )
        )
    return total


def kv_bytes_per_token(model: ModelRecipe, layout: Layout, element: int = TWO_BYTES, *, with_mtp: bool) -> float:
    """Keys and values of one token on one GPU. More GPUs than heads hold copies."""
    layers = -(-model.num_hidden_layers // layout.pp) + model.num_nextn_predict_layers * with_mtp
    heads = -(-model.num_key_value_heads // layout.tp)
    return 2 * layers * heads * model.head_dim * element


def _attention(model: ModelRecipe, tp: int) -> float:
    """Parameters of a layer's attention on one GPU: queries and output are divided, key-value heads at most to one."""
    heads = -(-model.num_key_value_heads // tp)
    return model.hidden_size * model.head_dim * (2 * model.num_attention_heads / tp + 2 * heads)
