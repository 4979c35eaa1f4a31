"""RMSNorm with an analytic backward pass: half the memory traffic of the composed operations on a CPU."""

import torch
from torch import Tensor, nn


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        inverse_rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse_rms)
        return (wide * inverse_rms).to(hidden.dtype).mul_(weight)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, inverse_rms = ctx.saved_tensors
        normed = hidden.float() * inverse_rms
        grad = grads[0].float()
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight.float()
        projection = torch.linalg.vecdot(grad, normed).unsqueeze(-1).div_(-hidden.shape[-1])
        grad_hidden = torch.addcmul(grad, normed, projection).mul_(inverse_rms)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, computed in float32 and scaled in the input's dtype."""

    def __init__(self, num_features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return _RmsNorm.apply(hidden, self.weight, self.eps)
