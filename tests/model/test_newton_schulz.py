"""Newton-Schulz against DeepSpeed's and against the singular value decomposition."""

import pytest
import torch

from model.optimizer.newton_schulz import orthogonalize


@pytest.mark.parametrize("shape", [(48, 48), (40, 48), (16, 96), (96, 16), (5, 24, 32), (3, 64, 16)], ids=str)
def test_newton_schulz_equals_deepspeeds_and_nears_the_polar_factor(shape: tuple[int, ...]) -> None:
    from deepspeed.runtime.zero.muon.original_muon import zeropower_via_newtonschulz5

    matrices = 30 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours = orthogonalize(matrices, 5)
    # Its standard iteration computes in bfloat16; in float64 the same source is the exact polynomial.
    exact = _in_float64(zeropower_via_newtonschulz5, matrices)
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)
    values = torch.linalg.svdvals(ours)
    assert values.min().item() > 0.6 and values.max().item() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.linalg.svdvals(ours - left @ right).max().item() < 0.4


def _in_float64(function, matrices: torch.Tensor) -> torch.Tensor:
    from unittest.mock import patch

    plain = getattr(function, "_torchdynamo_orig_callable", function)
    with patch("deepspeed.runtime.zero.muon.original_muon.ns_compute_dtype", return_value=torch.float64):
        return plain(matrices.double(), 5).float()


def test_scale_of_the_gradient_does_not_matter() -> None:
    matrix = torch.randn(24, 32, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(orthogonalize(matrix * 1e-3, 5), orthogonalize(matrix * 1e3, 5), rtol=1e-3, atol=1e-4)
