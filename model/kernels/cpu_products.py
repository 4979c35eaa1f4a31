"""Which library multiplies matrices on a CPU, and the shapes it is given.

torch gives products in bfloat16 to oneDNN and those in float32 to MKL. MKL uses no AVX-512 on AMD's processors: oneDNN
takes half the time there. torch lets it have float32 products only together with leave to round to bfloat16. oneDNN
does so on processors with AMX; there MKL stays.

oneDNN prepares itself for every new shape. That takes about a millisecond, more than the product of an expert's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MATMUL = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
_ONEDNN, _MKL = "bf16", "ieee"


@contextmanager
def onednn_products() -> Iterator[None]:
    """For products whose shapes repeat, where oneDNN computes them in float32; ends with what was set before."""
    with _library(_ONEDNN if is_onednn_exact() else _MKL):
        yield


@contextmanager
def mkl_products() -> Iterator[None]:
    """For products whose shapes change from call to call."""
    with _library(_MKL):
        yield


@contextmanager
def _library(name: str) -> Iterator[None]:
    before = _MATMUL.fp32_precision
    _MATMUL.fp32_precision = name
    try:
        yield
    finally:
        _MATMUL.fp32_precision = before


def repeating_size(size: int, dtype: torch.dtype) -> int:
    """A size that changes from product to product, rounded up by at most 15 or a sixteenth where oneDNN computes."""
    if dtype == torch.float32 and _MATMUL.fp32_precision != _ONEDNN:
        return size
    multiple = max(16, 1 << max(size.bit_length() - 5, 0))
    return -(-size // multiple) * multiple


@functools.cache
def is_onednn_exact() -> bool:
    """Whether oneDNN, given leave to round, computes and keeps bits that bfloat16 has not. Without AVX-512 torch does
    not ask it."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    with _library(_ONEDNN):
        for size in (32, 128, 512):
            values = torch.full((size, size), 1 + 2.0**-20)
            identity = torch.eye(size)
            products = [values @ identity, identity @ values.t(), torch.bmm(values[None], identity[None])[0]]
            if any(not torch.equal(product, values) for product in products):
                return False
    return True
