"""ZeRO 0-3, offloading and bfloat16 on two ranks against one process without ZeRO: losses, gradient norms, what weights
changed by and moments after several steps through the loop's own take_step; and the hand-over state, which goes from
any topology to any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes
from tasks.training.loop.build_model import build_trainable, divide_model, make_weights
from tasks.training.loop.training_step import take_step
from tasks.training.parallel.ranks import connect_ranks
from tasks.training.parallel.sequence_parallel import own_positions
from tasks.training.parallel.trainable import Trainable
from tasks.training.schedule.schedules import StepPlan
from tasks.training.state.initial_weights import InitialWeights
from tasks.training.state.position import Position
from tasks.training.state.state import load_checkpoint, load_master, random_state_hex
from tests.support.model_recipes import GLM46
from tests.support.parallel_steps import micro_batches, resources_of
from tests.support.rank_processes import on_ranks
from tests.support.saved_states import save_state, state_tensors
from tests.support.training_inputs import small_recipe

# All experts are chosen: a rounding that lets another one win would hide all other differences.
MODEL = GLM46.model_copy(update={"initializer_range": 0.1, "num_experts_per_tok": GLM46.n_routed_experts})
ROWS, POSITIONS, NUM_STEPS = 4, 12, 3
STEP_TOKENS = ROWS * POSITIONS

REFERENCES = {
    "muon": {},
    "adamw": {"kind": "adamw"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 state": {"state_dtype": "bfloat16"},
    "adamw, gradients twice": {"kind": "adamw", "gradient_scale": 2.0},
    "bfloat16, gradients twice": {"dtype": "bfloat16", "gradient_scale": 2.0},
}
CASES = {
    "muon": [
        {"zero_stage": 0},
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"zero_stage": 1, "offload_optimizer": "cpu"},
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    ],
    "adamw": [{"zero_stage": 2, "kind": "adamw"}, {"zero_stage": 3, "kind": "adamw"}],
    "bfloat16": [{"zero_stage": stage, "dtype": "bfloat16"} for stage in (0, 1, 2, 3)],
    "bfloat16 state": [{"zero_stage": 2, "state_dtype": "bfloat16"}],
}
ADAM_EPS = 1e-3
"""As large as a gradient is: with 1e-8 AdamW's first step is a sign, so an element that is nothing but rounding moves
by a whole step one way or the other, as the processor rounds, and gradients of a wrong scale move the weights
rightly."""
TOLERANCE = {"muon": 5e-5, "adamw": 5e-5, "bfloat16": 1e-2, "bfloat16 state": 1e-2}
"""Of the length of each momentum and moment, and of what each weight changed by."""
LOSS_TOLERANCE = {"muon": 1e-5, "adamw": 1e-5, "bfloat16": 2e-3, "bfloat16 state": 1e-4}


def build(
    num_ranks: int, *, kind: str = "muon", dtype: str = "float32", state_dtype: str = "float32", **changes
) -> Trainable:
    resources = resources_of(num_ranks=num_ranks, micro_batch_sequences=1, bucket_elements=20_000, **changes)
    ranks = connect_ranks(resources)
    with torch.device("meta"):
        model = Glm4Moe(MODEL)
    initial = InitialWeights(MODEL, checkpoint_shapes(model), seed=1)
    divide_model(model, ranks, resources)
    make_weights(model, dtype, resources, ranks)
    optimizer = small_recipe().optimizer.model_copy(
        update={"kind": kind, "state_dtype": state_dtype, "adam_eps": ADAM_EPS}
    )
    trainable = build_trainable(model, optimizer, dtype, resources, ranks)
    load_master(trainable, initial, "the initial weights")
    return trainable


def train(trainable: Trainable, first_step: int, num_steps: int) -> dict[str, list[float]]:
    """Losses and gradient norms of some steps; a rank accumulates its rows one by one."""
    recipe = small_recipe(model=MODEL.model_dump())
    results: dict[str, list[float]] = {"losses": [], "norms": []}
    for step in range(first_step, first_step + num_steps):
        data = trainable.ranks.data
        rows = micro_batches(ROWS, POSITIONS, is_segmented=True, seed=step)[data.rank :: data.size]
        rows = [own_positions(row, trainable.ranks) for row in rows]
        plan = StepPlan(step * ROWS, ROWS, step * STEP_TOKENS, (step + 1) * STEP_TOKENS)
        result = take_step(trainable, recipe, plan, rows, step)
        results["losses"].append(result.total_loss)
        results["norms"].append(result.grad_norm)
    return results


def position_after(step: int) -> Position:
    return Position(
        course="c",
        phase="p",
        step=step,
        num_tokens=0,
        course_tokens=0,
        optimizer_steps=step,
        torch_random_state=random_state_hex(),
        losses=None,
        policy=None,
    )


def state_of(trainable: Trainable) -> dict[str, torch.Tensor]:
    """Whole tensors of the state by kind and name."""
    return state_tensors(trainable, position_after(NUM_STEPS))


def run_cases(rank, num_ranks, cases):
    states = []
    for case in cases:
        gradient_scale = case.pop("gradient_scale", 1.0)
        trainable = build(num_ranks, **case)
        initial = {key: value for key, value in state_of(trainable).items() if key.startswith("master")}
        for parameter in trainable.model.parameters():
            parameter.register_hook(lambda gradient, scale=gradient_scale: gradient * scale)
        # Sums of another order round to other bfloat16 weights, and from the second step on that is all one sees in the
        # state.
        first = 1 if case.get("dtype") == "bfloat16" else NUM_STEPS
        results = train(trainable, 0, first)
        state = state_of(trainable)
        state = {key: value - initial[key] if key in initial else value for key, value in state.items()}
        later = train(trainable, first, NUM_STEPS - first)
        states.append({**{name: values + later[name] for name, values in results.items()}, "state": state})
    return {"found": states}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    by_rank = on_ranks(run_cases, 1, tmp_path_factory.mktemp("references"), list(REFERENCES.values()))
    return dict(zip(REFERENCES, by_rank[0]["found"], strict=True))


def test_every_stage_offloading_and_dtype_trains_like_one_process(references, tmp_path):
    cases = [(name, case) for name, group in CASES.items() for case in group]
    actual = on_ranks(run_cases, 2, tmp_path, [case for _, case in cases])[0]["found"]
    for (name, case), each in zip(cases, actual, strict=True):
        reference = references[name]
        assert each["losses"] == pytest.approx(reference["losses"], rel=LOSS_TOLERANCE[name]), case
        assert each["norms"] == pytest.approx(reference["norms"], rel=10 * LOSS_TOLERANCE[name]), case
        assert each["state"].keys() == reference["state"].keys(), case
        far = far_apart(each["state"], reference["state"], TOLERANCE[name])
        assert not far, f"{case}: {far}"


def far_apart(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> dict[str, float]:
    """Distances above the tolerance, by tensor, as shares of the expected tensor's length."""
    distances = {
        key: float((actual[key] - value).norm() / value.norm().clamp_min(1e-12)) for key, value in expected.items()
    }
    return {key: distance for key, distance in distances.items() if not distance <= tolerance}


