"""Experts divided among ranks against one process that holds them all: losses, counts, gradients and weights after steps."""

from functools import partial

import pytest
import torch

from tasks.training.expert_parallel import divide_experts
from tasks.training.ranks import connect_ranks
from tests.parallel_steps import compare, micro_batches, resources_of
from tests.rank_processes import on_ranks


def own_rows(batch, ranks):
    return batch


def compare_divided_experts(rank, num_ranks, expert_parallel, cases):
    """Each case: [zero stage, optimizer, steps, whether the shared expert overlaps, starved experts]."""
    for zero_stage, optimizer, num_steps, is_overlapped, starved in cases:
        resources = resources_of(num_ranks=num_ranks, expert_parallel=expert_parallel, zero_stage=zero_stage)
        compare(
            connect_ranks(resources), resources, micro_batches(8, 24, is_segmented=True), own_rows,
            partial(divide_experts, is_overlapped=is_overlapped), optimizer=optimizer, num_steps=num_steps,
            starved=slice(*starved) if starved else None,
        )  # fmt: skip
        print("passed", zero_stage, optimizer, flush=True)
    return {}


def test_two_ranks_with_half_of_the_experts_each(tmp_path):
    on_ranks(compare_divided_experts, 2, tmp_path, 2, [[0, "sgd", 1, False, None], [0, "muon", 3, False, None]])
