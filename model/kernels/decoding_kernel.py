"""The interface of `decoding_kernel.cpp`: its structures, field for field, and the layout of its matrices."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from model.kernels.native_library import load_library

SOURCE = Path(__file__).with_suffix(".cpp")


class Layer(ctypes.Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            "input_norm",
            "post_norm",
            "q_norm",
            "k_norm",
            "qkv_bias",
            "router_bias",
            "qkv",
            "output",
            "gate_up",
            "down",
            "router",
            "expert_gate_up",
            "expert_down",
            "enorm",
            "hnorm",
            "eh",
        )
    ] + [("mlp_width", c_int64), ("is_moe", c_int64)]


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("mtp_norm", c_void_p),
        ("head", c_void_p),
        *(
            (name, c_int64)
            for name in (
                "num_layers",
                "hidden_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "rotary_dim",
                "num_experts",
                "experts_per_token",
                "expert_width",
                "vocab_size",
                "is_half",
                "normalises_weights",
                "num_threads",
            )
        ),
        ("routed_scale", c_double),
        ("eps", c_double),
    ]


class Cache(ctypes.Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("num_sequences", c_int64),
        ("capacity", c_int64),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int64),
        ("token_ids", c_void_p),
        ("sequences", c_void_p),
        ("positions", c_void_p),
        ("mtp_hidden", c_void_p),
        ("hidden", c_void_p),
        ("routes", c_void_p),
        ("num_read", c_int64),
        ("read", c_void_p),
        ("temperature", c_double),
        ("draws", c_void_p),
        ("chosen", c_void_p),
        ("log_probability", c_void_p),
        ("sampled_log_probability", c_void_p),
        ("margin", c_void_p),
        ("logits", c_void_p),
        ("has_failed", c_int64),
    ]


@cache
def load_kernel() -> ctypes.CDLL:
    """The library with the types of its functions."""
    library = load_library(SOURCE)
    library.new_scratch.restype = c_void_p
    library.panel_width.restype = library.block_positions.restype = c_int64
    library.run_pass.argtypes = [POINTER(Model), POINTER(Cache), POINTER(Call), c_void_p]
    library.free_scratch.argtypes = [c_void_p]
    return library


def pack_panels(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices of (..., outputs, inputs) of equal inputs, side by side in panels of `panel_width` outputs, zero-padded:
    (..., panels, inputs, panel_width). One matrix fills its panels; of two matrices each has one half of every panel.
    In bfloat16 the halves of a panel are interleaved: each pair makes one word, from which both are widened."""
    part = load_kernel().panel_width() // len(matrices)
    packed = []
    for matrix in matrices:
        *leading, outputs, inputs = matrix.shape
        padded = matrix.new_zeros(*leading, -(-outputs // part) * part, inputs)
        padded[..., :outputs, :] = matrix
        packed.append(padded.unflatten(-2, (-1, part)).transpose(-1, -2))
    panels = torch.cat(packed, dim=-1).to(dtype)
    if dtype == torch.bfloat16:
        panels = panels.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return panels.contiguous()
