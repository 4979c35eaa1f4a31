"""Tensor parallelism against one process: losses, expert counts and every gradient, gathered over the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch

from model.architecture.transformer import Glm4Moe
from tasks.training.loop.build_model import divide_model
from tasks.training.loop.training_step import sum_over_ranks
from tasks.training.parallel.mixed_precision import ComputeInBfloat16
from tasks.training.parallel.ranks import connect_ranks
from tasks.training.parallel.sequence_parallel import own_positions
from tasks.training.parallel.shards import gather_whole, shard_of
from tasks.training.parallel.tensor_parallel import divide_matrices
from tests.support.model_recipes import AIR, GLM46, random_model, with_every_expert
from tests.support.parallel_steps import compare, micro_batches, resources_of
from tests.support.rank_processes import on_ranks

pytestmark = pytest.mark.usefixtures("clear_routing")
FAMILIES = {"glm46": GLM46, "air": AIR, "every expert": with_every_expert(GLM46)}
ROWS, POSITIONS = 2, 12
CASES = [
    [{}, "sgd", 1],
    [{}, "muon", 2],
    [{"zero_stage": 1, "expert_parallel": 4}, "muon", 2],
    [{"zero_stage": 2, "expert_parallel": 2, "recompute": "selective"}, "muon", 2],
    [{"zero_stage": 3}, "muon", 2],
    [{"context_parallel": 2}, "sgd", 1],
    [
        {
            "context_parallel": 2,
            "zero_stage": 1,
            "expert_parallel": 2,
            "recompute": "full",
            "recompute_every_layers": 1,
        },
        "muon",
        2,
    ],
]


def rows(is_segmented: bool) -> dict[str, torch.Tensor]:
    """Two rows of three documents; some targets carry no loss."""
    tokens = torch.randint(GLM46.vocab_size, (ROWS, POSITIONS + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[:, 3::5] = -100
    segments = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [3] * 2 + [4] * 9 + [5]])
    return {
        "token_ids_BT": tokens[:, :-1],
        "target_ids_BT": targets,
        "target_weights_BT": torch.linspace(0.5, 1.5, ROWS * POSITIONS).view(ROWS, POSITIONS),
        "segment_ids_BT" if is_segmented else "mtp_segment_ids_BT": segments,
    }


def compute(model: Glm4Moe, is_segmented: bool, dtype: str) -> dict[str, torch.Tensor]:
    read = rows(is_segmented)
    output = (ComputeInBfloat16(model) if dtype == "bfloat16" else model)(**read)
    (output.losses.lm + 0.3 * output.losses.mtp + 0.1 * output.losses.balance).backward()
    return {
        **{name: loss.detach() for name, loss in output.losses._asdict().items()},
        "counts": output.expert_counts_LE,
        "log-probabilities": model.lm_head.log_probabilities(
            model.hidden_states(read["token_ids_BT"]), read["target_ids_BT"]
        ),
    }


@contextmanager
def reduced_dtypes() -> Iterator[list[torch.dtype]]:
    """Of the tensors that are added up over ranks in here."""
    dtypes, all_reduce = [], torch.distributed.all_reduce

    def noted(values: torch.Tensor, **arguments):
        dtypes.append(values.dtype)
        return all_reduce(values, **arguments)

    with patch.object(torch.distributed, "all_reduce", noted):
        yield dtypes
    assert dtypes, "a divided model adds something up"


def compute_divided(rank, num_ranks, cases):
    ranks = connect_ranks(resources_of(num_ranks=num_ranks, tensor_parallel=num_ranks))
    computed = {}
    for number, (family, is_segmented, dtype) in enumerate(cases):
        model = random_model(FAMILIES[family])
        divide_matrices(model, ranks)
        with reduced_dtypes() as reduced:
            results = compute(model, is_segmented, dtype)
        assert torch.int64 not in reduced, "routed copies are added up once per step, not in its passes"
        losses = torch.stack([results[name] for name in ("lm", "mtp", "balance")])
        losses, results["counts"] = sum_over_ranks(losses, results["counts"], ranks)
        results["balance"] = losses[2]
        for name, parameter in model.named_parameters():
            if getattr(parameter, "is_partial_over_tensor", False):
                torch.distributed.all_reduce(parameter.grad)
            results[f"gradient {name}"] = gather_whole(parameter.grad, shard_of(parameter), ranks)
            results[f"size {name}"] = parameter.numel()
        computed |= {f"{number} {name}": value for name, value in results.items()}
    return computed


def test_losses_counts_and_gradients_are_those_of_one_process(tmp_path):
    cases = [["glm46", True, "float32"], ["air", False, "float32"], ["every expert", True, "bfloat16"]]
    by_rank = on_ranks(compute_divided, 2, tmp_path, cases)
    for number, (family, is_segmented, dtype) in enumerate(cases):
        model = random_model(FAMILIES[family])
        expected = compute(model, is_segmented, "float32")
        expected |= {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
        rounding = dict.fromkeys(expected, 1e-5)
        if dtype == "bfloat16":
            # As far from float32 as one process is that computes in bfloat16.
            model = random_model(FAMILIES[family])
            alone = compute(model, is_segmented, dtype)
            alone |= {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
            rounding = {name: 2 * distance(alone[name], value) + 0.01 for name, value in expected.items()}
        for actual in by_rank:
            for name, value in expected.items():
                worst = distance(actual[f"{number} {name}"], value)
                assert worst <= rounding[name], f"{family} {dtype} {name}: {worst:.1e}"
            divided = [
                name
                for name, parameter in model.named_parameters()
                if 2 * actual[f"{number} size {name}"] == parameter.numel()
            ]
            # Attention (four matrices, three biases) and MLP (three) of every layer, eh_proj, embedding, unembedding.
            assert len(divided) == 4 * 10 + 3


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the whole tensor."""
    return float((actual - expected).double().norm() / expected.double().norm().clamp(min=1e-3))


def compare_steps(rank, num_ranks, cases):
    """Each case: [changes to the resources, optimizer, steps]."""
    for changes, optimizer, num_steps in cases:
        resources = resources_of(num_ranks=num_ranks, tensor_parallel=2, **changes)
        compare(
            connect_ranks(resources),
            resources,
            micro_batches(4, 24, is_segmented=True, seed=10, num_gaps=7),  # of four slices one is only gaps
            own_positions,
            partial(divide_model, resources=resources),
            optimizer=optimizer,
            num_steps=num_steps,
        )
        print("passed", changes, optimizer, flush=True)
    return {"num_held": len(cases)}


def test_steps_beside_other_axes_are_those_of_one_process(tmp_path):
    assert on_ranks(compare_steps, 4, tmp_path, CASES) == [{"num_held": len(CASES)}] * 4
