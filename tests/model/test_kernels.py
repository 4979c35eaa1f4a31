"""The compiled kernels against the plain torch code beside them, which float64 takes; and that threads change no
bit."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.architecture.attention import Visible, WithinDocuments, attend, visible_within_segments
from model.architecture.gated_mlp import GatedMlp
from model.architecture.losses import LanguageHead
from model.architecture.norm import RMSNorm
from model.architecture.rotary import rotary_tables, rotate_heads
from tests.support.tolerances import CLOSE_FLOAT32

SHAPES = [(2, 7, 4, 2, 16), (1, 301, 4, 1, 32), (2, 650, 2, 2, 64), (1, 200, 6, 2, 128)]


def random_documents(num_rows: int, num_positions: int, num_documents: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, num_documents, (num_rows, num_positions), generator=generator).sort(dim=1).values


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result and the gradients of all inputs for one fixed direction."""
    inputs = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    result = function(*inputs)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(3)).to(result)
    return [result.detach(), *torch.autograd.grad(result, inputs, direction)]


def masked_attention(query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor) -> Tensor:
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]).tril()
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*heads, attn_mask=visible[:, None], enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("num_documents", [1, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_kernel_equals_masked_attention(shape: tuple[int, ...], num_documents: int) -> None:
    num_rows, num_positions, num_heads, num_kv, width = shape
    query, key, value = (torch.randn(num_rows, num_positions, heads, width) for heads in (num_heads, num_kv, num_kv))
    segments = random_documents(num_rows, num_positions, num_documents)
    visible: Visible = None if num_documents == 1 else visible_within_segments(segments)
    ours = with_gradients(lambda *heads: attend(*heads, visible), query, key, value)
    naive = with_gradients(
        lambda *heads: masked_attention(*heads, segments), query.double(), key.double(), value.double()
    )
    plain = with_gradients(lambda *heads: attend(*heads, visible), query.double(), key.double(), value.double())
    for our, expected, other in zip(ours, naive, plain, strict=True):
        torch.testing.assert_close(our.double(), expected, **CLOSE_FLOAT32)
        torch.testing.assert_close(other, expected)


def test_documents_are_runs_of_one_number() -> None:
    visible = visible_within_segments(torch.tensor([[5, 5, 2, 2, 2], [1, 1, 1, 1, 0]]))
    assert isinstance(visible, WithinDocuments)
    assert visible.starts_BT.tolist() == [[0, 0, 2, 2, 2], [0, 0, 0, 0, 4]]
    assert visible.bounds.tolist() == [0, 2, 5, 9, 10]


def test_attention_of_extreme_scores_stays_exact() -> None:
    query, key = torch.zeros(1, 40, 1, 16), torch.zeros(1, 40, 1, 16)
    query[..., 0], key[0, :, 0, 0] = 100.0, torch.linspace(-80, 80, 40)
    value = torch.randn(1, 40, 1, 16)
    ours = with_gradients(lambda *heads: attend(*heads, None), query, key, value)
    naive = with_gradients(lambda *heads: attend(*heads, None), query.double(), key.double(), value.double())
    for our, expected in zip(ours, naive, strict=True):
        assert bool(torch.isfinite(our).all())
        torch.testing.assert_close(our.double(), expected, rtol=1e-3, atol=1e-3)


def check_module(module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], hidden: Tensor) -> None:
    """Result and all gradients, in float32 by the kernels against float64 by torch."""
    results = []
    for dtype in (torch.float32, torch.float64):
        copy = deepcopy(module).to(dtype)
        outcome = with_gradients(partial(run, copy), hidden.to(dtype))
        parameters = list(copy.parameters())
        direction = torch.randn(outcome[0].shape, generator=torch.Generator().manual_seed(5)).to(dtype)
        results.append(
            [*outcome, *(torch.autograd.grad(run(copy, hidden.to(dtype)), parameters, direction) if parameters else ())]
        )
    for our, expected in zip(*results, strict=True):
        torch.testing.assert_close(our.double(), expected.double(), **CLOSE_FLOAT32)


def random_norm(width: int) -> RMSNorm:
    norm = RMSNorm(width, 1e-5)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm


def test_norm_kernel_equals_torch() -> None:
    check_module(random_norm(72), lambda norm, hidden: norm(hidden), torch.randn(3, 301, 72))


@pytest.mark.parametrize("norm", [random_norm(48), nn.Identity()], ids=["qk_norm", "no_norm"])
def test_rotation_kernel_equals_torch(norm: nn.Module) -> None:
    tables = rotary_tables(torch.arange(150), 32, 10_000.0)
    check_module(norm, lambda module, heads: rotate_heads(heads, module, *tables), torch.randn(2, 150, 3, 48))


def test_swiglu_kernel_equals_torch() -> None:
    mlp = GatedMlp(64, 40)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    check_module(mlp, lambda module, hidden: module(hidden), torch.randn(2, 150, 64))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_softmax_kernel_equals_torch(is_weighted: bool) -> None:
    head = LanguageHead(32, 88)
    nn.init.normal_(head.weight, 0.0, 2.0)
    targets = torch.randint(0, 88, (2, 60))
    targets[0, 5:20] = -100
    weights = torch.rand(2, 60) if is_weighted else None
    check_module(head, lambda module, hidden: module(hidden, targets, weights), torch.randn(2, 60, 32))


def test_number_of_threads_changes_no_bit() -> None:
    query, key = torch.randn(2, 300, 4, 32), torch.randn(2, 300, 2, 32)
    norm, tables = random_norm(32), rotary_tables(torch.arange(300), 16, 10_000.0)

    def run(query: Tensor, key: Tensor) -> Tensor:
        return attend(norm(rotate_heads(query, norm, *tables)), key, key, None)

    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            outcome = with_gradients(run, query, key)
            norm.weight.grad = None
            run(query, key).sum().backward()
            results.append([*outcome, norm.weight.grad])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))
