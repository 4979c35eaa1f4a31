"""Gradients clipped by their norm over the whole model: as torch clips them in one process, in every topology."""

from __future__ import annotations

import pytest
import torch

from tasks.training.loop import training_step
from tasks.training.loop.training_step import take_step
from tasks.training.parallel.sequence_parallel import own_parts
from tasks.training.schedule.schedules import StepPlan
from tests.support.parallel_steps import micro_batches
from tests.support.rank_processes import on_ranks
from tests.support.training_inputs import small_recipe
from tests.training.test_zero import MODEL, build, state_of

ROWS, POSITIONS, NUM_STEPS = 4, 24, 4
STEP_TOKENS = ROWS * POSITIONS
MAX_NORM = 3.0
CASES = [
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 1, "offload_optimizer": "cpu"},
    {"zero_stage": 0, "tensor_parallel": 2},
    {"zero_stage": 1, "pipeline_parallel": 2},
    {"zero_stage": 1, "expert_parallel": 2},
    {"zero_stage": 0, "context_parallel": 2},
]


def clip_as_torch_does(engine, model, ranks, norm, max_norm) -> None:
    if max_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def run_cases(rank, num_ranks, cases):
    """Each case: [topology, max_grad_norm, whether torch clips]."""
    states, clip_gradients = [], training_step.clip_gradients
    for topology, max_norm, by_torch in cases:
        training_step.clip_gradients = clip_as_torch_does if by_torch else clip_gradients
        trainable = build(num_ranks, **topology)
        optimizer = small_recipe().optimizer.model_copy(update={"max_grad_norm": max_norm})
        recipe = small_recipe(model=MODEL.model_dump(), optimizer=optimizer.model_dump())
        results = {"losses": [], "norms": [], "counts": [], "experts": []}
        for step in range(NUM_STEPS):
            rows = micro_batches(ROWS, POSITIONS, is_segmented=True, seed=step)[
                trainable.ranks.data.rank :: trainable.ranks.data.size
            ]
            plan = StepPlan(step * ROWS, ROWS, step * STEP_TOKENS, (step + 1) * STEP_TOKENS)
            result = take_step(trainable, recipe, plan, own_parts(rows, trainable.ranks), step)
            results["losses"].append(result.total_loss)
            results["norms"].append(result.grad_norm)
            results["counts"].append([result.num_positions, result.squared_lengths])
            results["experts"].append([*result.expert_use.load, result.losses.balance])
        states.append(results | {"state": state_of(trainable)})
    return {"found": states}


def test_clipped_steps_equal_torchs_in_every_topology(tmp_path):
    alone = {"zero_stage": 0}
    expected, free, single = on_ranks(
        run_cases, 1, tmp_path, [[alone, MAX_NORM, True], [alone, 0.0, False], [alone, MAX_NORM, False]]
    )[0]["found"]
    assert min(expected["norms"]) < MAX_NORM < max(expected["norms"]), "some steps are clipped, some are not"
    moved = [
        name
        for name, value in expected["state"].items()
        if not torch.allclose(value, free["state"][name], rtol=1e-3, atol=0)
    ]
    assert any("momentum" in name for name in moved), "momentum sees how large a gradient was"
    by_rank = on_ranks(run_cases, 2, tmp_path, [[case, MAX_NORM, False] for case in CASES])
    # Of a pipeline every rank writes the tensors of its own stage.
    together = [
        first | {"state": first["state"] | second["state"]}
        for first, second in zip(*(r["found"] for r in by_rank), strict=True)
    ]
    for case, actual in [({"num_ranks": 1}, single), *zip(CASES, together, strict=True)]:
        assert actual["counts"] == expected["counts"], case
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5), case
        assert actual["experts"] == [pytest.approx(step, rel=1e-5) for step in expected["experts"]], case
        assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-4), case
        for name, value in expected["state"].items():
            assert float((actual["state"][name] - value).norm()) <= 5e-5 * float(value.norm()), (case, name)
