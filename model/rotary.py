"""Rotary position embedding over the leading dimensions of a head: positions in, rotated queries and keys out."""

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, rotary_dim: int, rope_theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, (..., rotary_dim), always float32.

    Computed from the position on each call instead of kept as a buffer, so that casting a module cannot round the frequencies.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angles = positions[..., None].float() * (1.0 / rope_theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads_BTNH: Tensor, cosine_TR: Tensor, sine_TR: Tensor) -> Tensor:
    """Rotate the first R = rotary_dim dimensions by pairs (i, i + R/2), as Hugging Face's glm4_moe does; the rest passes through."""
    rotary_dim = cosine_TR.shape[-1]
    half = rotary_dim // 2
    rotated = heads_BTNH[..., :rotary_dim]
    swapped = torch.cat([-rotated[..., half:], rotated[..., :half]], dim=-1)
    cosine, sine = cosine_TR.unsqueeze(-2).to(heads_BTNH.dtype), sine_TR.unsqueeze(-2).to(heads_BTNH.dtype)
    return torch.cat([torch.addcmul(rotated * cosine, swapped, sine), heads_BTNH[..., rotary_dim:]], dim=-1)