def test_tensor_ranks_of_stage_1_in_bfloat16_train_as_without_zero(tmp_path):
    """Tensor ranks add in another order than one process, in bfloat16: they are compared with each other."""
    cases = [{"zero_stage": stage, "dtype": "bfloat16", "tensor_parallel": 2} for stage in (0, 1)]
    without, divided = on_ranks(run_cases, 2, tmp_path, cases)[0]["found"]
    for figure in ("losses", "norms"):
        assert divided[figure] == pytest.approx(without[figure], rel=LOSS_TOLERANCE["bfloat16"]), figure
    assert not far_apart(divided["state"], without["state"], TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", ["adamw", "bfloat16"])
def test_gradients_of_a_wrong_scale_are_seen_in_weights_and_moments(references, name):
    far = far_apart(references[f"{name}, gradients twice"]["state"], references[name]["state"], TOLERANCE[name])
    assert {"master model.embed_tokens.weight", "first_moment model.embed_tokens.weight"} <= far.keys()


def test_reduced_precision_of_the_state_stays_near_the_plain_one(references):
    plain, reduced = references["muon"], references["bfloat16 state"]
    assert reduced["losses"] == pytest.approx(plain["losses"], rel=2e-3)
    for key, tensor in reduced["state"].items():
        assert key.startswith("master") or tensor.equal(tensor.bfloat16().float()), key


STEPS_OF = [
    {"num_ranks": 2, "zero_stage": 2},
    {"num_ranks": 2, "zero_stage": 1, "expert_parallel": 2},
    {"num_ranks": 2, "zero_stage": 0, "tensor_parallel": 2},
    {"num_ranks": 1, "zero_stage": 0},
    {"num_ranks": 2, "zero_stage": 3},
    {"num_ranks": 2, "zero_stage": 1, "pipeline_parallel": 2},
]
"""The topology of each step of a course: every one continues from what the one before left on disk."""


def run_steps(rank, num_ranks, first_step, topologies, directory):
    totals = {"losses": [], "norms": []}
    for step, topology in enumerate(topologies, start=first_step):
        trainable = build(**topology)
        if step:
            load_checkpoint(trainable, Path(directory) / f"after-{step}")
        results = train(trainable, step, 1)
        save_state(trainable, position_after(step + 1), Path(directory) / f"after-{step + 1}")
        totals = {name: values + results[name] for name, values in totals.items()}
    return totals


def run_uninterrupted(rank, num_ranks, num_steps):
    return train(build(1), 0, num_steps)


def test_a_course_that_changes_its_topology_at_every_step_has_the_curve_of_one_process(tmp_path):
    expected = on_ranks(run_uninterrupted, 1, tmp_path, len(STEPS_OF))[0]
    actual = {"losses": [], "norms": []}
    for first, last in ((0, 3), (3, 4), (4, len(STEPS_OF))):
        results = on_ranks(
            run_steps, STEPS_OF[first]["num_ranks"], tmp_path, first, STEPS_OF[first:last], str(tmp_path)
        )[0]
        actual = {name: values + results[name] for name, values in actual.items()}
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-4)
