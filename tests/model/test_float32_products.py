"""The libraries of float32 products: who is chosen, that nothing is rounded, and that the choice ends with its block."""

from __future__ import annotations

import pytest
import torch

from model.kernels import float32_products
from model.kernels.float32_products import is_onednn_exact, mkl_products, onednn_products

MATMUL = torch.backends.mkldnn.matmul


def test_products_of_either_library_are_those_of_float32():
    left = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    right = torch.randn(256, 160, generator=torch.Generator().manual_seed(2))
    exact = left.double() @ right.double()
    for products in (mkl_products, onednn_products):
        with products():
            error = ((left @ right).double() - exact).abs().max()
        assert error < 256 * 2**-24 * 16, "bfloat16 is a thousand times worse"


def test_the_choice_ends_with_its_block():
    before = MATMUL.fp32_precision
    with onednn_products():
        chosen = MATMUL.fp32_precision
        with pytest.raises(KeyError), mkl_products():
            assert MATMUL.fp32_precision == "ieee"
            raise KeyError
        assert MATMUL.fp32_precision == chosen == ("bf16" if is_onednn_exact() else "ieee")
    assert MATMUL.fp32_precision == before


def test_a_processor_on_which_onednn_rounds_keeps_torchs_library(monkeypatch):
    monkeypatch.setattr(float32_products, "is_onednn_exact", lambda: False)
    with onednn_products():
        assert MATMUL.fp32_precision == "ieee"


def test_rounding_to_bfloat16_is_seen(monkeypatch):
    """The probe with products as a processor with AMX makes them."""

    def rounded(left, right):
        return (left.bfloat16().float()[..., None] * right.bfloat16().float()[..., None, :, :]).sum(-2)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not is_onednn_exact.__wrapped__()
