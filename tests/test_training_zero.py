"""ZeRO 0-3, offloading and bfloat16 on one and two ranks against one process without ZeRO: losses, gradient norms and weights after
several steps through the loop's own take_step; and the hand-over state, which goes from any of them to any other."""

from __future__ import annotations

import pytest
import torch

from model.transformer import Glm4Moe
from tasks.training.initial_weights import InitialWeights
from tasks.training.prepare_training import build_trainable, divide_model, materialize
from tasks.training.ranks import connect_ranks
from tasks.training.schedules import StepPlan
from tasks.training.state import dump_state, load_master
from tasks.training.training_step import Trainable, take_step
from tests.model_recipes import GLM46
from tests.parallel_steps import micro_batches, resources_of
from tests.rank_processes import on_ranks
from tests.training_inputs import small_recipe

MODEL = GLM46.model_copy(update={"initializer_range": 0.1})
ROWS, POSITIONS, NUM_STEPS = 4, 12, 4
STEP_TOKENS = ROWS * POSITIONS


def build(num_ranks: int, kind: str, dtype: str, **changes) -> Trainable:
    resources = resources_of(num_ranks=num_ranks, micro_batch_sequences=1, bucket_elements=20_000, **changes)
    ranks = connect_ranks(resources)
    with torch.device("meta"):
        model = Glm4Moe(MODEL)
    initial = InitialWeights(MODEL, model, seed=1)
    divide_model(model, ranks, resources)
    materialize(model, torch.device("cpu"))
    optimizer = small_recipe().optimizer.model_copy(update={"kind": kind})
    trainable = build_trainable(model, optimizer, dtype, resources, ranks)
    load_master(trainable, initial, "the initial weights")
    return trainable


def train(trainable: Trainable, first_step: int, num_steps: int) -> dict:
    """Losses and gradient norms of some steps of a course."""
    recipe = small_recipe(model=MODEL.model_dump())
    ranks, found = trainable.ranks, {"losses": [], "norms": []}
    for step in range(first_step, first_step + num_steps):
        rows = micro_batches(ROWS, POSITIONS, is_segmented=True, seed=step)[ranks.data.rank :: ranks.data.size]
        plan = StepPlan(step * ROWS, ROWS, step * STEP_TOKENS, (step + 1) * STEP_TOKENS)
        result = take_step(trainable, recipe, plan, rows, step)
        found["losses"].append(result.total_loss)
        found["norms"].append(result.grad_norm)
    return found


def weights_and_moments(trainable: Trainable) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    from tests.test_training_checkpoints import POSITION

    tensors = {}
    for name, data in dump_state(trainable, POSITION):
        if name.endswith(".safetensors"):
            tensors |= {f"{name.split('-')[0]} {key}": value for key, value in load(data).items()}
    return tensors


def run_cases(rank, num_ranks, cases):
    found = {}
    for case, changes in cases.items():
        kind, dtype = changes.pop("kind", "muon"), changes.pop("dtype", "float32")
        trainable = build(num_ranks, kind, dtype, **changes)
        results = train(trainable, 0, NUM_STEPS)
        found[case] = {**results, "state": weights_and_moments(trainable)}
    return found
