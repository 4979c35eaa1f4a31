"""Rows whose positions are divided among ranks, against one process that holds them whole."""

from tasks.training.ranks import connect_ranks
from tasks.training.sequence_parallel import own_positions, spread_sequence
from tests.parallel_steps import compare, micro_batches, resources_of
from tests.rank_processes import on_ranks


def compare_divided_rows(rank, num_ranks, context_parallel, cases):
    """Each case: [zero stage, optimizer, steps, whether attention stays inside documents]."""
    for zero_stage, optimizer, num_steps, is_segmented in cases:
        resources = resources_of(num_ranks=num_ranks, context_parallel=context_parallel, zero_stage=zero_stage)
        ranks = connect_ranks(resources)
        batches = micro_batches(4, 24, is_segmented=is_segmented)
        compare(ranks, resources, batches, own_positions, spread_sequence, optimizer=optimizer, num_steps=num_steps)
        print("passed", zero_stage, optimizer, flush=True)
    return {}


def test_two_ranks_with_half_of_the_positions_each(tmp_path):
    on_ranks(compare_divided_rows, 2, tmp_path, 2, [[0, "sgd", 1, False], [0, "sgd", 1, True], [0, "muon", 3, True]])
