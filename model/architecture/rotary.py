"""Rotary position embedding over the leading dimensions of a head: rotates queries and keys by their positions."""

import torch
from torch import Tensor, nn

from model.architecture.norm import RMSNorm
from model.kernels import elementwise_kernels


def rotary_tables(positions: Tensor, rotary_dim: int, rope_theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, (..., rotary_dim), always float32.

    Computed from the position on each call instead of kept as a buffer, so that casting a module cannot round the
    frequencies.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angles = positions[..., None].float() * (1.0 / rope_theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads_BTNH: Tensor, cosine_TR: Tensor, sine_TR: Tensor) -> Tensor:
    """Rotate the first R = rotary_dim dimensions by pairs (i, i + R/2), as Hugging Face's glm4_moe does; the rest
    passes through."""
    rotary_dim = cosine_TR.shape[-1]
    half = rotary_dim // 2
    rotated = heads_BTNH[..., :rotary_dim]
    swapped = torch.cat([-rotated[..., half:], rotated[..., :half]], dim=-1)
    cosine, sine = cosine_TR.unsqueeze(-2).to(heads_BTNH.dtype), sine_TR.unsqueeze(-2).to(heads_BTNH.dtype)
    return torch.cat([torch.addcmul(rotated * cosine, swapped, sine), heads_BTNH[..., rotary_dim:]], dim=-1)


def rotate_heads(heads_BTNH: Tensor, norm: nn.Module, cosine_TR: Tensor, sine_TR: Tensor) -> Tensor:
    """rotate(norm(heads)), in one pass over memory where a kernel does it; the norm is an RMSNorm or leaves the heads
    as they are."""
    half = cosine_TR.shape[-1] // 2
    weight = norm.weight if isinstance(norm, RMSNorm) else None
    fits_weight = isinstance(norm, nn.Identity) or (weight is not None and elementwise_kernels.fits(weight))
    if fits_weight and half % elementwise_kernels.LANES == 0 and elementwise_kernels.fits(heads_BTNH, cosine_TR):
        eps = norm.eps if isinstance(norm, RMSNorm) else 0.0
        return elementwise_kernels.NormalisedRotation.apply(heads_BTNH, weight, eps, cosine_TR, sine_TR)
    return rotate(norm(heads_BTNH), cosine_TR, sine_TR)
