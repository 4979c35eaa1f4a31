"""Experts and positions divided among ranks, against one process that holds them all: losses, counts, gradients,
weights after steps.

With SGD the weights are the gradients (tests/support/parallel_steps.py); the exchange is compared with the plain model
without DeepSpeed as well.
"""

from functools import partial

import pytest
import torch

from tasks.training.loop.build_model import divide_model
from tasks.training.parallel.expert_parallel import divide_experts
from tasks.training.parallel.mixed_precision import ComputeInBfloat16
from tasks.training.parallel.ranks import connect_ranks
from tasks.training.parallel.sequence_parallel import own_positions
from tests.support.model_recipes import GLM46, with_every_expert
from tests.support.parallel_steps import build_model, compare, micro_batches, resources_of
from tests.support.rank_processes import on_ranks

pytestmark = pytest.mark.usefixtures("clear_routing")
SEED = 22
"""Of the rows: no expert is chosen by rounding in any step (tests/support/router_margins.py)."""
STARVED = slice(4, 8)
"""In a layer whose second half of experts nobody chooses, a rank that holds them receives no row."""
TWO_RANKS = [
    [{"expert_parallel": 2, "zero_stage": 0}, "sgd", 1],
    [{"expert_parallel": 2, "zero_stage": 0, "overlap_shared_expert": True}, "muon", 2],
    [{"expert_parallel": 2, "zero_stage": 3, "overlap_shared_expert": True, "recompute": "selective"}, "muon", 2],
    [{"context_parallel": 2, "zero_stage": 0}, "sgd", 1],
    [{"context_parallel": 2, "zero_stage": 1, "recompute": "full"}, "muon", 2],
]
FOUR_RANKS = [
    *[[{"expert_parallel": 2, "zero_stage": stage}, "sgd", 1] for stage in (0, 1, 2, 3)],
    [{"expert_parallel": 2, "zero_stage": 2, "recompute": "selective"}, "muon", 2],
    [{"context_parallel": 2, "zero_stage": 2}, "sgd", 1],
    [{"context_parallel": 4, "zero_stage": 0}, "sgd", 1],  # key and value heads fewer than ranks
    [{"context_parallel": 2, "expert_parallel": 4, "zero_stage": 1}, "muon", 2],
    [{"context_parallel": 2, "expert_parallel": 2, "zero_stage": 3}, "sgd", 1],
]


def compare_cases(rank, num_ranks, cases):
    for number, (changes, optimizer, num_steps) in enumerate(cases):
        resources = resources_of(num_ranks=num_ranks, **({"recompute_every_layers": 1} | changes))
        print(changes, optimizer, flush=True)
        compare(
            connect_ranks(resources),
            resources,
            micro_batches(num_ranks, 16, is_segmented=number % 2 == 0, seed=SEED),
            own_positions,
            partial(divide_model, resources=resources),
            optimizer=optimizer,
            num_steps=num_steps,
            starved=STARVED,
        )
    return {"num_held": len(cases)}


def compute_with_divided_experts(rank, num_ranks, is_overlapped, dtype):
    """One forward and backward pass over the same row on every rank, without DeepSpeed: an expert sees as many copies
    of it as ranks."""
    model = model_of(dtype)
    divide_experts(
        model, connect_ranks(resources_of(num_ranks=num_ranks, expert_parallel=num_ranks)), is_overlapped=is_overlapped
    )
    return compute(model, dtype)


def model_of(dtype):
    return build_model(STARVED) if dtype == "float32" else build_model(recipe=with_every_expert(GLM46))


def compute(model, dtype):
    (batch,) = micro_batches(1, 16, is_segmented=True, seed=SEED)
    output = (ComputeInBfloat16(model) if dtype == "bfloat16" else model)(batch.token_ids_BT, **batch.model_arguments)
    losses = torch.stack(output.losses)
    losses.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return gradients | {"losses": losses.detach(), "counts": output.expert_counts_LE}


def run_two_ranks(rank, num_ranks):
    compare_cases(rank, num_ranks, TWO_RANKS)
    computed = {
        name: compute_with_divided_experts(rank, num_ranks, *arguments) for name, arguments in EXCHANGES.items()
    }
    return {f"{name} {key}": value for name, values in computed.items() for key, value in values.items()}


EXCHANGES = {"plain": (False, "float32"), "overlapped": (True, "float32"), "bfloat16": (True, "bfloat16")}


def test_two_ranks_compute_what_one_process_does(tmp_path):
    by_rank = on_ranks(run_two_ranks, 2, tmp_path)
    plain, cast = (compute(model_of(dtype), dtype) for dtype in ("float32", "bfloat16"))
    for rank, actual in enumerate(by_rank):
        for key, expected in plain.items():
            if ".experts." in key:
                expected = 2 * expected[4 * rank : 4 * rank + 4]
            torch.testing.assert_close(actual[f"plain {key}"], expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(actual[f"overlapped {key}"], actual[f"plain {key}"]), key
        torch.testing.assert_close(actual["bfloat16 losses"], cast["losses"], rtol=1e-2, atol=1e-2)
        starved = next(key for key in plain if ".experts." in key)
        assert actual[f"plain {starved}"].any() == (rank == 0), (
            "the second rank should have received nothing in this layer"
        )


def test_four_ranks_compute_what_one_process_does(tmp_path):
    assert on_ranks(compare_cases, 4, tmp_path, FOUR_RANKS) == [{"num_held": len(FOUR_RANKS)}] * 4
