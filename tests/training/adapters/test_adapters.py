"""Adapters on every topology that trains against one process; and a phase that trains one, from start to export."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import AdapterRecipe
from model.architecture.adapters import add_adapters
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes
from tasks.release.checkpoint_source import open_source
from tasks.release.convert_checkpoint import convert_checkpoint, merge_adapter
from tasks.training.import_checkpoint import refuse_foreign_checkpoint
from tasks.training.loop.build_model import build_trainable, divide_model, make_weights
from tasks.training.parallel.partitions import frozen_pieces_of
from tasks.training.parallel.ranks import connect_ranks
from tasks.training.parallel.trainable import Trainable
from tasks.training.state.initial_weights import InitialWeights
from tasks.training.state.state import load_frozen, load_master
from tasks.training.state.tensor_sources import FreshAdapters
from tests.support.model_recipes import GLM46, with_every_expert
from tests.support.parallel_steps import resources_of
from tests.support.rank_processes import on_ranks
from tests.support.training_inputs import RESOURCES, ROWS_PER_STEP, TrainingInputs, metrics_of, small_recipe
from tests.training.test_objectives import course, sft_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill
from tests.training.test_zero import ADAM_EPS, MODEL, NUM_STEPS, far_apart, state_of, train

WEIGHTS = with_every_expert(GLM46).model_dump()
EVERYTHING = ["attention", "dense_mlp", "shared_experts", "routed_experts"]
LORA = {"kind": "lora", "rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": EVERYTHING}
DORA = {"kind": "dora", "rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["attention"]}
REFERENCES = [{"adapter": LORA}, {"adapter": DORA}, {"adapter": LORA, "dtype": "bfloat16"}]
TWO_RANKS = [
    *({"adapter": LORA, "zero_stage": stage} for stage in (0, 1, 2, 3)),
    *({"adapter": DORA, "zero_stage": stage} for stage in (1, 3)),
    *({"adapter": each, "tensor_parallel": 2} for each in (LORA, DORA)),
    {"adapter": LORA, "context_parallel": 2, "zero_stage": 1},
    {"adapter": LORA, "pipeline_parallel": 2, "zero_stage": 1},
    *({"adapter": LORA, "expert_parallel": 2, "zero_stage": stage} for stage in (0, 2)),
    *({"adapter": DORA, "expert_parallel": 2, "zero_stage": stage} for stage in (0, 1)),  # its experts are frozen
    {"adapter": LORA, "zero_stage": 2, "recompute": "selective"},
    {"adapter": LORA, "zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    *({"adapter": LORA, "dtype": "bfloat16", "zero_stage": stage} for stage in (0, 1, 2)),
]
FOUR_RANKS = [
    {"adapter": LORA, "pipeline_parallel": 2, "expert_parallel": 2, "zero_stage": 1},
    {"adapter": DORA, "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2, "zero_stage": 1},
    {
        "adapter": LORA,
        "tensor_parallel": 2,
        "expert_parallel": 4,
        "zero_stage": 1,
        "recompute": "full",
        "recompute_every_layers": 1,
    },
]


def build(num_ranks: int, adapter: dict, dtype: str = "float32", **changes) -> Trainable:
    resources = resources_of(num_ranks=num_ranks, micro_batch_sequences=1, bucket_elements=20_000, **changes)
    ranks = connect_ranks(resources)
    with torch.device("meta"):
        weights = InitialWeights(MODEL, checkpoint_shapes(Glm4Moe(MODEL)), seed=1)
        model = Glm4Moe(MODEL)
        add_adapters(model, AdapterRecipe.model_validate(adapter))
    shapes = checkpoint_shapes(model)
    divide_model(model, ranks, resources)
    make_weights(model, dtype, resources, ranks)
    optimizer = small_recipe().optimizer.model_copy(update={"kind": "adamw", "adam_eps": ADAM_EPS})
    trainable = build_trainable(model, optimizer, dtype, resources, ranks)
    load_frozen(trainable, weights, "the initial weights")
    load_master(trainable, FreshAdapters(shapes, weights, seed=2), "the fresh adapters")
    return trainable


def run_cases(rank, num_ranks, cases):
    states = []
    for case in cases:
        trainable = build(num_ranks, **case)
        frozen = [piece.master for piece in frozen_pieces_of(trainable.engine, trainable.model).values()]
        before = [each.clone() for each in frozen]
        results = train(trainable, 0, NUM_STEPS)
        assert all(each.equal(value) for each, value in zip(frozen, before, strict=True))
        states.append({**results, "state": state_of(trainable)})
    return {"found": states}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return on_ranks(run_cases, 1, tmp_path_factory.mktemp("references"), REFERENCES)[0]["found"]


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [pytest.param(2, TWO_RANKS, id="two ranks"), pytest.param(4, FOUR_RANKS, id="four ranks", marks=pytest.mark.long)],
)
def test_every_topology_trains_an_adapter_like_one_process(references, tmp_path, num_ranks, cases):
    by_rank = [rank["found"] for rank in on_ranks(run_cases, num_ranks, tmp_path, cases)]
    for case, *each_rank in zip(cases, *by_rank, strict=True):
        each = each_rank[0] | {"state": {key: value for rank in each_rank for key, value in rank["state"].items()}}
        described = {name: case[name] for name in ("adapter", "dtype") if name in case}
        reference, is_rounded = references[REFERENCES.index(described)], "dtype" in case
        assert each["losses"] == pytest.approx(reference["losses"], rel=2e-3 if is_rounded else 1e-5), case
        assert each["state"].keys() == reference["state"].keys(), case
        assert all(".lora_" in key for key in each["state"]), case
        far = far_apart(each["state"], reference["state"], 5e-2 if is_rounded else 1e-4)
        assert not far, f"{case}: {far}"


def test_every_tensor_of_an_adapter_moves(references):
    for case, reference in zip(REFERENCES, references, strict=True):
        moved = {key for key, tensor in reference["state"].items() if key.startswith("first_moment") and tensor.any()}
        assert len(moved) == sum(key.startswith("master") for key in reference["state"]), case


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("adapters") / "home")


@pytest.fixture(scope="module")
def base(inputs):
    return inputs.train(inputs.arguments(small_recipe(model=WEIGHTS)))


def adapter_recipe(adapter: dict = LORA, **changes):
    return sft_recipe(**{"model": WEIGHTS, "adapter": adapter, **changes})


@pytest.fixture(scope="module")
def tuned(inputs, base):
    return inputs.train(inputs.chat_arguments(adapter_recipe(), start=base))


def test_an_adapter_learns_and_its_export_is_the_start_with_it_merged_in(base, tuned):
    losses = [line["lm"] for line in metrics_of(tuned.path("metrics.jsonl"))]
    assert losses[-1] < losses[0] - 0.5
    names = {path.name for path in tuned.directory("handover").iterdir()}
    assert names == {"state.json"}  # neither masters of frozen weights nor moments
    assert json.loads(tuned.path("adapter/adapter_config.json").read_text())["r"] == LORA["rank"]
    assert base.record.merge_error is None and 0 < tuned.record.merge_error < 1e-6
    before, after = (load_file(each.path("hf/model.safetensors")) for each in (base, tuned))
    adapter = load_file(tuned.path("adapter/adapter_model.safetensors"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        stem = f"base_model.model.{name.removesuffix('weight')}"
        expected = weight
        if f"{stem}lora_A.weight" in adapter:
            expected = weight + 2.0 * adapter[f"{stem}lora_B.weight"] @ adapter[f"{stem}lora_A.weight"]
            assert not weight.equal(after[name]), name
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6, msg=name)


def test_an_adapter_is_merged_into_the_weights_that_it_was_trained_on_and_no_others(base, tuned, tmp_path):
    adapter_dir, merged = tuned.directory("adapter"), tmp_path / "merged"
    source = merge_adapter(open_source(base.directory("hf")), adapter_dir)
    card = convert_checkpoint(source, merged, "hf")
    assert (card.source, card.adapter) == (str(base.directory("hf")), str(adapter_dir)) and not card.num_rounded
    expected, written = (load_file(each) for each in (tuned.path("hf/model.safetensors"), merged / "model.safetensors"))
    assert expected.keys() == written.keys() and all(written[name].equal(expected[name]) for name in expected)
    copied = shutil.copytree(base.directory("hf"), tmp_path / "copied")
    (copied / "README.md").write_text("the same weights")
    assert merge_adapter(open_source(copied), adapter_dir).adapter

    with pytest.raises(ValueError, match="is an adapter of another model: it was trained on weights with sha256 "):
        merge_adapter(open_source(merged), adapter_dir)
    native = replace(open_source(base.directory("hf")), format="native")
    with pytest.raises(ValueError, match="is of format native: an adapter is merged into a Hugging Face model"):
        merge_adapter(native, adapter_dir)
    beside = shutil.copytree(adapter_dir, copied, dirs_exist_ok=True)
    for refuse in (open_source, lambda path: refuse_foreign_checkpoint(path, sft_recipe(model=WEIGHTS).model)):
        with pytest.raises(ValueError, match=r"holds an adapter beside a model: move .* and merge it .* --adapter DIR"):
            refuse(beside)
    foreign = shutil.copytree(adapter_dir, tmp_path / "foreign")
    (foreign / "base.json").unlink()
    with pytest.raises(ValueError, match=r"has no base.json, which says on which weights .* merge .* with PEFT"):
        merge_adapter(open_source(base.directory("hf")), foreign)


@pytest.mark.long
def test_an_interrupted_adapter_ends_in_the_digest_of_an_uninterrupted_one(base, tuned, tmp_path):
    other = TrainingInputs(tmp_path / "home")
    start = other.train(other.arguments(small_recipe(model=WEIGHTS)))
    assert start.digest == base.digest
    arguments = other.chat_arguments(adapter_recipe(), SAVE_EVERY_STEP, start=start)
    assert train_through_a_kill(other, arguments).digest == tuned.digest


def test_the_next_phase_starts_from_the_merged_weights(inputs, tuned):
    recipe = sft_recipe(model=WEIGHTS, course=course("after", 1e-4, ROWS_PER_STEP), phase="rl_cold_start")
    following = inputs.train(inputs.chat_arguments(recipe, start=tuned))
    first = metrics_of(following.path("metrics.jsonl"))[0]["lm"]
    assert first == pytest.approx(metrics_of(tuned.path("metrics.jsonl"))[-1]["lm"], abs=0.1)
    again = inputs.train(inputs.chat_arguments(adapter_recipe(course=course("b", 1e-3, 4)), start=tuned))
    assert metrics_of(again.path("metrics.jsonl"))[0]["lm"] == pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "resources", "message"),
    [
        ({"adapter": DORA | {"targets": EVERYTHING}}, {}, "adapter.kind dora with MLPs or experts: .* \\[attention\\]"),
        (
            {"adapter": LORA | {"targets": ["routed_experts"]}, "model": WEIGHTS | {"first_k_dense_replace": 3}},
            {},
            "the model has none of these .* Name some of attention, dense_mlp",
        ),
        ({"course": small_recipe().course}, {}, "router_bias_rate above 0: .* Set router_bias_rate to 0"),
        (
            {"adapter": LORA | {"targets": ["routed_experts"]}},
            {"num_ranks": 2, "pipeline_parallel": 2},
            "pipeline_parallel 2 without attention in adapter.targets",
        ),
        (
            {"adapter": LORA | {"targets": ["attention"]}},
            {"num_ranks": 2, "expert_parallel": 2, "zero_stage": 3},
            "expert_parallel 2 with zero_stage 3 and no routed_experts in adapter.targets: .* Set zero_stage to 2 or",
        ),
        ({"adapter": LORA | {"dropout": 0.1}}, {}, "dropout 0.1 with routed_experts, .* set adapter.dropout to 0"),
        ({"adapter": DORA | {"dropout": 0.1}}, {}, "dropout 0.1 with adapter.kind dora, .* set adapter.dropout to 0"),
        (
            {"adapter": LORA | {"dropout": 0.1, "targets": ["attention"]}},
            {"num_ranks": 2, "tensor_parallel": 2},
            "dropout 0.1 with tensor_parallel 2, .*: set tensor_parallel to 1",
        ),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused_with_the_fix(inputs, base, changes, resources, message):
    recipe = adapter_recipe(**changes)
    with pytest.raises(ValueError, match=message):
        inputs.train(inputs.chat_arguments(recipe, RESOURCES.model_copy(update=resources), start=base))


def test_an_adapter_without_weights_to_start_from_is_refused(inputs):
    with pytest.raises(ValueError, match=r"adapter.kind lora has no weights to adapt: start with `--from sft --start"):
        inputs.train(inputs.chat_arguments(adapter_recipe()))
