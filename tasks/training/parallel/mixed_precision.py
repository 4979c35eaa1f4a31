"""Computes in bfloat16 over float32 parameters, which are their own master weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call


class ComputeInBfloat16(nn.Module):
    """Runs a model on bfloat16 copies of its parameters, the same as `model.to(bfloat16)` computes.

    The copy is differentiable: gradients arrive in float32 and accumulate there over micro-batches. Buffers stay as
    they are: a router bias in bfloat16 would select other experts.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any, **named: Any) -> Any:
        copies = {name: parameter.to(torch.bfloat16) for name, parameter in self.model.named_parameters()}
        return functional_call(self.model, copies, arguments, named)
