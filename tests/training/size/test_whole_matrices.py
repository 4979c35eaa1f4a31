"""What Muon sends and computes on divided matrices, counted on ranks. That its steps equal those of one process is
tested beside each axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from model.architecture.transformer import Glm4Moe
from model.optimizer.optimizer import Muon
from tasks.training.loop.build_model import divide_model
from tasks.training.parallel.partitions import pieces_of
from tasks.training.parallel.ranks import connect_ranks
from tasks.training.parallel.shards import shard_of, whole_shape
from tests.support.model_recipes import GLM46, random_model
from tests.support.parallel_steps import build_any_optimizer, initialize, micro_batches, resources_of, step_on_ranks
from tests.support.rank_processes import on_ranks

MODEL = GLM46.model_copy(update={"num_hidden_layers": 3})


def work_of(shape: torch.Size) -> int:
    """Products of the Newton-Schulz steps of a matrix or a stack, without a common factor."""
    return shape[:-2].numel() * min(shape[-2:]) ** 2 * max(shape[-2:])


def counted_step(rank, num_ranks, changes):
    """Of a step's update: collectives, elements that this rank sends to and gets from others, its share of the matrices
    that are not whole on it, its products and those of all matrices."""
    resources = resources_of(num_ranks=num_ranks, micro_batch_sequences=1, **changes)
    ranks, model = connect_ranks(resources), random_model(MODEL, std=0.1)
    divide_model(model, ranks, resources)
    optimizer = build_any_optimizer(model, "muon")
    assert isinstance(optimizer, Muon)
    engine = initialize(model, optimizer, ranks, resources)
    rows = micro_batches(4, 16, is_segmented=False)[ranks.data.rank :: ranks.data.size]
    step_on_ranks(engine, model, ranks, rows)  # finds the homes
    share, every = expected(engine, model, ranks, optimizer)
    counted = {"calls": 0, "sent": 0, "received": 0, "work": 0, "others": 0, "share": share, "every": every}
    orthogonalize = optimizer.orthogonalize

    def counting(masters, directions):
        with counted_collectives(counted):
            return orthogonalize(masters, directions)

    def working(matrix, polar_factor=optimizer.scaled_polar_factor):
        counted["work"] += work_of(matrix.shape)
        return polar_factor(matrix)

    optimizer.orthogonalize, optimizer.scaled_polar_factor = counting, working
    step_on_ranks(engine, model, ranks, rows)
    return counted


@contextmanager
def counted_collectives(counted: dict[str, int]) -> Iterator[None]:
    all_to_all = dist.all_to_all_single

    def counting(arriving, leaving, received, sent, group):
        own = dist.get_rank(group)
        counted["calls"] += 1
        counted["sent"] += sum(sent) - sent[own]
        counted["received"] += sum(received) - received[own]
        return all_to_all(arriving, leaving, received, sent, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        for name in ("broadcast", "reduce", "all_gather", "all_reduce", "scatter"):
            patch.setattr(dist, name, lambda *_, **__: counted.update(others=counted["others"] + 1))
        yield


def expected(engine, model: Glm4Moe, ranks, optimizer) -> tuple[int, int]:
    """Elements of this rank in matrices that others hold parts of too, and the products of the matrices that this is
    the first rank of."""
    share = every = 0
    for parameter, piece in pieces_of(engine, model, ranks).items():
        if not optimizer.has_momentum(parameter):
            continue
        shard, size = shard_of(parameter), piece.shape[-2:].numel()
        is_sliced = shard is not None and shard.axis == "tensor"
        is_expert = shard is not None and shard.axis == "expert"
        is_copied = not is_expert and ranks.tensor.size > 1  # or sliced
        for first in range(0, piece.shape.numel(), size):
            held = max(0, min(piece.start + piece.length, first + size) - max(piece.start, first))
            share += held if is_copied or held < size else 0
        if (ranks.expert_data if is_expert else ranks.stage).rank == 0:
            every += work_of(whole_shape(parameter, piece.shape, ranks) if is_sliced else piece.shape)
    return share, every


CASES = {
    "zero 1": {"zero_stage": 1},
    "zero 3": {"zero_stage": 3},
    "tensor": {"zero_stage": 1, "tensor_parallel": 2},
    "experts": {"zero_stage": 1, "expert_parallel": 2},
}
NUM_GROUPS = {"zero 1": 1, "zero 3": 1, "tensor": 1, "experts": 2}
"""Of matrices in the optimizer: divided experts have their own."""


@pytest.mark.parametrize("case", CASES)
def test_a_rank_sends_its_share_and_no_matrix_is_computed_twice(case, tmp_path):
    by_rank = on_ranks(counted_step, 4, tmp_path, CASES[case])
    share = sum(rank["share"] for rank in by_rank) / 4
    assert share > 0 and all(max(rank["sent"], rank["received"]) <= 2 * 1.5 * share for rank in by_rank), by_rank
    assert sum(rank["sent"] for rank in by_rank) == sum(rank["received"] for rank in by_rank)
    assert all(2 <= rank["calls"] <= 2 * NUM_GROUPS[case] and not rank["others"] for rank in by_rank), by_rank
    assert sum(rank["work"] for rank in by_rank) == sum(rank["every"] for rank in by_rank)


def test_without_zero_no_matrix_is_computed_twice_and_ranks_share_the_work(tmp_path):
    by_rank = on_ranks(counted_step, 4, tmp_path, {"zero_stage": 0, "tensor_parallel": 2, "expert_parallel": 2})
    every = sum(rank["every"] for rank in by_rank)
    assert sum(rank["work"] for rank in by_rank) == every
    assert max(rank["work"] for rank in by_rank) < every / 2, "tensor ranks that repeat each other make it half"
