"""Computes by formula the bytes that one micro-batch keeps on a rank for its backward pass.

The formula follows what the model's operations save. A test compares it with the tensors that autograd really keeps
(benchmarks/training/recompute.py counts them), on the path of a CPU and on that of an accelerator, whose composed
operations run on a CPU too. Element size is that of the dtype in which the model computes. Router scores, statistics
of norms and softmax, and positions of routed copies are small and counted as float32. Experts are assumed to be used
evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import ModelRecipe, TrainingResources
from model.architecture.counts import logits_per_chunk


def attention_bytes_per_token(model: ModelRecipe, element: int) -> int:
    """Queries, keys and values before and after norm and rotation, and the output; scores are made again in the
    backward pass."""
    num_query, num_kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    heads = model.num_attention_heads + model.use_qk_norm * (model.num_attention_heads + model.num_key_value_heads)
    return (2 + model.use_qk_norm) * (num_query + num_kv) * element + 4 * heads


def mlp_bytes_per_token(model: ModelRecipe, element: int, device: str, *, is_dense: bool) -> int:
    """Gate and up, and per routed copy also what goes in and comes out. Their product is made again in the backward
    pass. The exception are experts on an accelerator: there autograd keeps it and the activated gate."""
    if is_dense:
        return 2 * model.intermediate_size * element
    widths = 2 if device == "cpu" else 4
    copies = model.num_experts_per_tok * ((2 * model.hidden_size + widths * model.moe_intermediate_size) * element + 32)
    shared = 2 * model.n_shared_experts * model.moe_intermediate_size * element
    scored = model.hidden_size * 4 if element < 4 else 0  # the router works on a float32 copy
    return copies + shared + 4 * model.n_routed_experts + scored


def layer_bytes_per_token(model: ModelRecipe, element: int, device: str, *, is_dense: bool) -> int:
    """Everything: the two halves' inputs before and after their norms (4D), attention, MLP or experts."""
    halves = 4 * model.hidden_size * element + 8
    return (
        halves
        + attention_bytes_per_token(model, element)
        + mlp_bytes_per_token(model, element, device, is_dense=is_dense)
    )


def head_bytes(model: ModelRecipe, resources: TrainingResources, num_tokens: int, element: int) -> int:
    """Bytes at the unembedding, the larger of two: in the forward pass a chunk of logits with its float32 copy and its
    gradient, in the backward pass its weight's gradient, scaled and in the weight's dtype."""
    own_vocabulary = model.vocab_size // resources.tensor_parallel
    num_logits = min(num_tokens, max(1, logits_per_chunk(resources.device) // own_vocabulary)) * own_vocabulary
    widths = (4, 4) if element == 4 else (2 * element + 4, element + 4)
    return max(widths[0] * num_logits, widths[1] * own_vocabulary * model.hidden_size)


def activation_bytes(
    model: ModelRecipe,
    resources: TrainingResources,
    num_tokens: int,
    element: int,
    layers: Sequence[int],
    *,
    in_flight: int,
    is_last: bool,
    between_only: bool = False,
) -> int:
    """Bytes of a pipeline stage that holds these trunk layers (the last stage also the MTP layer) with `in_flight`
    micro-batches between their forward and backward passes. `num_tokens` are those of one micro-batch on one context
    rank; tensor ranks divide everything that they do not gather. `between_only` leaves out what lives during a pass and
    not between the two: a recomputed block, a chunk of logits."""
    depths = [number < model.first_k_dense_replace for number in layers] + [False] * (
        model.num_nextn_predict_layers if is_last else 0
    )
    hidden, device = model.hidden_size * element, resources.device
    every = [layer_bytes_per_token(model, element, device, is_dense=is_dense) for is_dense in depths]
    working = 0
    if resources.recompute == "none":
        kept = sum(every)
    elif resources.recompute == "selective":
        kept = sum(
            4 * hidden + 8 + mlp_bytes_per_token(model, element, device, is_dense=True) * is_dense
            for is_dense in depths
        )
        halves = attention_bytes_per_token(model, element), mlp_bytes_per_token(model, element, device, is_dense=False)
        working = max(halves) if depths else 0
    else:
        size = min(resources.recompute_every_layers, max(1, len(layers)))
        kept = hidden * -(-len(layers) // size) + hidden * (len(depths) - len(layers))
        working = max((sum(every[first : first + size]) for first in range(0, len(layers), size)), default=0)
    # Attention and dense or shared MLP see all positions, gathered from the slices of the tensor ranks, and keep them
    # where not recomputed.
    num_gathered = {"none": 2 * len(depths), "selective": sum(depths), "full": 0}[resources.recompute]
    kept += hidden * num_gathered * (resources.tensor_parallel - 1)
    total = in_flight * kept
    if is_last:
        # Around the unembedding the last norm's input and the gradient made in advance; of the MTP layer that gradient
        # too, and, where it is not recomputed as a whole, both its inputs before and after their norms and its output.
        total += hidden * (2 + (1 if resources.recompute == "full" else 6) * model.num_nextn_predict_layers)
    between = total * num_tokens // resources.tensor_parallel
    passing = working * num_tokens // resources.tensor_parallel
    if is_last:
        # Each pass through the unembedding leaves its weight's gradient in float32: made in the forward pass, while
        # logits are at hand.
        between += (
            (1 + model.num_nextn_predict_layers) * 4 * model.vocab_size * model.hidden_size // resources.tensor_parallel
        )
        passing = max(passing, head_bytes(model, resources, num_tokens, element))
    return between + (0 if between_only else passing)
