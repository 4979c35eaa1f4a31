"""Causal attention inside documents on a CPU in float32: the autograd function over `attention_kernel.cpp`.

Unlike torch's attention it leaves out what no position sees, reads grouped heads in place and needs no mask. 8 x 512
positions, 8 query heads of 32 over 2 key heads, one thread: 25 ms forward and 44 backward, torch 43 and 115.
"""

from ctypes import c_float, c_int64
from pathlib import Path

import torch
from torch import Tensor

from model.kernels.native_library import load_library, pointers

SOURCE = Path(__file__).with_suffix(".cpp")
PANEL = 16


def fits(query_BTNH: Tensor, key_BSGH: Tensor) -> bool:
    """Whether the kernel does this attention: float32 on a CPU, as many keys as queries, heads a multiple of 16
    wide."""
    is_plain = query_BTNH.device.type == "cpu" and query_BTNH.dtype == key_BSGH.dtype == torch.float32
    return is_plain and query_BTNH.shape[1] == key_BSGH.shape[1] and query_BTNH.shape[-1] % PANEL == 0


class CausalAttention(torch.autograd.Function):
    """Position t sees starts[t] .. t; the starts, int32, never fall along a row."""

    @staticmethod
    def forward(ctx, query_BTNH: Tensor, key_BTGH: Tensor, value_BTGH: Tensor, starts_BT: Tensor) -> Tensor:
        query_BTNH, key_BTGH, value_BTGH = query_BTNH.contiguous(), key_BTGH.contiguous(), value_BTGH.contiguous()
        num_rows, num_positions, num_heads, _ = query_BTNH.shape
        mixed_BTNH = torch.empty_like(query_BTNH)
        log_sums_BNT = query_BTNH.new_empty(num_rows, num_heads, num_positions)
        load_library(SOURCE).attention_forward(
            *_sizes(query_BTNH, key_BTGH),
            *pointers(query_BTNH, key_BTGH, value_BTGH, starts_BT, mixed_BTNH, log_sums_BNT),
            *_scale_and_threads(query_BTNH),
        )
        ctx.save_for_backward(query_BTNH, key_BTGH, value_BTGH, starts_BT, mixed_BTNH, log_sums_BNT)
        return mixed_BTNH

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_BTNH, key_BTGH, value_BTGH, starts_BT, mixed_BTNH, log_sums_BNT = ctx.saved_tensors
        grad_BTNH = grads[0].contiguous()
        gradients = torch.empty_like(query_BTNH), torch.empty_like(key_BTGH), torch.empty_like(value_BTGH)
        load_library(SOURCE).attention_backward(
            *_sizes(query_BTNH, key_BTGH),
            *pointers(query_BTNH, key_BTGH, value_BTGH, starts_BT, mixed_BTNH, log_sums_BNT, grad_BTNH, *gradients),
            *_scale_and_threads(query_BTNH),
        )
        return *gradients, None


def _sizes(query_BTNH: Tensor, key_BTGH: Tensor) -> list[c_int64]:
    num_rows, num_positions, num_heads, width = query_BTNH.shape
    return [c_int64(size) for size in (num_rows, num_positions, num_heads, key_BTGH.shape[2], width)]


def _scale_and_threads(query_BTNH: Tensor) -> tuple[c_float, int]:
    return c_float(query_BTNH.shape[-1] ** -0.5), torch.get_num_threads()
