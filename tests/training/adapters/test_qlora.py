"""A phase of qlora against one of lora on the matrices that its 4 bits stand for; from start to export, killed between;
and what refuses it."""

from __future__ import annotations

import json
import tomllib

import pytest
import torch
from safetensors.torch import load_file

from configs.load import load_scale
from configs.schema import AdapterRecipe
from infra.code_digest import ROOT
from model.architecture.adapters import add_adapters
from model.architecture.four_bit import FourBitMatrices
from model.architecture.four_bit_layers import four_bit_matrices
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes, to_checkpoint_tensors
from tasks.training.loop.build_model import build_trainable, divide_model, make_weights, materialize
from tasks.training.parallel.partitions import frozen_pieces_of
from tasks.training.parallel.ranks import connect_ranks
from tasks.training.plan import launch_rules
from tasks.training.plan.machine import H100
from tasks.training.plan.rank_memory import rank_memory
from tasks.training.plan.search import find_topology
from tasks.training.state.export import names_in_four_bits
from tasks.training.state.initial_weights import InitialWeights
from tasks.training.state.state import load_frozen, load_master
from tasks.training.state.tensor_sources import FourBitWeights, FreshAdapters
from tests.support.parallel_steps import resources_of
from tests.support.rank_processes import on_ranks
from tests.support.training_inputs import RESOURCES, TrainingInputs, metrics_of, small_recipe
from tests.training.adapters.test_adapters import LORA, WEIGHTS, adapter_recipe
from tests.training.preference.test_pair_phases import pair_recipe
from tests.training.test_objectives import rl_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill
from tests.training.test_zero import ADAM_EPS, MODEL, NUM_STEPS, far_apart, state_of, train

needs_bitsandbytes = pytest.mark.skipif(
    launch_rules.distribution_version("bitsandbytes") != launch_rules.BITSANDBYTES,
    reason="bitsandbytes holds weights in 4 bits: pip install 'glm46[qlora]'",
)
QLORA = LORA | {"kind": "qlora"}
ATTENTION_AND_MLP = ("attention", "dense_mlp", "shared_experts")
OF_ATTENTION = QLORA | {"targets": ["attention"]}
ON_ONE_RANK = [
    {"adapter": QLORA},
    {"adapter": OF_ATTENTION},
    {"adapter": QLORA, "dtype": "bfloat16"},
    {"adapter": QLORA, "recompute": "selective"},
    {"adapter": QLORA, "recompute": "full"},
]
ON_TWO_RANKS = [
    *({"adapter": QLORA, "zero_stage": stage} for stage in (0, 1)),
    {"adapter": QLORA, "dtype": "bfloat16", "zero_stage": 1},
]


class WithNan(InitialWeights):
    """Weights of which one expert is broken."""

    def read(self, name, shape):
        weight = super().read(name, shape)
        if name == "model.layers.1.mlp.experts.2.up_proj.weight":
            weight[3, 4] = torch.nan
        return weight


def build(num_ranks, adapter, dtype="float32", initial=InitialWeights, is_lora=False, **changes):
    """A trainable model of qlora, or one of lora whose frozen weights are those that qlora computes with."""
    resources = resources_of(num_ranks=num_ranks, micro_batch_sequences=1, bucket_elements=20_000, **changes)
    ranks = connect_ranks(resources)
    with torch.device("meta"):
        weights = initial(MODEL, checkpoint_shapes(Glm4Moe(MODEL)), seed=1)
        model = Glm4Moe(MODEL)
        add_adapters(model, AdapterRecipe.model_validate(adapter | {"kind": "lora" if is_lora else "qlora"}))
    shapes = checkpoint_shapes(model)
    divide_model(model, ranks, resources)
    make_weights(model, dtype, resources, ranks)
    optimizer = small_recipe().optimizer.model_copy(update={"kind": "adamw", "adam_eps": ADAM_EPS})
    trainable = build_trainable(model, optimizer, dtype, resources, ranks)
    frozen = (
        FourBitWeights(weights, names_in_four_bits(MODEL, AdapterRecipe.model_validate(QLORA))) if is_lora else weights
    )
    load_frozen(trainable, frozen, "the initial weights")
    load_master(trainable, FreshAdapters(shapes, weights, seed=2), "the fresh adapters")
    return trainable


def run_cases(rank, num_ranks, cases):
    states = []
    for case in cases:
        trainable = build(num_ranks, **case)
        held = [buffer for each in four_bit_matrices(trainable.model).values() for buffer in each.buffers()]
        frozen = [*held, *(piece.master for piece in frozen_pieces_of(trainable.engine, trainable.model).values())]
        before = [each.clone() for each in frozen]
        results = train(trainable, 0, NUM_STEPS)
        assert all(each.equal(value) for each, value in zip(frozen, before, strict=True))
        states.append({**results, "state": state_of(trainable)})
    return {"found": states}


