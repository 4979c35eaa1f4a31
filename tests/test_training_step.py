"""What goes into one optimizer step: targets, their counts, the division among ranks, bfloat16 arithmetic."""

import numpy as np
import pytest
import torch

from configs.load import load_scale
from tasks.training.batches import read_micro_batches
from tasks.training.deepspeed_config import deepspeed_config
from tasks.training.mixed_precision import ComputeInBfloat16
from tasks.training.schedules import StepPlan
from tests.model_recipes import GLM46, random_model

CPU = torch.device("cpu")


class CountingRows:
    """Row r holds 100 r + 0, 1, 2, ...; documents end after positions 2 and 5."""

    is_segmented = False

    def __len__(self) -> int:
        return 20

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.arange(start, stop)[:, None] * 100 + np.arange(9)
        segments = np.arange(start, stop)[:, None] * 10 + np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
        return tokens.astype(np.int32), segments.astype(np.int32), np.ones(tokens.shape, dtype=bool)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_divide_the_rows_of_a_step(num_ranks):
    plan = StepPlan(first_row=4, num_rows=7, start_tokens=0, end_tokens=0)
    seen = []
    for rank in range(num_ranks):
        batches = read_micro_batches(CountingRows(), plan, rank, num_ranks, 2, CPU)
        assert all(0 < batch.num_rows <= 2 for batch in batches)
        seen += [int(row[0]) // 100 for batch in batches for row in batch.token_ids_BT]
    assert seen == list(range(4, 11))


def test_targets_are_the_next_tokens_and_mtp_stays_inside_documents():
    (batch,) = read_micro_batches(CountingRows(), StepPlan(1, 1, 0, 0), 0, 1, 4, CPU)
    assert batch.token_ids_BT.tolist() == [[100, 101, 102, 103, 104, 105, 106, 107]]
    assert batch.target_ids_BT.tolist() == [[101, 102, 103, 104, 105, 106, 107, 108]]
    assert batch.num_lm_targets == 8
    # Position t predicts t + 2: inside one document only 0 -> 2 and 3 -> 5; 6 -> 8 lies behind the row, where no document is known.
    assert batch.num_mtp_targets == 2


def test_bfloat16_computes_what_a_bfloat16_model_computes_with_float32_gradients():
    tokens = torch.arange(24).view(2, 12)
    model = random_model(GLM46)
    losses = ComputeInBfloat16(model)(tokens, target_ids_BT=tokens + 1).losses
    (losses.lm + losses.mtp).backward()
    cast = random_model(GLM46).to(torch.bfloat16)
    expected = cast(tokens, target_ids_BT=tokens + 1).losses
    (expected.lm + expected.mtp).backward()
    assert losses.lm == expected.lm and losses.mtp == expected.mtp
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, cast.get_parameter(name).grad.float(), rtol=2e-2, atol=1e-2)


def test_clipping_is_written_down_as_zero():
    # Left out it is 1.0, and under ZeRO it then shrinks every orthogonalised update without a word.
    assert deepspeed_config(load_scale("micro").phases[0].resources)["gradient_clipping"] == 0.0
