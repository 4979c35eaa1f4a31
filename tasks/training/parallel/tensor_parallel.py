"""Tensor parallelism with sequence-parallel norms: a built model becomes this rank's part of it, in place.

The matrices of attention and of the dense and shared MLPs are divided by output features (q, k, v, gate, up) or by
input features (o, down). Embedding and unembedding are divided by rows of the vocabulary. Between these blocks a rank
holds a slice of the positions. So norms, residual additions, routers and routed experts are computed once, not once
per rank (arXiv 2205.05198). A rank's balance loss and routed copies are those of its slice: a step adds them up once
(tasks/training/loop/training_step.py). Routed experts are not divided here: their tokens are sent to other ranks
(tasks/training/parallel/expert_parallel.py), tensor ranks among them, as these hold different tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from model.architecture.adapters import AdaptedLinear
from model.architecture.attention import Attention
from model.architecture.decoder_layer import DecoderLayer
from model.architecture.gated_mlp import GatedMlp
from model.architecture.moe import Experts, MixtureOfExperts
from model.architecture.mtp import MtpLayer
from model.architecture.transformer import Glm4Moe
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.shards import Shard, own_part, shard_of
from tasks.training.parallel.tensor_collectives import (
    cut_slice,
    features_to_positions,
    gather_positions,
    sum_to_slices,
    sum_values,
)
from tasks.training.parallel.tensor_vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead

BY_OUTPUT, BY_INPUT = Shard("tensor", 0), Shard("tensor", 1)


def divide_matrices(model: Glm4Moe, ranks: Ranks) -> None:
    """Keep this rank's part of every matrix and mark it with its `Shard`; nothing where the tensor axis has one rank.

    What stays whole saw only a slice of the positions or of the heads: `is_partial_over_tensor` says that its gradient
    is to be summed. Reads shapes only, so that a model on the meta device can be divided and filled later.
    """
    axis = ranks.tensor
    if axis.size == 1:
        return
    decoder = model.model
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer), layer
        _divide_layer(layer, ranks)
    decoder.embed_tokens = VocabularyParallelEmbedding(
        _own_parameter(decoder.embed_tokens.weight, BY_OUTPUT, ranks), axis
    )
    if not model.is_scored:  # a scalar head has one row (divided_scores.py)
        model.lm_head = VocabularyParallelHead(_own_parameter(model.lm_head.weight, BY_OUTPUT, ranks), axis)
    model.num_slices = axis.size
    model.pair_for_mtp = partial(_pair_slices, model.pair_for_mtp, axis)
    for parameter in _undivided(model, ranks):
        parameter.is_partial_over_tensor = True  # pyright: ignore[reportAttributeAccessIssue]


def _undivided(model: nn.Module, ranks: Ranks) -> list[nn.Parameter]:
    """Experts that are divided among ranks get tokens from all of these, so their gradients are not summed over the
    tensor axis."""
    elsewhere = set()
    if ranks.expert.size > 1:
        elsewhere = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, Experts)
            for parameter in module.parameters()
        }
    return [
        parameter for parameter in model.parameters() if shard_of(parameter) is None and id(parameter) not in elsewhere
    ]


def _divide_layer(layer: DecoderLayer, ranks: Ranks) -> None:
    collectives = _LayerCollectives(ranks.tensor, rotary_index=2 if isinstance(layer, MtpLayer) else 1)
    layer.register_forward_pre_hook(collectives.note_positions)
    if isinstance(layer, MtpLayer):
        _divide_linear(layer.eh_proj, BY_OUTPUT, ranks)
        collectives.wrap(layer.eh_proj, features_to_positions)
    for module in layer.modules():
        if isinstance(module, Attention):
            _divide_linears((module.q_proj, module.k_proj, module.v_proj), module.o_proj, ranks)
        elif isinstance(module, GatedMlp):
            _divide_linears((module.gate_proj, module.up_proj), module.down_proj, ranks)
        elif isinstance(module, MixtureOfExperts):
            module.sum_over_parts = partial(collectives.sum_over_slices, module.sum_over_parts)
            module.own_positions = partial(_own_slice, module.own_positions, ranks.tensor)
        if isinstance(module, Attention | GatedMlp):
            collectives.wrap(module, sum_to_slices)


def _own_slice(own_positions: Callable[[Tensor], Tensor], axis: Axis, rows_BT: Tensor) -> Tensor:
    """Where sequences are divided among context ranks, slices are parts of what a context rank holds."""
    return cut_slice(own_positions(rows_BT), axis)


def _divide_linears(column_parallel: tuple[nn.Linear, ...], row_parallel: nn.Linear, ranks: Ranks) -> None:
    for linear in column_parallel:
        _divide_linear(linear, BY_OUTPUT, ranks)
    _divide_linear(row_parallel, BY_INPUT, ranks)


def _divide_linear(linear: nn.Linear, shard: Shard, ranks: Ranks) -> None:
    """A bias goes with its outputs."""
    linear.weight = _own_parameter(linear.weight, shard, ranks)
    linear.out_features, linear.in_features = linear.weight.shape
    if linear.bias is not None:
        assert shard is BY_OUTPUT, "the bias of a matrix that is divided by inputs would be added once per rank"
        linear.bias = _own_parameter(linear.bias, shard, ranks)
    if isinstance(linear, AdaptedLinear):
        _divide_adapter(linear, shard, ranks)


def _divide_adapter(linear: AdaptedLinear, shard: Shard, ranks: Ranks) -> None:
    """B and the magnitudes go with the outputs, A goes with the inputs; the other half stays whole."""
    if shard is BY_INPUT:
        linear.lora_A.weight = _own_parameter(linear.lora_A.weight, BY_INPUT, ranks)
        linear.sum_over_inputs = partial(sum_values, axis=ranks.tensor)
        return
    linear.lora_B.weight = _own_parameter(linear.lora_B.weight, BY_OUTPUT, ranks)
    if linear.lora_magnitude_vector is not None:
        linear.lora_magnitude_vector = _own_parameter(linear.lora_magnitude_vector, BY_OUTPUT, ranks)


def _own_parameter(whole: Tensor, shard: Shard, ranks: Ranks) -> nn.Parameter:
    part = nn.Parameter(own_part(whole.detach(), shard, ranks).clone(), whole.requires_grad)
    part.shard = shard  # pyright: ignore[reportAttributeAccessIssue]
    return part


def _pair_slices(
    pair_all: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], axis: Axis, embedded_BTD: Tensor, hidden_BTD: Tensor
) -> tuple[Tensor, Tensor]:
    """The next token's embedding may be in the next rank's slice; a last position that has none is the last of the last
    slice."""
    whole_BTD = gather_positions(embedded_BTD, embedded_BTD.shape[1] * axis.size, axis)
    next_BTD, _ = pair_all(whole_BTD, whole_BTD)
    next_BTD = cut_slice(next_BTD, axis)
    return next_BTD, hidden_BTD[:, : next_BTD.shape[1]]


class _LayerCollectives:
    """What is done around the divided matrices of one layer. The number of positions is that of the layer's RoPE table,
    noted before each forward pass and there still when its activations are computed again."""

    def __init__(self, axis: Axis, rotary_index: int) -> None:
        self.axis, self.rotary_index = axis, rotary_index
        self.num_positions = 0

    def note_positions(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.num_positions = arguments[self.rotary_index][0].shape[-2]

    def wrap(self, module: nn.Module, hand_back: Callable[[Tensor, Axis], Tensor]) -> None:
        """Takes and returns a slice of the positions; the module sees all of them. It is no hook: recomputation wraps
        `forward` again, so it keeps the slice and gathers once more."""
        module.forward = partial(self._run_on_all, module.forward, hand_back)

    def _run_on_all(
        self,
        forward: Callable[..., Tensor],
        hand_back: Callable[[Tensor, Axis], Tensor],
        slice_BTD: Tensor,
        *arguments: Any,
        **named: Any,
    ) -> Tensor:
        return hand_back(
            forward(gather_positions(slice_BTD, self.num_positions, self.axis), *arguments, **named), self.axis
        )

    def sum_over_slices(self, sum_over_parts: Callable[[Tensor], Tensor] | None, counts: Tensor) -> Tensor:
        """Where sequences are divided among context ranks, slices are parts of what a context rank holds."""
        total = counts.clone()
        dist.all_reduce(total, group=self.axis.group)
        return total if sum_over_parts is None else sum_over_parts(total)
