"""Memory by formula against what lives: weights, gradients, optimizer and buckets on ranks at every ZeRO stage and
axis, activations by kind of recomputation and device, and the most that passes and updates take."""

import gc
import json
from pathlib import Path

import pytest
import torch

from benchmarks.training.recompute import kept_bytes
from model.architecture import moe
from model.architecture.gated_mlp import grouped_products
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes
from model.kernels import attention_kernel, elementwise_kernels
from tasks.training.loop.build_model import build_trainable, divide_model, make_weights
from tasks.training.loop.training_step import take_step
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.ranks import connect_ranks
from tasks.training.parallel.recompute import recompute_activations
from tasks.training.parallel.zero_partitions import ZeroPartitions
from tasks.training.plan.activation_memory import activation_bytes
from tasks.training.plan.bucket_memory import bucket_bytes
from tasks.training.plan.rank_memory import rank_memory, stage_memory
from tasks.training.schedule.schedules import StepPlan
from tasks.training.state.initial_weights import InitialWeights
from tasks.training.state.state import load_master
from tests.support.model_recipes import AIR, GLM46
from tests.support.parallel_steps import micro_batches, resources_of
from tests.support.rank_processes import on_ranks
from tests.support.training_inputs import small_recipe

MODEL = GLM46.model_copy(update={"hidden_size": 128, "moe_intermediate_size": 64})
BUCKET = 2_006


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Storages by address. Whoever keeps them keeps their addresses from being used again."""
    gc.collect()
    with torch.no_grad():
        tensors = [
            thing
            for thing in gc.get_objects()
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu"
        ]
        # A gradient that Python never looked at is no object yet.
        tensors += [
            tensor.grad for tensor in tensors if isinstance(tensor, torch.nn.Parameter) and tensor.grad is not None
        ]
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


def trainable_model(recipe, resources, ranks):
    """A divided model with its initial weights, and what trains it."""
    with torch.device("meta"):
        model = Glm4Moe(MODEL)
    initial = InitialWeights(MODEL, checkpoint_shapes(model), seed=1)
    divide_model(model, ranks, resources)
    make_weights(model, recipe.dtype, resources, ranks)
    trainable = build_trainable(model, recipe.optimizer, recipe.dtype, resources, ranks)
    load_master(trainable, initial, "the initial weights")
    return model, trainable


def bytes_since(before, model):
    """Bytes of the storages that were not there before, without weights that ZeRO 3 has gathered."""
    gathered = {
        parameter.untyped_storage().data_ptr() for parameter in model.parameters() if hasattr(parameter, "ds_id")
    }
    return sum(
        storage.nbytes()
        for address, storage in live_storages().items()
        if address not in before and address not in gathered
    )


def most_bytes_between_passes(rank, num_ranks, cases):
    """Bytes that live after a backward pass, when activations are gone and gradients exist; moments exist from a step
    before. And bytes of the buckets that DeepSpeed holds in a backward pass, and those of weights that are whole while
    ZeRO 3 divides them."""
    most, buckets, made, undivided, empty, divide = [], [], [], [], torch.empty, ZeroPartitions.divide

    def noted_divide(self, parameter):
        undivided.append(parameter.untyped_storage().nbytes())
        divide(self, parameter)
        undivided[-1] += parameter.untyped_storage().nbytes()  # nothing is left of it

    ZeroPartitions.divide = noted_divide

    def noted_empty(*size, **options):
        tensor = empty(*size, **options)
        if tensor.numel() == BUCKET:
            made.append(tensor.untyped_storage().nbytes())
        return tensor

    torch.empty = noted_empty
    for case in cases:
        made.clear()
        dtype = case.pop("dtype", "float32")
        resources = resources_of(num_ranks=num_ranks, micro_batch_sequences=1, **({"bucket_elements": BUCKET} | case))
        before = live_storages()
        ranks = connect_ranks(resources)
        recipe = small_recipe(model=MODEL.model_dump(), dtype=dtype)
        model, trainable = trainable_model(recipe, resources, ranks)
        run_backward, sizes, lasting, passing = trainable.engine.backward, [], sum(made), []
        made.clear()

        def backward(
            loss,
            trainable=trainable,
            run_backward=run_backward,
            model=model,
            before=before,
            sizes=sizes,
            passing=passing,
        ):
            run_backward(loss)
            passing.append(sum(made))
            made.clear()
            if trainable.engine.global_steps == 0:
                return
            sizes.append(bytes_since(before, model))

        trainable.engine.backward = backward
        for step in range(2):
            rows = micro_batches(4, 12, is_segmented=True, seed=step)[ranks.data.rank :: ranks.data.size]
            take_step(trainable, recipe, StepPlan(0, 4, step * 48, (step + 1) * 48), rows, step)
        most.append(float(max(sizes)))
        buckets.append(lasting + max(passing))
        del trainable, run_backward, backward, model
    torch.empty, ZeroPartitions.divide = empty, divide
    return {"bytes": most, "buckets": buckets, "undivided": undivided}


CASES = [
    {"zero_stage": 0, "tensor_parallel": 2},
    {"zero_stage": 0, "expert_parallel": 2},
    {"zero_stage": 1},
    {"zero_stage": 1, "dtype": "bfloat16"},
    {"zero_stage": 2, "dtype": "bfloat16"},
    {"zero_stage": 3, "dtype": "bfloat16"},
    {"zero_stage": 1, "pipeline_parallel": 2},
]


def test_weights_gradients_and_optimizer_by_formula_are_what_lives_on_every_rank(tmp_path):
    measured = on_ranks(most_bytes_between_passes, 2, tmp_path, CASES)
    for number, case in enumerate(CASES):
        changes = dict(case)
        recipe = small_recipe(model=MODEL.model_dump(), dtype=changes.pop("dtype", "float32"))
        resources = resources_of(num_ranks=2, micro_batch_sequences=1, **changes)
        for rank in range(2):
            stage = rank if resources.pipeline_parallel == 2 else 0
            memory = stage_memory(stage, resources.pipeline_parallel, recipe, resources)
            expected, lives = memory.weights + memory.gradients + memory.optimizer, measured[rank]["bytes"][number]
            # On top come buckets, padding, the step's rows and, in a pipeline, the activations of micro-batches on
            # their way.
            assert 0.99 * expected < lives < 1.03 * expected + 4 * 4 * BUCKET, (case, rank, expected, lives)
            element = 2 if recipe.dtype == "bfloat16" else 4
            # Beside the buffers a bfloat16 bucket is sent as a float32 copy, and ZeRO 3 holds gathered weights.
            beside = (
                element * 10**6
                if resources.zero_stage == 3
                else 4 * BUCKET * (resources.zero_stage == 2 and element == 2)
            )
            own = resources.model_copy(update={"bucket_elements": BUCKET})
            assert bucket_bytes(own, 10**6, element) - beside == measured[rank]["buckets"][number], (case, rank)
    with torch.device("meta"):
        sizes = sorted(2 * parameter.numel() for parameter in Glm4Moe(MODEL).parameters())
    assert all(sorted(rank["undivided"]) == sizes for rank in measured), "ZeRO 3 holds one whole weight at a time"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("model", [GLM46, AIR], ids=["glm46", "air"])
@pytest.mark.parametrize(("kind", "every_layers"), [("none", 1), ("selective", 1), ("full", 1), ("full", 2)])
def test_activations_by_formula_are_what_autograd_keeps(model, kind, every_layers, device, monkeypatch):
    """On the path of an accelerator too: its composed operations and grouped products run here, only slower."""
    if device == "cuda":
        for kernels in (elementwise_kernels, attention_kernel):
            monkeypatch.setattr(kernels, "fits", lambda *tensors: False)
        monkeypatch.setattr(moe, "apply_grouped_mlp", grouped_products)
    recipe = model.model_copy(update={"num_hidden_layers": 5})
    tokens = torch.randint(0, recipe.vocab_size, (2, 129), generator=torch.Generator().manual_seed(1))
    resources = resources_of(recompute=kind, recompute_every_layers=every_layers, device=device)
    for dtype, element in ((torch.float32, 4), (torch.bfloat16, 2)):
        built = Glm4Moe(recipe).to(dtype)
        recompute_activations(built, kind, every_layers)
        kept, _ = kept_bytes(built, tokens)
        planned = activation_bytes(
            recipe, resources, 256, element, range(5), in_flight=1, is_last=True, between_only=True
        )
        assert planned == pytest.approx(kept, rel=0.04), dtype


def most_new_bytes(function, trace_path: Path) -> int:
    """The most that lives at once of what a function allocates."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    profile.export_chrome_trace(str(trace_path))
    live: dict[int, int] = {}
    now = most = 0
    events = [event for event in json.loads(trace_path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    # In the order of time: a trace lists them by thread, and what one thread allocates another may free.
    for event in sorted(events, key=lambda event: event["ts"]):
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        now += size if size > 0 else -live.pop(address, 0)
        if size > 0:
            live[address] = size
        most = max(most, now)
    return most


LARGE = MODEL.model_copy(update={"vocab_size": 4096})
"""Of the vocabulary's size, so that logits and the unembedding weigh as they do in a real model."""


def recipe_of(changes: dict):
    optimizer = small_recipe().optimizer.model_copy(
        update={name: changes.pop(name) for name in ("kind", "state_dtype") if name in changes}
    )
    dtype = changes.pop("dtype", "float32")
    return small_recipe(
        model=LARGE.model_dump(), optimizer=optimizer.model_dump(), dtype=dtype, sequence_length=128, num_tokens=4 * 128
    )


def peaks(rank, num_ranks, cases, directory):
    """The most that the second step's passes and its update allocate; four rows of 128 tokens in all."""
    highest = {"passes": [], "update": []}
    for case in cases:
        changes = dict(case)
        recipe = recipe_of(changes)
        resources = resources_of(
            num_ranks=num_ranks, micro_batch_sequences=4, **({"bucket_elements": BUCKET} | changes)
        )
        ranks = connect_ranks(resources)
        with torch.device("meta"):
            model = Glm4Moe(LARGE)
        initial = InitialWeights(LARGE, checkpoint_shapes(model), seed=1)
        divide_model(model, ranks, resources)
        make_weights(model, recipe.dtype, resources, ranks)
        trainable = build_trainable(model, recipe.optimizer, recipe.dtype, resources, ranks)
        load_master(trainable, initial, "the initial weights")
        tokens = torch.randint(LARGE.vocab_size, (4 // num_ranks, 129), generator=torch.Generator().manual_seed(rank))
        batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.zeros_like(tokens[:, :-1]), is_segmented=False)
        run_step, sizes = trainable.engine.step, {}

        def update(run_step=run_step, sizes=sizes):
            sizes["update"] = most_new_bytes(run_step, Path(directory) / f"trace-{rank}.json")

        def passes(recipe=recipe, trainable=trainable, batch=batch):
            take_step(trainable, recipe, StepPlan(0, 4, 0, 512), [batch], 1)

        passes()
        if num_ranks == 1:
            trainable.engine.step = lambda: None
            sizes["passes"] = most_new_bytes(passes, Path(directory) / "trace.json")
        trainable.engine.step = update
        passes()
        for name in highest:
            highest[name].append(sizes.get(name, 0))
        del trainable, run_step, update, passes, model
    return highest


ALONE = [
    {},
    {"recompute": "selective", "state_dtype": "bfloat16"},
    {"recompute": "full", "kind": "adamw"},
    {"recompute": "full", "dtype": "bfloat16", "kind": "adamw", "state_dtype": "bfloat16"},
]
DIVIDED = [
    {"zero_stage": 1},
    {"zero_stage": 1, "dtype": "bfloat16"},
    {"zero_stage": 3, "dtype": "bfloat16"},
    {"zero_stage": 1, "kind": "adamw"},
]


@pytest.mark.long
def test_passes_and_updates_take_at_most_what_the_formula_says(tmp_path):
    for num_ranks, cases in ((1, ALONE), (2, DIVIDED)):
        measured = on_ranks(peaks, num_ranks, tmp_path, cases, str(tmp_path))
        for number, case in enumerate(cases):
            changes = dict(case)
            recipe = recipe_of(changes)
            memory = rank_memory(recipe, resources_of(num_ranks=num_ranks, micro_batch_sequences=4, **changes))
            assert memory.update == pytest.approx(max(each["update"][number] for each in measured), rel=0.1), case
            if num_ranks == 1:
                # Weights in bfloat16 are made anew in each pass; formulas have no room for what a layer's backward pass
                # holds beside.
                passing = memory.activations + (memory.weights if "dtype" in case else 0)
                assert passing == pytest.approx(measured[0]["passes"][number], rel=0.12), case


def test_the_fullest_stage_is_reported():
    recipe = small_recipe(model=MODEL.model_dump())
    resources = resources_of(num_ranks=3, pipeline_parallel=3)
    stages = [stage_memory(stage, 3, recipe, resources).device for stage in range(3)]
    assert rank_memory(recipe, resources).device == max(stages) > min(stages)
