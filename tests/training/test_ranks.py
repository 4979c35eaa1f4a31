"""Axes of the topology: every rank is on one line per axis, and lines have the ranks that the order promises; and how
many process groups that takes."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from configs.load import load_scale
from tasks.training.parallel import control
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


def groups_made(rank, num_ranks, changes):
    """Groups that a rank makes for the axes, and that all their collectives find each other."""
    made, new_group = [], dist.new_group
    dist.new_group = lambda ranks, **named: (made.append(ranks), new_group(ranks, **named))[1]
    ranks = connect_ranks(load_scale("micro").phases[0].resources.model_copy(update=changes))
    dist.new_group = new_group
    met = {}
    for name in (*AXES, "pipeline_back"):
        axis = getattr(ranks, name)
        if axis.group is not None:
            seen = [None] * axis.size
            dist.all_gather_object(seen, rank, group=axis.group)
            met[name] = seen == list(axis.ranks)
    return {"num_groups": len(made), "met": met}


def test_a_rank_makes_one_group_per_axis_and_none_of_others(tmp_path):
    """Six axes of two ranks here; made by everyone there were 2 + 2 + 2 + 2 + 2 + 1 and more."""
    changes = {"num_ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}
    for made in on_ranks(groups_made, 4, tmp_path, changes):
        assert made["num_groups"] == 7
        assert made["met"] and all(made["met"].values())


def wait_for_a_slow_disk(rank, num_ranks):
    """A save of rank 0 takes longer than collectives may; returns the seconds that the others waited for it."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    started = time.monotonic()
    saved = control.on_first_rank(lambda: time.sleep(3) or "saved")
    control.wait_for_all()
    return {"saved": saved, "seconds": time.monotonic() - started}


def test_a_slow_save_does_not_end_the_ranks_that_wait_for_it(tmp_path):
    for rank in on_ranks(wait_for_a_slow_disk, 2, tmp_path):
        assert rank["saved"] == "saved" and rank["seconds"] == pytest.approx(3, abs=1.5)
