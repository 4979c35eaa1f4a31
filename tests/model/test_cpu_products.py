"""Products on a CPU: whose library is chosen, that nothing is rounded, that shapes repeat, and what that changes."""

from __future__ import annotations

import pytest
import torch

from model.architecture.gated_mlp import apply_grouped_mlp
from model.kernels import cpu_products
from model.kernels.cpu_products import is_onednn_exact, mkl_products, onednn_products, repeating_size

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
    monkeypatch.setattr(cpu_products, "is_onednn_exact", lambda: False)
    with onednn_products():
        assert MATMUL.fp32_precision == "ieee"


def test_rounding_to_bfloat16_is_seen(monkeypatch):
    """The probe with products as a processor with AMX makes them."""

    def rounded(left, right):
        return (left.bfloat16().float()[..., None] * right.bfloat16().float()[..., None, :, :]).sum(-2)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not is_onednn_exact.__wrapped__()


def test_sizes_repeat_at_a_small_cost():
    sizes = [repeating_size(size, torch.bfloat16) for size in range(1, 5000)]
    assert all(size <= padded < max(size + 16, size * (1 + 1 / 16) + 1) for size, padded in enumerate(sizes, 1))
    assert len(set(sizes)) < 200


@pytest.mark.parametrize("counts", [[7, 0, 33, 300, 1], [0, 0, 0, 0, 0], [0, 0, 5, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_are_computed_for_the_shape_alone_change_nothing(counts, dtype):
    """In float64 the padding of bfloat16 is borrowed: nothing but it could differ."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(counts), 16), (5, 24, 16), (5, 24, 16), (5, 16, 24)]
    inputs = [(torch.randn(shape, generator=generator, dtype=torch.float64) / 4).to(dtype) for shape in shapes]
    results = []
    for size in (lambda size, dtype: size, lambda size, dtype: repeating_size(size, torch.bfloat16)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("model.architecture.gated_mlp.repeating_size", size)
            own = [tensor.clone().requires_grad_() for tensor in inputs]
            out = apply_grouped_mlp(*own, torch.tensor(counts))
            (out * torch.arange(16, dtype=dtype)).sum().backward()
            results.append([out.detach(), *(tensor.grad for tensor in own)])
    bounds = {torch.float64: (1e-12, 1e-12), torch.bfloat16: (0.05, 0.05)}[dtype]
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, rtol=bounds[0], atol=bounds[1])