@pytest.mark.long
@needs_bitsandbytes
def test_it_trains_like_lora_on_the_matrices_that_its_codes_stand_for_also_on_two_ranks(tmp_path):
    for part in ("lora", "one", "two"):
        (tmp_path / part).mkdir()
    references = [{"adapter": QLORA}, {"adapter": OF_ATTENTION}, {"adapter": QLORA, "dtype": "bfloat16"}]
    cases = [case | {"is_lora": True} for case in references]
    expected = on_ranks(run_cases, 1, tmp_path / "lora", cases)[0]["found"]
    alone = on_ranks(run_cases, 1, tmp_path / "one", ON_ONE_RANK)[0]["found"]
    by_rank = [rank["found"] for rank in on_ranks(run_cases, 2, tmp_path / "two", ON_TWO_RANKS)]
    both = [one | {"state": one["state"] | other["state"]} for one, other in zip(*by_rank, strict=True)]
    for case, each in zip([*ON_ONE_RANK, *ON_TWO_RANKS], [*alone, *both], strict=True):
        described = {name: case[name] for name in ("adapter", "dtype") if name in case}
        reference, is_rounded = expected[references.index(described)], "dtype" in case
        assert each["losses"] == pytest.approx(reference["losses"], rel=2e-3 if is_rounded else 1e-5), case
        assert each["state"].keys() == reference["state"].keys(), case
        assert all(".lora_" in key for key in each["state"]), case
        far = far_apart(each["state"], reference["state"], 5e-2 if is_rounded else 1e-4)
        assert not far, f"{case}: {far}"


def refused_start(rank, num_ranks):
    try:
        build(num_ranks, QLORA, initial=WithNan)
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


@needs_bitsandbytes
def test_a_start_that_is_not_finite_is_refused_with_the_tensor(tmp_path):
    message = on_ranks(refused_start, 1, tmp_path)[0]["message"]
    assert message == (
        "tensor model.layers.1.mlp.experts.2.up_proj.weight holds numbers that are not finite, which 4 bits have no "
        "code for: start from sound weights"
    )


@pytest.mark.parametrize("adapter", [QLORA, OF_ATTENTION], ids=["everything", "attention only"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_the_frozen_weights_are_those_of_the_plan(adapter, dtype):
    with torch.device("meta"):
        model = Glm4Moe(MODEL)
        add_adapters(model, AdapterRecipe.model_validate(adapter))
    materialize(model, torch.device("cpu"), frozen_dtype=getattr(torch, dtype))
    lives = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if not each.requires_grad)
    recipe = small_recipe(model=MODEL.model_dump(), adapter=adapter, dtype=dtype)
    as_lora = recipe.model_copy(update={"adapter": recipe.adapter.model_copy(update={"kind": "lora"})})
    assert rank_memory(recipe, resources_of(num_ranks=1)).weights == lives
    assert rank_memory(as_lora, resources_of(num_ranks=1)).weights > 1.5 * lives


def test_air_in_4_bits_fits_a_gpu_of_80_gb_where_its_routed_experts_have_no_adapters():
    scale = load_scale("recipes/glm45_air_lora")
    own = {"num_ranks": 1, "ranks_per_node": 1, "pipeline_parallel": 1, "expert_parallel": 1, "zero_stage": 0}
    resources = scale.phases[0].resources.model_copy(update=own)
    lora = scale.training_recipe(scale.phases[0])
    needed = {}
    for kind, targets in (("lora", ATTENTION_AND_MLP), ("qlora", ATTENTION_AND_MLP), ("qlora", lora.adapter.targets)):
        adapter = lora.adapter.model_copy(update={"kind": kind, "targets": targets})
        needed[kind, len(targets)] = rank_memory(lora.model_copy(update={"adapter": adapter}), resources)
    assert needed["qlora", 3].device < 0.92 * resources.device_memory_bytes
    assert needed["qlora", 4].device > resources.device_memory_bytes < needed["lora", 3].weights
    with torch.device("meta"):
        tensors = to_checkpoint_tensors(Glm4Moe(lora.model).state_dict())
    mtp = f"model.layers.{lora.model.num_hidden_layers}."
    in_four_bits = sum(
        tensor.numel() for name, tensor in tensors.items() if name.endswith("_proj.weight") and not name.startswith(mtp)
    )
    others = sum(tensor.numel() for tensor in tensors.values()) - in_four_bits
    assert in_four_bits > 1.05e11
    assert needed["qlora", 3].weights == pytest.approx(4.127 / 8 * in_four_bits + 2 * others, rel=1e-4)
    found = find_topology(lora.model_copy(update={"adapter": adapter}), resources, 1000, H100)
    assert found is None  # with adapters of the routed experts; nothing divides 4 bits
    alone = lora.adapter.model_copy(update={"kind": "qlora", "targets": ATTENTION_AND_MLP})
    found = find_topology(lora.model_copy(update={"adapter": alone}), resources, 1000, H100)
    assert found is not None and not launch_rules.divided_four_bits(found.resources)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("qlora") / "home")


