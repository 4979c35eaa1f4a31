"""The passes over memory between matrix products on a CPU in float32, each one call of `elementwise_kernels.cpp`.

Callers ask `fits` first. Tests compare the kernels with the callers' plain torch code.
"""

from ctypes import c_float, c_int64
from pathlib import Path

import torch
from torch import Tensor

from model.kernels.native_library import load_library, pointers

SOURCE = Path(__file__).with_suffix(".cpp")
LANES = 8


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels take these: float32 on a CPU, the last dimension a multiple of 8."""
    return all(
        tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.shape[-1] % LANES == 0
        for tensor in tensors
    )


def norm_forward(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, and one over the root mean square of every row."""
    normalised, inverses = torch.empty_like(hidden), hidden.new_empty(hidden.shape[:-1])
    load_library(SOURCE).norm_forward(
        *_rows(hidden),
        *pointers(hidden, weight),
        c_float(eps),
        *pointers(normalised, inverses),
        torch.get_num_threads(),
    )
    return normalised, inverses


def norm_backward(grad: Tensor, hidden: Tensor, weight: Tensor, inverses: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the hidden states and of the weight."""
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
    load_library(SOURCE).norm_backward(
        *_rows(hidden), *pointers(grad, hidden, weight, inverses, grad_hidden, grad_weight), torch.get_num_threads()
    )
    return grad_hidden, grad_weight


class NormalisedRotation(torch.autograd.Function):
    """rotate(RMSNorm(heads)), without the norm where `weight` is None. The tables (..., T, R) have one row per
    position."""

    @staticmethod
    def forward(
        ctx, heads_BTNH: Tensor, weight: Tensor | None, eps: float, cosine_TR: Tensor, sine_TR: Tensor
    ) -> Tensor:
        heads_BTNH = heads_BTNH.contiguous()
        cosine_TR, sine_TR = cosine_TR.contiguous(), sine_TR.contiguous()
        turned_BTNH, inverses_BTN = torch.empty_like(heads_BTNH), heads_BTNH.new_empty(heads_BTNH.shape[:-1])
        load_library(SOURCE).heads_forward(
            *_head_sizes(heads_BTNH, cosine_TR),
            *pointers(heads_BTNH, weight),
            c_float(eps),
            *pointers(cosine_TR, sine_TR, turned_BTNH, inverses_BTN),
            torch.get_num_threads(),
        )
        ctx.save_for_backward(heads_BTNH, weight, cosine_TR, sine_TR, inverses_BTN)
        return turned_BTNH

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        heads_BTNH, weight, cosine_TR, sine_TR, inverses_BTN = ctx.saved_tensors
        grad_heads_BTNH, grad_weight = (
            torch.empty_like(heads_BTNH),
            None if weight is None else torch.empty_like(weight),
        )
        grad_BTNH = grads[0].contiguous()
        load_library(SOURCE).heads_backward(
            *_head_sizes(heads_BTNH, cosine_TR),
            *pointers(grad_BTNH, heads_BTNH, weight, cosine_TR, sine_TR, inverses_BTN, grad_heads_BTNH, grad_weight),
            torch.get_num_threads(),
        )
        return grad_heads_BTNH, grad_weight, None, None, None


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    product = torch.empty_like(gate)
    load_library(SOURCE).silu_product(c_int64(gate.numel()), *pointers(gate, up, product), torch.get_num_threads())
    return product


def silu_product_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of silu(gate) * up for gate and up, and the product itself; `grad` is overwritten."""
    grad_gate, product = torch.empty_like(gate), torch.empty_like(gate)
    load_library(SOURCE).silu_product_backward(
        c_int64(gate.numel()), *pointers(grad, gate, up, grad_gate, product), torch.get_num_threads()
    )
    return grad_gate, grad, product


def softmax_losses(logits_CV: Tensor, columns_C: Tensor, factors_C: Tensor | None) -> Tensor:
    """-log softmax(logits)[column] per row, (C,). With factors the logits are overwritten by factor * (softmax -
    one-hot(column))."""
    losses_C = logits_CV.new_empty(logits_CV.shape[0])
    load_library(SOURCE).softmax_losses(
        *_rows(logits_CV), *pointers(logits_CV, columns_C, factors_C, losses_C), torch.get_num_threads()
    )
    return losses_C


def _rows(tensor: Tensor) -> tuple[c_int64, c_int64]:
    width = tensor.shape[-1]
    return c_int64(tensor.numel() // width), c_int64(width)


def _head_sizes(heads_BTNH: Tensor, cosine_TR: Tensor) -> list[c_int64]:
    num_heads, width = heads_BTNH.shape[-2:]
    rotary_dim = cosine_TR.shape[-1]
    num_tokens, num_positions = heads_BTNH.numel() // (num_heads * width), cosine_TR.numel() // rotary_dim
    return [c_int64(size) for size in (num_tokens, num_positions, num_heads, width, rotary_dim // 2)]
