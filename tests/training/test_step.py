"""What goes into one optimizer step: targets, their counts, the division among ranks, bfloat16 arithmetic."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from configs.load import load_scale
from model.architecture.losses import IGNORED
from model.architecture.rotary import rotary_tables
from tasks.data.packing.packed_rows import NO_SEGMENT
from tasks.training.loop.batches import read_micro_batches
from tasks.training.parallel.deepspeed_config import deepspeed_config
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.mixed_precision import ComputeInBfloat16
from tasks.training.schedule.schedules import StepPlan
from tests.support.model_recipes import GLM46, random_model
from tests.support.training_inputs import TrainingInputs, packed_rows, small_recipe

pytestmark = pytest.mark.usefixtures("clear_routing")
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
        assert len(batches) == {1: 4, 2: 2, 3: 2}[num_ranks]  # as many on every rank: their passes exchange data
        assert not any((batch.target_ids_BT != IGNORED).any() for batch in batches if batch.is_filler)
        seen += [int(row[0]) // 100 for batch in batches if not batch.is_filler for row in batch.token_ids_BT]
        assert all(batch.row_numbers_B.equal(batch.token_ids_BT[:, 0] // 100) for batch in batches)
    assert seen == list(range(4, 11))


def test_targets_are_the_next_tokens_and_mtp_stays_inside_documents():
    (batch,) = read_micro_batches(CountingRows(), StepPlan(1, 1, 0, 0), 0, 1, 4, CPU)
    assert batch.token_ids_BT.tolist() == [[100, 101, 102, 103, 104, 105, 106, 107]]
    assert batch.target_ids_BT.tolist() == [[101, 102, 103, 104, 105, 106, 107, 108]]
    assert batch.num_lm_targets == 8
    # Position t predicts t + 2: inside one document only 0 -> 2 and 3 -> 5; 6 -> 8 is after the row's end, where no
    # document is known.
    assert batch.num_mtp_targets == 2


@pytest.mark.parametrize("is_segmented", [True, False])
def test_attended_positions_and_squares_equal_a_count_of_pairs(is_segmented):
    """Of rows of documents with gaps at their ends: pairs of positions of one document, or of one row where attention
    sees over ends."""
    draw = np.random.default_rng(8)
    rows = []
    for first in range(0, 50, 10):
        lengths = draw.integers(1, 9, 5)
        filled = np.repeat(np.arange(first, first + 5), lengths)
        rows.append(np.append(filled, np.full(40 - len(filled), -1)) if is_segmented else np.resize(filled, 40))
    segments = torch.tensor(np.array(rows))
    batch = MicroBatch(torch.zeros_like(segments), torch.zeros_like(segments), segments, is_segmented)
    pairs = sum(
        (not is_segmented or row[one] == row[other]) and row[one] >= 0 and row[other] >= 0
        for row in segments.tolist()
        for one in range(40)
        for other in range(40)
    )
    assert batch.attended.tolist() == [int((segments >= 0).sum()), pairs]
    assert is_segmented == (batch.attended[0] < segments.numel())
    assert replace(batch, is_filler=True).attended.tolist() == [0, 0]


def test_sft_trains_what_the_assistant_writes_and_the_next_role_token(tmp_path):
    inputs = TrainingInputs(tmp_path / "home")
    arguments = inputs.chat_arguments(small_recipe(objective={"kind": "sft"}))
    rows = packed_rows(arguments["packed"], arguments["shards"], arguments["chats"])
    specials = inputs.tokenizer.record.special_ids
    for batch in read_micro_batches(rows, StepPlan(0, 8, 0, 0), 0, 1, 4, CPU):
        assert batch.is_segmented
        for tokens, targets in zip(batch.token_ids_BT.tolist(), batch.target_ids_BT.tolist(), strict=True):
            trained = [target for target in targets if target != IGNORED]
            assert (
                len(trained) == 3
                and trained[0] == tokens[2 + tokens.index(specials["</think>"]) - 1]
                and trained[-1] == specials["<|user|>"]
            )


def test_gaps_of_packed_rows_are_marked_where_there_are_any():
    read = partial(read_micro_batches, plan=StepPlan(0, 2, 0, 0), rank=0, num_ranks=1, num_sequences=1, device=CPU)
    without, with_gaps = read(FilledUpRows())
    assert without.gaps_BT is None and without.model_arguments["gaps_BT"] is None
    assert with_gaps.gaps_BT is not None and with_gaps.gaps_BT.tolist() == [[False] * 6 + [True] * 2]


class FilledUpRows(CountingRows):
    """The first row's last position is a gap, as a target only; of the second its last document is gaps."""

    is_segmented = True

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens, segments, trained = super().rows(start, stop)
        segments[0, 8:], segments[1, 6:] = NO_SEGMENT, NO_SEGMENT
        return tokens, segments, trained & (segments != NO_SEGMENT)