@pytest.fixture(scope="module")
def base(inputs):
    return inputs.train(inputs.arguments(small_recipe(model=WEIGHTS)))


def qlora_recipe(**changes):
    return adapter_recipe(**{"adapter": QLORA, **changes})


@pytest.fixture(scope="module")
def tuned(inputs, base):
    return inputs.train(inputs.chat_arguments(qlora_recipe(), start=base))


@needs_bitsandbytes
def test_a_phase_learns_as_lora_does_saves_the_adapter_only_and_exports_what_it_computed_with(inputs, base, tuned):
    lora = inputs.train(inputs.chat_arguments(qlora_recipe(adapter=LORA), start=base))
    losses, of_lora = ([line["lm"] for line in metrics_of(each.path("metrics.jsonl"))] for each in (tuned, lora))
    assert losses[-1] < losses[0] - 0.5
    assert losses[-1] == pytest.approx(of_lora[-1], abs=0.1) and losses != of_lora
    assert {path.name for path in tuned.directory("handover").iterdir()} == {"state.json"}
    assert tuned.record.unreached_tensors == lora.record.unreached_tensors == ()
    assert 0 < tuned.record.merge_error < 1e-6
    assert json.loads(tuned.path("adapter/adapter_config.json").read_text())["peft_type"] == "LORA"
    before, after = (load_file(each.path("hf/model.safetensors")) for each in (base, tuned))
    adapter = load_file(tuned.path("adapter/adapter_model.safetensors"))
    assert before.keys() == after.keys()
    in_four_bits = names_in_four_bits(qlora_recipe().model, qlora_recipe().adapter)
    assert in_four_bits == {name for name in before if name.endswith("_proj.weight") and ".layers.3." not in name}
    for name, weight in before.items():
        if name in in_four_bits:
            held = FourBitMatrices(torch.Size((1, *weight.shape)), weight.device)
            held.put(0, weight)
            weight = held.whole(0, torch.float32)
        stem = f"base_model.model.{name.removesuffix('weight')}"
        expected = weight
        if f"{stem}lora_A.weight" in adapter:
            expected = expected + 2.0 * adapter[f"{stem}lora_B.weight"] @ adapter[f"{stem}lora_A.weight"]
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6, msg=name)


@pytest.mark.long
@needs_bitsandbytes
def test_a_killed_phase_ends_in_the_digest_of_an_uninterrupted_one(base, tuned, tmp_path):
    other = TrainingInputs(tmp_path / "home")
    start = other.train(other.arguments(small_recipe(model=WEIGHTS)))
    assert start.digest == base.digest
    arguments = other.chat_arguments(qlora_recipe(), SAVE_EVERY_STEP, start=start)
    assert train_through_a_kill(other, arguments).digest == tuned.digest


@pytest.mark.parametrize(
    ("recipe", "resources", "message"),
    [
        (qlora_recipe(), {"zero_stage": 2}, "qlora with zero_stage 2: set zero_stage to 1 or less"),
        *(
            (qlora_recipe(), {"num_ranks": 2, axis: 2}, f"qlora with {axis} 2, .*: set {axis} to 1")
            for axis in launch_rules.MODEL_AXES
        ),
        (rl_recipe(adapter=QLORA), {}, "qlora cannot train grpo, .* not in 4 bits: set adapter.kind to lora"),
        (pair_recipe("dpo", adapter=QLORA), {}, "qlora cannot train dpo, .* not in 4 bits: set adapter.kind to lora"),
        (qlora_recipe(adapter=QLORA | {"dropout": 0.1}), {}, "adapter.dropout 0.1 with routed_experts"),
        (qlora_recipe(course=small_recipe().course), {}, "qlora with a router_bias_rate above 0"),
    ],
)
def test_what_has_no_code_is_refused_with_the_fix(recipe, resources, message):
    with pytest.raises(ValueError, match=message):
        launch_rules.refuse_impossible_training(recipe, RESOURCES.model_copy(update=resources))


@pytest.mark.parametrize(
    ("version", "found"), [("", "which is not installed"), ("0.49.0", r"bitsandbytes 0\.49\.0 is installed")]
)
def test_without_its_package_it_is_refused_with_the_command_that_installs_it(monkeypatch, version, found):
    monkeypatch.setattr(launch_rules, "distribution_version", lambda name: version)
    with pytest.raises(
        ValueError, match=rf"qlora needs bitsandbytes 0\.50\.2 .*, {found}: pip install 'glm46\[qlora\]'"
    ):
        launch_rules.refuse_impossible_training(qlora_recipe(), RESOURCES)
    launch_rules.refuse_impossible_training(qlora_recipe(adapter=LORA), RESOURCES)
    monkeypatch.undo()
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["qlora"]
    assert pinned == [f"bitsandbytes=={launch_rules.BITSANDBYTES}"]
    assert pinned[0] in (ROOT / "constraints.txt").read_text().splitlines()
