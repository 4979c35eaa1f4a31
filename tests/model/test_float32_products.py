"""Products of bfloat16 factors in float32 are those of factors cast to float32."""

import pytest
import torch
import torch.nn.functional as F

from model.architecture.float32_products import BFloat16Linear, add_product
from model.architecture.preferences import ScoreHead


@pytest.fixture
def factors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(46)
    tokens = torch.randn(96, 40, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(12, 40, generator=generator).bfloat16().requires_grad_()
    gradient = torch.randn(96, 12, generator=generator) * torch.logspace(-12, 4, 12)
    return tokens, weight, gradient


def test_the_product_and_its_gradients_are_those_of_factors_cast_to_float32(factors):
    tokens, weight, gradient = factors
    expected = F.linear(tokens.float(), weight.float())
    expected_gradients = torch.autograd.grad(expected, (tokens, weight), gradient)
    actual = BFloat16Linear.apply(tokens, weight)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for got, wanted in zip(torch.autograd.grad(actual, (tokens, weight), gradient), expected_gradients, strict=True):
        # Both are rounded to bfloat16 once, so they differ by one step of it at most, where a sum is near its middle.
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-5)
        assert (got != wanted).float().mean() < 0.01


def test_a_gradient_far_below_bfloat16s_precision_is_not_lost():
    """1 + 2^-20 rounds to 1 in bfloat16; the weight's gradient keeps what is beyond."""
    tokens = torch.tensor([[1.0], [-1.0]]).bfloat16()
    weight = torch.ones(1, 1).bfloat16().requires_grad_()
    gradient = torch.tensor([[1.0 + 2.0**-20], [1.0]])
    (got,) = torch.autograd.grad(BFloat16Linear.apply(tokens, weight), weight, gradient)
    assert got.item() == 2.0**-20


def test_a_product_is_added_to_its_float32_sum(factors):
    tokens, weight, _ = (tensor.detach() for tensor in factors)
    total = torch.ones(96, 12)
    add_product(total, tokens.float(), weight.float().t())
    torch.testing.assert_close(total, 1 + F.linear(tokens.float(), weight.float()))


def test_scores_of_bfloat16_states_are_not_rounded_to_bfloat16():
    head = ScoreHead(40).bfloat16()
    torch.nn.init.constant_(head.weight, 0.1)
    hidden = torch.full((2, 3, 40), 1.0).bfloat16()
    hidden[:, 0, 0] = 1.0078125
    scores = head.values(hidden)
    assert scores.shape == (2, 3) and scores.dtype == torch.float32
    assert (scores[:, 0] > scores[:, 1]).all(), "4.0078 and 4.0070 are one number in bfloat16"
    assert torch.equal(head(hidden, torch.tensor([0, 1])), scores[[0, 1], [0, 1]])
