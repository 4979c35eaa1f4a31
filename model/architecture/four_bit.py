"""Frozen matrices in 4 bits: NF4 codes in blocks of 64, whose scales have 8 bits (QLoRA, arXiv 2305.14314, section 3).

A matrix is quantized once, when its weights are loaded. Each product makes it whole again, one at a time, and keeps
nothing of that (grouped_linear.py). bitsandbytes computes both directions; it is the extra `qlora` of this package, and
imported only here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from model.architecture.counts import FOUR_BIT_BLOCK, FOUR_BIT_GROUP


class FourBitMatrices(nn.Module):
    """Matrices (E, O, I), each quantized by itself: buffers of undefined content until `put`, in no checkpoint."""

    codes: Tensor
    """(E, O * I / 2), two to a byte."""
    scales: Tensor
    """(E, blocks): the largest magnitude of a block less the mean of its matrix, 8 bits."""
    scale_ranges: Tensor
    """(E, groups): the largest of FOUR_BIT_GROUP such differences, float32."""
    mean_scales: Tensor
    """(E,), float32."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        num_elements = shape[1] * shape[2]
        num_blocks = -(-num_elements // FOUR_BIT_BLOCK)
        for name, width, dtype in (
            ("codes", (-(-num_elements // 2),), torch.uint8),
            ("scales", (num_blocks,), torch.uint8),
            ("scale_ranges", (-(-num_blocks // FOUR_BIT_GROUP),), torch.float32),
            ("mean_scales", (), torch.float32),
        ):
            self.register_buffer(name, torch.empty(shape[0], *width, dtype=dtype, device=device), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FourBitMatrices:
        # A cast of the model to bfloat16 would round the scales: only the device may change.
        return super()._apply(lambda buffer: buffer.to(fn(buffer).device), recurse)

    @torch.no_grad()
    def put(self, number: int, matrix_OI: Tensor) -> None:
        """Quantize one of the matrices, finite numbers of any floating dtype."""
        codes, state = _functional().quantize_4bit(
            matrix_OI.to(self.device), blocksize=FOUR_BIT_BLOCK, quant_type="nf4", compress_statistics=True
        )
        self.codes[number].copy_(codes.view(-1))
        self.scales[number].copy_(state.absmax)
        self.scale_ranges[number].copy_(state.state2.absmax)
        self.mean_scales[number].copy_(state.offset)

    @torch.no_grad()
    def whole(self, number: int, dtype: torch.dtype) -> Tensor:
        """One of the matrices, (O, I), new."""
        functional = _functional()
        scales = functional.QuantState(
            self.scale_ranges[number], code=_scale_codes(self.device), blocksize=FOUR_BIT_GROUP, dtype=torch.float32
        )
        state = functional.QuantState(
            self.scales[number],
            # As one row: where blocks run over the ends of rows, the kernel for AVX-512 is wrong (0.50.2).
            shape=(self.shape[1] * self.shape[2],),
            blocksize=FOUR_BIT_BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=self.mean_scales[number],
            state2=scales,
        )
        # Codes as a column: it transposes what comes as a row.
        return functional.dequantize_4bit(self.codes[number].view(-1, 1), state).view(self.shape[1:])


@cache
def _scale_codes(device: torch.device) -> Tensor:
    """The 256 values of a scale, as shares of its range."""
    return _functional().create_dynamic_map().to(device)


def _functional() -> Any:
    """bitsandbytes.functional. Raises ValueError where it is not installed."""
    # On some CPUs it warns at import of a kernel for inference, which is never called here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return import_module("bitsandbytes.functional")
    except ModuleNotFoundError as error:
        raise ValueError("weights in 4 bits need bitsandbytes: pip install 'glm46[qlora]'") from error
