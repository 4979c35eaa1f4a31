"""Layers whose frozen matrices are in 4 bits, in place of the plain ones of a decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.architecture.decoder_layer import DecoderLayer
from model.architecture.four_bit import FourBitMatrices
from model.architecture.gated_mlp import SeparateMlp
from model.architecture.grouped_linear import frozen_linear
from model.architecture.moe import Experts, MixtureOfExperts, SeparateExperts


class FourBitLinear(nn.Linear):
    """A linear layer; its bias stays as it is."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        shape = torch.Size((1, self.out_features, self.in_features))
        self.register_module("weight", FourBitMatrices(shape, linear.weight.device))

    def forward(self, input: Tensor) -> Tensor:
        out = frozen_linear(input, self.weight)
        return out if self.bias is None else out + self.bias


class FourBitExperts(SeparateExperts):
    """All routed experts of a layer."""

    def __init__(self, experts: Experts) -> None:
        nn.Module.__init__(self)
        for name, weight_EOI in experts.named_parameters():
            setattr(self, name, FourBitMatrices(weight_EOI.shape, weight_EOI.device))


def hold_in_four_bits(layer: DecoderLayer) -> None:
    """Replace, in place, the matrices of attention, MLP, shared and routed experts by ones of undefined content; norms
    and the router stay."""
    attention, mlp = layer.self_attn, layer.mlp
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, FourBitLinear(getattr(attention, name)))
    if not isinstance(mlp, MixtureOfExperts):
        layer.mlp = SeparateMlp(mlp, FourBitLinear)
        return
    mlp.experts = FourBitExperts(mlp.experts)
    if mlp.shared_experts is not None:
        mlp.shared_experts = SeparateMlp(mlp.shared_experts, FourBitLinear)


def four_bit_matrices(model: nn.Module) -> dict[str, FourBitMatrices]:
    """All of a model's, by the name that the parameter in their place would have."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FourBitMatrices)}
