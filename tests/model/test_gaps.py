"""Gaps at the ends of packed rows: neither routed nor counted, whatever an expert's kernels leave in their rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.architecture import moe
from model.architecture.losses import IGNORED
from model.architecture.moe import LocalDispatcher, MixtureOfExperts
from model.architecture.transformer import Glm4Moe
from tasks.data.packing.packed_rows import NO_SEGMENT
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.recompute import recompute_activations
from tests.support.model_recipes import GLM46, random_model

pytestmark = pytest.mark.usefixtures("clear_routing")
LENGTHS, NUM_POSITIONS = (16, 9, 4), 16


class PoisonedDispatcher(LocalDispatcher):
    """Rows that no expert computes hold NaN, in both directions: a product on an accelerator leaves them as they
    are."""

    def __init__(self, tokens_RD: Tensor, counts_E: Tensor) -> None:
        super().__init__(tokens_RD, counts_E)
        self.is_rest_R1 = (torch.arange(tokens_RD.shape[0]) >= counts_E.sum()).unsqueeze(1)
        if tokens_RD.requires_grad:
            tokens_RD.register_hook(lambda gradient: gradient.masked_fill(self.is_rest_R1, torch.nan))

    def combine(self, rows_RD: Tensor) -> Tensor:
        return rows_RD.masked_fill(self.is_rest_R1, torch.nan)


def rows() -> MicroBatch:
    """Documents of three tokens; after the last a row has gaps."""
    tokens = torch.randint(GLM46.vocab_size, (len(LENGTHS), NUM_POSITIONS), generator=torch.Generator().manual_seed(5))
    targets, segments = tokens.roll(-1, 1), (torch.arange(NUM_POSITIONS) // 3).repeat(len(LENGTHS), 1)
    for row, length in enumerate(LENGTHS):
        targets[row, length - 1 :] = IGNORED
        segments[row, length:] = NO_SEGMENT
    return MicroBatch(tokens, targets, segments, is_segmented=True, has_gaps=True)


def without_gaps(batch: MicroBatch) -> list[MicroBatch]:
    """Each row by itself, as long as its documents are."""
    columns = (batch.token_ids_BT, batch.target_ids_BT, batch.segment_ids_BT)
    return [
        MicroBatch(*(values[row : row + 1, :length] for values in columns), is_segmented=True)
        for row, length in enumerate(LENGTHS)
    ]


def compute(model: Glm4Moe, batches: list[MicroBatch]) -> dict[str, Tensor]:
    sums, counts_LE = torch.zeros(3), torch.zeros((), dtype=torch.int64)
    for batch in batches:
        output = model(batch.token_ids_BT, **batch.model_arguments)
        assert output.losses is not None
        own = torch.stack([*output.losses]) * batch.terms
        own.sum().backward()
        sums, counts_LE = sums + own.detach(), counts_LE + output.expert_counts_LE
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return gradients | {"losses": sums, "counts": counts_LE}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("is_poisoned", [False, True])
def test_rows_with_gaps_compute_what_shorter_rows_do(is_poisoned, recompute):
    expected = compute(random_model(GLM46), without_gaps(rows()))
    model = random_model(GLM46)
    for module in model.modules():
        if is_poisoned and isinstance(module, MixtureOfExperts):
            module.dispatcher = PoisonedDispatcher
    recompute_activations(model, recompute, 2)
    actual = compute(model, [rows()])
    assert torch.equal(actual["counts"], expected["counts"])
    trunk, mtp = sum(LENGTHS), sum(length - 1 for length in LENGTHS)
    assert actual["counts"].sum(-1).tolist() == [GLM46.num_experts_per_tok * number for number in (trunk, trunk, mtp)]
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name} {text}"
        )


def test_what_an_accelerator_compares_is_what_a_cpu_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the experts, gradients of the chosen scores, counts of the balance loss: to the last bit."""
    written = compute(random_model(GLM46), [rows()])
    monkeypatch.setattr(moe, "writes_by_comparing", lambda tensor: True)
    compared = compute(random_model(GLM46), [rows()])
    assert all(torch.equal(compared[name], value) for name, value in written.items())
