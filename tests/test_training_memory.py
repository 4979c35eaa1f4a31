"""Memory by formula against what lives: weights, gradients and optimizer on ranks at every ZeRO stage and axis, activations by kind of
recomputation."""

import gc

import pytest
import torch

from benchmarks.recompute import kept_bytes
from model.transformer import Glm4Moe
from tasks.training.activation_memory import activation_bytes
from tasks.training.initial_weights import InitialWeights
from tasks.training.prepare_training import build_trainable, divide_model, materialize
from tasks.training.rank_memory import rank_memory, stage_memory
from tasks.training.ranks import connect_ranks
from tasks.training.recompute import recompute_activations
from tasks.training.schedules import StepPlan
from tasks.training.state import load_master
from tasks.training.training_step import take_step
from tests.model_recipes import AIR, GLM46
from tests.parallel_steps import micro_batches, resources_of
from tests.rank_processes import on_ranks
from tests.training_inputs import small_recipe

MODEL = GLM46.model_copy(update={"hidden_size": 128, "moe_intermediate_size": 64})
BUCKET = 2_000


def live_storages() -> dict[int, int]:
    gc.collect()
    with torch.no_grad():
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu"]
        # A gradient that Python never looked at is no object yet.
        tensors += [tensor.grad for tensor in tensors if isinstance(tensor, torch.nn.Parameter) and tensor.grad is not None]
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def most_bytes_between_passes(rank, num_ranks, cases):
    """Bytes that live behind a backward pass, when activations are gone and gradients are there; moments are there from a step before."""
    found = []
    for case in cases:
        dtype = case.pop("dtype", "float32")
        resources = resources_of(num_ranks=num_ranks, micro_batch_sequences=1, **({"bucket_elements": BUCKET} | case))
        before = live_storages()
        ranks = connect_ranks(resources)
        with torch.device("meta"):
            model = Glm4Moe(MODEL)
        initial = InitialWeights(MODEL, model, seed=1)
        divide_model(model, ranks, resources)
        materialize(model, torch.device("cpu"))
        recipe = small_recipe(model=MODEL.model_dump(), dtype=dtype)
        trainable = build_trainable(model, recipe.optimizer, dtype, resources, ranks)
        load_master(trainable, initial, "the initial weights")
        run_backward, sizes = trainable.engine.backward, []

        def backward(loss, trainable=trainable, run_backward=run_backward, model=model, before=before, sizes=sizes):
            run_backward(loss)
            if trainable.engine.global_steps == 0:
                return
            gathered = {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if hasattr(parameter, "ds_id")}
            sizes.append(sum(size for place, size in live_storages().items() if place not in before and place not in gathered))

        trainable.engine.backward = backward
        for step in range(2):
            rows = micro_batches(4, 12, is_segmented=True, seed=step)[ranks.data.rank :: ranks.data.size]
            take_step(trainable, recipe, StepPlan(0, 4, step * 48, (step + 1) * 48), rows, step)
        found.append(float(max(sizes)))
        del trainable, run_backward, backward, model
    return {"bytes": found}


CASES = [
    {"zero_stage": 0, "tensor_parallel": 2}, {"zero_stage": 0, "expert_parallel": 2}, {"zero_stage": 1},
    {"zero_stage": 1, "dtype": "bfloat16"}, {"zero_stage": 2, "dtype": "bfloat16"}, {"zero_stage": 3, "dtype": "bfloat16"},
    {"zero_stage": 1, "pipeline_parallel": 2},
]  # fmt: skip


def test_weights_gradients_and_optimizer_by_formula_are_what_lives_on_every_rank(tmp_path):
    found = on_ranks(most_bytes_between_passes, 2, tmp_path, CASES)
    for number, case in enumerate(CASES):
        changes = dict(case)
        recipe = small_recipe(model=MODEL.model_dump(), dtype=changes.pop("dtype", "float32"))
        resources = resources_of(num_ranks=2, micro_batch_sequences=1, **changes)
        for rank in range(2):
            stage = rank if resources.pipeline_parallel == 2 else 0
            memory = stage_memory(stage, resources.pipeline_parallel, recipe, resources)
            expected, lives = memory.weights + memory.gradients + memory.optimizer, found[rank]["bytes"][number]
            # On top come buckets, padding, the step's rows and, in a pipeline, the activations of micro-batches on their way.
            assert 0.99 * expected < lives < 1.03 * expected + 4 * 4 * BUCKET, (case, rank, expected, lives)


@pytest.mark.parametrize("model", [GLM46, AIR], ids=["glm46", "air"])
@pytest.mark.parametrize(("kind", "every_layers"), [("none", 1), ("selective", 1), ("full", 1), ("full", 2)])
def test_activations_by_formula_are_what_autograd_keeps(model, kind, every_layers):
    recipe = model.model_copy(update={"num_hidden_layers": 5})
    tokens = torch.randint(0, recipe.vocab_size, (2, 129), generator=torch.Generator().manual_seed(1))
    built = Glm4Moe(recipe)
    recompute_activations(built, kind, every_layers)
    kept, _ = kept_bytes(built, tokens)
    resources = resources_of(recompute=kind, recompute_every_layers=every_layers)
    planned = activation_bytes(recipe, resources, 256, 4, range(5), in_flight=1, is_last=True, passing_only=True)
    assert planned == pytest.approx(kept, rel=0.1)


def test_the_fullest_stage_is_reported():
    recipe = small_recipe(model=MODEL.model_dump())
    resources = resources_of(num_ranks=3, pipeline_parallel=3)
    stages = [stage_memory(stage, 3, recipe, resources).device for stage in range(3)]
    assert rank_memory(recipe, resources).device == max(stages) > min(stages)
