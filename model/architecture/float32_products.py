"""Products of bfloat16 factors with float32 results, on an accelerator by its bfloat16 units.

Every product of two bfloat16 numbers is exact in float32, so the result is that of factors cast to float32 before; only
the order of the sum differs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_product(sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    """sum += left right, in the sum's float32."""
    if sum_VD.dtype == left_VC.dtype:
        sum_VD.addmm_(left_VC, right_CD)
    elif sum_VD.device.type == "cpu":
        sum_VD.add_(left_VC @ right_CD)
    else:  # only an accelerator has a product of bfloat16 that adds to float32
        torch.addmm(sum_VD, left_VC, right_CD, sum_VD.dtype, out=sum_VD)  # pyright: ignore[reportCallIssue]


def linear_in_float32(tokens_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """tokens W^T, (T, E), in float32 whatever the dtype of the factors; the gradient of the result is never rounded."""
    if tokens_TD.device.type == "cpu" or tokens_TD.dtype == torch.float32:
        return F.linear(tokens_TD.float(), weight_ED.float())
    return BFloat16Linear.apply(tokens_TD, weight_ED)


class BFloat16Linear(torch.autograd.Function):
    """Forward and backward take half the time of float32 products on an H200 (64 experts, 32,768 tokens)."""

    @staticmethod
    def forward(ctx, tokens_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_TD, weight_ED)
        return _product(tokens_TD, weight_ED.t())

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        tokens_TD, weight_ED = ctx.saved_tensors
        # The float32 gradient beside both factors of the same product: three bfloat16 parts are all of its 24 bits.
        parts_TG = torch.cat(_bfloat16_parts(grads[0]), dim=1)
        grad_weights_3ED = _product(parts_TG.t(), tokens_TD).view(3, *weight_ED.shape)
        return parts_TG @ weight_ED.repeat(3, 1), grad_weights_3ED.sum(0).to(weight_ED.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.device.type == "cpu":
        return left.float() @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)


def _bfloat16_parts(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bfloat16 numbers per float32 number, whose sum it is: eight bits each. Bits are cut off, as a compiler may
    leave out a rounding that is taken back at once."""
    high = _leading_bits(values)
    middle = _leading_bits(values - high)
    return high.bfloat16(), middle.bfloat16(), (values - high - middle).bfloat16()


def _leading_bits(values: Tensor) -> Tensor:
    return (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
