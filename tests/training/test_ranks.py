"""Axes of the topology: every rank is on one line per axis, and lines have the ranks that the order promises."""

from configs.load import load_scale
from tasks.training.parallel.ranks import connect_ranks
from tests.support.rank_processes import on_ranks

AXES = ("tensor", "context", "data", "pipeline", "expert", "expert_data", "replicas", "stage")


def axes_of_rank(rank, num_ranks, changes):
    resources = load_scale("micro").phases[0].resources.model_copy(update=changes)
    ranks = connect_ranks(resources)
    return {name: list(getattr(ranks, name).ranks) for name in AXES}


def test_tensor_is_the_finest_axis_and_experts_are_carved_out_of_a_stage(tmp_path):
    by_rank = on_ranks(axes_of_rank, 4, tmp_path, {"num_ranks": 4, "tensor_parallel": 2, "expert_parallel": 2})
    assert by_rank[1] == {
        "tensor": [0, 1],
        "context": [1],
        "data": [1, 3],
        "pipeline": [1],
        "expert": [0, 1],
        "expert_data": [1, 3],
        "replicas": [1, 3],
        "stage": [0, 1, 2, 3],
    }


def test_pipeline_stages_are_the_coarsest_axis(tmp_path):
    by_rank = on_ranks(axes_of_rank, 4, tmp_path, {"num_ranks": 4, "context_parallel": 2, "pipeline_parallel": 2})
    assert by_rank[3] == {
        "tensor": [3],
        "context": [2, 3],
        "data": [3],
        "pipeline": [1, 3],
        "expert": [3],
        "expert_data": [2, 3],
        "replicas": [2, 3],
        "stage": [2, 3],
    }