@pytest.mark.parametrize("is_segmented", [True, False])
def test_losses_equal_a_naive_computation_on_trained_tokens_only(is_segmented):
    rows = MaskedRows(is_segmented)
    (batch,) = read_micro_batches(rows, StepPlan(1, 2, 0, 0), 0, 1, 4, CPU)
    model = random_model(GLM46)
    segments = {"segment_ids_BT" if is_segmented else "mtp_segment_ids_BT": batch.segment_ids_BT}
    losses = model(batch.token_ids_BT, target_ids_BT=batch.target_ids_BT, **segments).losses
    lm, mtp = [], []
    for tokens, numbers, mask in zip(*rows.rows(1, 3), strict=True):
        bounds = [0, 3, 6, 9] if is_segmented else [0, 9]
        for start, stop in itertools.pairwise(bounds):
            lm += _next_token_losses(model, tokens[start:stop], mask[start:stop])
            mtp += _second_token_losses(
                model, tokens[start:stop], numbers[start:stop], mask[start:stop], is_last=stop == 9
            )
    assert (batch.num_lm_targets, batch.num_mtp_targets) == (len(lm), len(mtp))
    torch.testing.assert_close(losses.lm, torch.stack(lm).mean(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses.mtp, torch.stack(mtp).mean(), rtol=1e-4, atol=1e-4)


class MaskedRows(CountingRows):
    """Counting rows with some trained tokens, never the first of a document where attention stays inside it."""

    def __init__(self, is_segmented: bool) -> None:
        self.is_segmented = is_segmented

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens, segments, _ = super().rows(start, stop)
        is_trained = [False, True, True, False, False, True, not self.is_segmented, True, True]
        return tokens % 300, segments, np.tile(np.array(is_trained), (stop - start, 1))


def _next_token_losses(model, tokens, mask) -> list[torch.Tensor]:
    ids = torch.tensor(tokens.astype(np.int64))[None]
    logits = model(ids[:, :-1]).logits_BTV[0].log_softmax(-1)
    return [
        -logits[position, token]
        for position, (token, kept) in enumerate(zip(ids[0, 1:], mask[1:], strict=True))
        if kept
    ]


def _second_token_losses(model, tokens, numbers, mask, is_last) -> list[torch.Tensor]:
    """Of the MTP layer: token t + 2 of the same document, and never the row's last token."""
    ids = torch.tensor(tokens.astype(np.int64))[None]
    hidden = model.hidden_states(ids[:, :-1])
    rotary = rotary_tables(torch.arange(ids.shape[1] - 2), model.recipe.rotary_dim, model.rope_theta)
    output = model.model.layers[-1](model.model.embed_tokens(ids[:, 1:-1]), hidden[:, :-1], rotary)
    logits = model.lm_head(output.hidden_BTD)[0].log_softmax(-1)
    positions = range(2, ids.shape[1] - is_last)
    return [
        -logits[position - 2, ids[0, position]]
        for position in positions
        if mask[position] and numbers[position] == numbers[position - 2]
    ]


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


def test_deepspeeds_own_clipping_is_written_down_as_zero():
    # Left out it is 1.0: gradients would be clipped without a word, whatever max_grad_norm says.
    assert deepspeed_config(load_scale("micro").phases[0].resources, "float32")["gradient_clipping"] == 0.0


def test_a_resting_mtp_layer_has_no_loss_no_gradient_and_no_tokens():
    model = random_model(GLM46)
    token_ids = torch.arange(24).view(2, 12)
    running = model(token_ids, target_ids_BT=token_ids + 1)
    model.runs_mtp = False
    resting = model(token_ids, target_ids_BT=token_ids + 1)
    assert resting.losses.lm == running.losses.lm and resting.losses.mtp == 0
    assert (
        torch.equal(resting.expert_counts_LE[:-1], running.expert_counts_LE[:-1])
        and not resting.expert_counts_LE[-1].any()
    )
    (resting.losses.lm + resting.losses.balance).backward()
    assert all(parameter.grad is None for parameter in model.model.layers[-1].parameters())
