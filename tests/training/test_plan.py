"""The plan against brute force: steps walked one by one, parameters of built models, topologies on each side of every
rule."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys

import pytest
import torch

from configs.load import load_scale, scale_names
from configs.schema import AdapterRecipe, PpoObjective, TrainingRecipe, TrainingResources
from model.architecture.counts import count_parameters, count_trained, training_flops_per_token
from model.architecture.grouped_linear import grouped_linear
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import to_checkpoint_tensors
from tasks.training.plan.answer_batches import answer_cache_bytes, answers_at_once
from tasks.training.plan.compare_plans import compare_plans
from tasks.training.plan.launch_rules import unavailable_training
from tasks.training.plan.measured import MeasuredPhase
from tasks.training.plan.plan_training import plan_training
from tasks.training.plan.planned_needs import size
from tasks.training.plan.rank_memory import rank_memory
from tasks.training.plan.topology import data_parallel, impossible_topology
from tasks.training.plan.worlds import smaller_worlds
from tasks.training.schedule.phase_steps import summarize_steps
from tasks.training.schedule.schedules import learning_rate_at, plan_step, value_at
from tests.configs.test_phase_graph import CRITIC
from tests.conftest import ROOT
from tests.support.model_recipes import AIR, GLM46

FULL, PRETRAIN_355B = load_scale("full"), load_scale("recipes/glm45_355b_pretrain")


def recipe_of(scale, phase: int = 0) -> TrainingRecipe:
    return scale.training_recipe(scale.phases[phase])


def walked(recipe: TrainingRecipe) -> list:
    plans, tokens = [], 0
    while tokens < recipe.num_tokens:
        plans.append(plan_step(recipe, tokens))
        tokens = plans[-1].end_tokens - recipe.course_start_tokens
    return plans


def small(**changes) -> TrainingRecipe:
    """micro's first phase with another batch or budget."""
    recipe = recipe_of(load_scale("micro"))
    course = {name: changes.pop(name) for name in list(changes) if name in type(recipe.course).model_fields}
    return recipe.model_copy(update={**changes, "course": recipe.course.model_copy(update=course)})


@pytest.mark.parametrize(
    "recipe",
    [
        *(recipe_of(load_scale(name), phase) for name in ("micro", "tiny", "nightly") for phase in range(4)),
        small(
            num_tokens=128 * 100,
            course_num_tokens=128 * 100,
            start_batch_tokens=256,
            peak_batch_tokens=1280,
            batch_rampup_share=0.4,
        ),
        small(
            num_tokens=128 * 37,
            course_num_tokens=128 * 400,
            start_batch_tokens=256,
            peak_batch_tokens=1280,
            batch_rampup_share=1.0,
        ),
        small(
            num_tokens=128 * 101,
            course_start_tokens=128 * 20,
            course_num_tokens=128 * 200,
            start_batch_tokens=128,
            peak_batch_tokens=640,
            batch_rampup_share=0.2,
        ),
        small(num_tokens=128, start_batch_tokens=1280, peak_batch_tokens=1280, batch_rampup_share=0.0),
        small(num_tokens=128 * 10, start_batch_tokens=1280, peak_batch_tokens=1280, batch_rampup_share=0.0),
        recipe_of(FULL, 4),
    ],
)
def test_steps_are_those_of_the_walk(recipe):
    plans = walked(recipe)
    steps = summarize_steps(recipe)
    rows = [plan.num_rows for plan in plans]
    assert (steps.num_steps, steps.first_rows, steps.min_rows, steps.max_rows) == (
        len(plans),
        rows[0],
        min(rows),
        max(rows),
    )
    assert steps.first_end_tokens == plans[0].end_tokens and steps.common_rows == math.gcd(*rows)
    assert steps.smallest_at_tokens == plans[rows.index(min(rows))].start_tokens


def test_full_plans_the_reports_tokens_without_torch():
    code = (
        "import sys; from configs.load import load_scale; from tasks.training.plan.plan_training import plan_training;"
        "print(plan_training(load_scale('full')).describe()); assert not {'torch', 'prefect', 'mlflow'} & "
        "set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan = plan_training(FULL)
    assert len(plan.phases) == 12 and all(phase.name in done.stdout for phase in plan.phases)
    tokens = [phase.num_tokens for phase in plan.phases[:5]]
    assert tokens[:2] == [15 * 10**12, 7 * 10**12] and abs(sum(tokens) - 23.1e12) < 2e5
    assert (plan.phases[0].first_batch_tokens, plan.phases[0].max_batch_tokens) == (16 * 2**20, 64 * 2**20)
    assert plan.phases[4].last_learning_rate == pytest.approx(2.5e-5)
    parameters = plan.parameters
    assert (parameters.attention_per_layer, parameters.expert, parameters.moe_layer) == (
        136_329_472,
        23_592_960,
        3_935_625_632,
    )
    assert [round(n / 1e9, 3) for n in (parameters.body, parameters.body_and_mtp, parameters.total)] == [
        351.246,
        355.234,
        356.786,
    ]


def sampling_itself(recipe):
    """A policy's recipe whose ranks sample in place of a server."""
    return recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"rollouts": "in_process"})})


RECIPES = sorted(f"recipes/{path.stem}" for path in (ROOT / "configs" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", [*scale_names(), *RECIPES])
def test_there_is_code_for_every_shipped_configuration(name):
    scale = load_scale(name)
    for phase in scale.phases:
        assert not unavailable_training(scale.training_recipe(phase), phase.resources), phase.name


@pytest.mark.parametrize("name", scale_names())
def test_every_scale_can_be_trained_and_fits_its_ranks(name):
    plan = plan_training(load_scale(name))
    for phase in plan.phases:
        assert (phase.impossible, phase.warnings) == ((), ())
        assert phase.rank_memory.total <= phase.rank_memory.available
        seconds = phase.training_flops / (
            phase.num_ranks * load_scale(name).phases[0].resources.peak_flops_per_second * phase.mfu
        )
        assert phase.hours == pytest.approx(seconds / 3600)


POSSIBLE = {
    "num_ranks": 128,
    "tensor_parallel": 2,
    "pipeline_parallel": 4,
    "context_parallel": 1,
    "expert_parallel": 32,
    "zero_stage": 1,
}


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        (
            {"num_ranks": 129},
            {"num_ranks": 256},
            r"num_ranks \(129\) is no multiple of .* \(8\).* \(128\): set it to 128, a multiple of 128",
        ),
        (
            {"pipeline_parallel": 93, "num_ranks": 93 * 64},
            {"pipeline_parallel": 92, "num_ranks": 92 * 64},
            r"pipeline_parallel \(93\) exceeds num_hidden_layers \(92\)",
        ),
        (
            {"tensor_parallel": 64, "num_ranks": 2048},
            {"tensor_parallel": 8, "num_ranks": 2048},
            r"num_attention_heads \(96\) does not divide by tensor_parallel \(64\)",
        ),
        (
            {"tensor_parallel": 6, "num_ranks": 1536},
            {"tensor_parallel": 4},
            r"num_key_value_heads \(8\) does not divide by tensor_parallel \(6\)",
        ),
        (
            {"tensor_parallel": 16, "num_ranks": 2048},
            {"tensor_parallel": 8, "num_ranks": 2048},
            r"num_key_value_heads \(8\) does not divide by tensor_parallel \(16\): lower",
        ),
        (
            {"tensor_parallel": 3, "num_ranks": 384},
            {"tensor_parallel": 4},
            r"vocab_size \(151552\) does not divide by tensor_parallel \(3\).*sequence_length \(4096\) .* tensor x "
            r"context parallel \(3\)",
        ),
        (
            {"expert_parallel": 64, "num_ranks": 256},
            {"expert_parallel": 16},
            r"n_routed_experts \(160\) does not divide by expert_parallel \(64\)",
        ),
        (
            {"expert_parallel": 20},
            {"expert_parallel": 8},
            r"num_ranks \(128\) is no multiple of expert x pipeline parallel \(80\): set it to 80,",
        ),
        (
            {"zero_stage": 3},
            {"zero_stage": 3, "pipeline_parallel": 1, "recompute": "selective"},
            "zero_stage 3 with pipeline_parallel 4.*Set zero_stage 1",
        ),
        ({"zero_stage": 2}, {"zero_stage": 2, "pipeline_parallel": 1}, "zero_stage 2 with pipeline_parallel 4"),
        (
            {"zero_stage": 3, "pipeline_parallel": 1, "recompute": "full", "recompute_every_layers": 2},
            {"zero_stage": 3, "pipeline_parallel": 1, "recompute": "full", "recompute_every_layers": 1},
            "zero_stage 3 with recompute full and recompute_every_layers 2",
        ),
        (
            {"offload_optimizer": "cpu", "zero_stage": 0},
            {"offload_optimizer": "cpu"},
            "offload_optimizer cpu needs zero_stage >= 1",
        ),
        ({"offload_optimizer": "nvme"}, {"offload_optimizer": "cpu"}, "offloading to nvme: .* Set cpu"),
        ({"offload_parameters": "cpu"}, {}, "offload_parameters cpu needs zero_stage 3, it is 1"),
        (
            {"num_ranks": 8 * 4096, "tensor_parallel": 1},
            {"num_ranks": 8 * 2048, "pipeline_parallel": 4},
            "8192 data-parallel copies .* it has 2048 sequences",
        ),
        (
            {"context_parallel": 3, "num_ranks": 96 * 4},
            {"context_parallel": 4},
            r"num_key_value_heads / tensor_parallel \(4\) can neither .* on 3 context.*sequence_length \(4096\) does "
            r"not .* parallel \(6\)",
        ),
        (
            {"context_parallel": 32, "num_ranks": 1024},
            {"context_parallel": 16, "num_ranks": 1024},
            r"num_attention_heads / tensor_parallel \(48\) does not divide by context_parallel \(32\)",
        ),
    ],
)
def test_a_topology_that_no_engine_trains_is_explained(wrong, right, message):
    recipe, resources = recipe_of(PRETRAIN_355B), PRETRAIN_355B.phases[0].resources.model_copy(update=POSSIBLE)
    assert impossible_topology(recipe, resources) == []
    assert re.search(message, "; ".join(impossible_topology(recipe, resources.model_copy(update=wrong))))
    assert impossible_topology(recipe, resources.model_copy(update=right)) == []


@pytest.mark.parametrize(
    "wrong", [{"num_ranks": 30}, {"num_ranks": 300, "expert_parallel": 20}, {"ranks_per_node": 12}, {"num_ranks": 1}]
)
def test_the_number_of_ranks_that_a_refusal_names_is_right_at_once(wrong):
    recipe, resources = recipe_of(PRETRAIN_355B), PRETRAIN_355B.phases[0].resources.model_copy(update=POSSIBLE | wrong)
    (reason,) = impossible_topology(recipe, resources)
    named = re.search(r"num_ranks \(\d+\) .* set it to (\d+), a multiple of \d+$", reason)
    assert named is not None, reason
    assert impossible_topology(recipe, resources.model_copy(update={"num_ranks": int(named[1])})) == []


def test_smaller_worlds_are_those_that_the_rules_and_the_memory_allow():
    recipe = recipe_of(PRETRAIN_355B)
    full = PRETRAIN_355B.phases[0].resources.model_copy(
        update=POSSIBLE
        | {"launcher": "slurm", "num_ranks": 384, "ranks_per_node": 8, "device_memory_bytes": 1_000_000_000_000}
    )

    def missing(number: int, **changes) -> TrainingResources:
        queue = full.queue.model_copy(update={"max_missing_nodes": number})
        return full.model_copy(update={"queue": queue, **changes})

    for number, worlds in ((0, []), (15, []), (16, [256]), (47, [256, 128])):
        found = smaller_worlds(recipe, missing(number))
        assert [world.num_ranks for world in found] == worlds
        assert all(impossible_topology(recipe, world) == [] for world in found)
        reasons = "; ".join(unavailable_training(recipe, missing(number)))
        assert ("queue.max_missing_nodes 15: no smaller world can be trained" in reasons) == (number == 15)
    at_256 = rank_memory(recipe, full.model_copy(update={"num_ranks": 256})).device
    fits = missing(47, device_memory_bytes=at_256)
    assert [world.num_ranks for world in smaller_worlds(recipe, fits)] == [256]
    assert smaller_worlds(recipe, missing(47, device_memory_bytes=at_256 - 1)) == []
    assert smaller_worlds(recipe, missing(47, launcher="local")) == []


def test_groups_of_answers_are_not_divided():
    scale = load_scale("recipes/glm45_355b_gspo")
    recipe, resources = recipe_of(scale), scale.phases[0].resources
    assert impossible_topology(recipe, resources) == []
    odd = recipe.model_copy(update={"num_tokens": recipe.num_tokens - recipe.sequence_length})
    (reason,) = impossible_topology(odd, resources)
    assert re.match(r"a step of 511 to 512 answers does not divide into groups of samples_per_prompt \(8\)", reason)
    length = recipe.sequence_length
    growth = {"start_batch_tokens": 128 * length, "batch_rampup_share": 0.5}
    for peak, num_rows in ((512 * length, 5121), (512 * length + 1, 5000)):
        course = recipe.course.model_copy(update=growth | {"peak_batch_tokens": peak})
        tokens = {"num_tokens": num_rows * length, "course_num_tokens": num_rows * length}
        growing = recipe.model_copy(update=tokens | {"course": course, "course_start_tokens": 0})
        rows = [plan.num_rows for plan in walked(growing)]
        assert (rows[0], min(rows), max(rows)) == (128, 128, 512), "those divide: only others do not"
        (reason,) = impossible_topology(growing, resources)
        assert "a step of 128 to 512 answers does not divide into groups of samples_per_prompt (8)" in reason


def test_the_source_documents_topology_is_refused_for_each_of_its_reasons():
    """S0: TP 8, PP 16, EP 32, DP 2 as four axes of 8,192 GPUs, ZeRO 3."""
    resources = FULL.phases[0].resources.model_copy(
        update={"pipeline_parallel": 16, "zero_stage": 3, "recompute": "selective"}
    )
    phases = (FULL.phases[0].model_copy(update={"resources": resources}), *FULL.phases[1:])
    plan = plan_training(FULL.model_copy(update={"phases": phases}))
    assert len(plan.phases[0].impossible) == 1 and data_parallel(resources) == 128
    described = plan.describe()
    assert "zero_stage 3 with pipeline_parallel 16" in described
    # 92 layers on 16 stages, which public recipes of stages of one depth fail on, are no reason.
    assert plan.phases[0].stage_layers == "5 + 14 x 6 + 3" and "5 + 14 x 6 + 3" in described


@pytest.mark.parametrize("model", [GLM46, AIR], ids=["glm46", "air"])
@pytest.mark.parametrize("kind", ["lora", "dora", "qlora"])
def test_adapter_counts_equal_a_sum_over_the_matrices_of_a_built_model(model, kind):
    with torch.device("meta"):
        tensors = to_checkpoint_tensors(Glm4Moe(model).state_dict())
    trunk = re.compile(r"model\.layers\.(\d+)\.(self_attn|mlp)\..*proj\.weight")
    expected = 0
    for name, tensor in tensors.items():
        match = trunk.fullmatch(name)
        if match and int(match[1]) < model.num_hidden_layers:
            outputs, inputs = tensor.shape
            expected += 4 * (inputs + outputs) + (outputs if kind == "dora" else 0)
    targets = ("attention", "dense_mlp", "shared_experts", "routed_experts")
    adapter = AdapterRecipe(kind=kind, rank=4, alpha=8.0, dropout=0.0, targets=targets)
    assert count_trained(model, adapter).total(model) == expected
    everything = adapter.model_copy(update={"kind": "none"})
    assert count_trained(model, everything).total(model) == count_parameters(model).total


@pytest.mark.parametrize("rank", [4, 8, 12, 16])
def test_ranks_of_experts_that_torchs_grouped_product_refuses_are_refused_before(rank):
    """On the meta device it makes the checks of a GPU's."""
    scale = load_scale("air_lora")
    phase = scale.phases[0]
    adapter = {"kind": "lora", "rank": rank, "alpha": 8.0, "dropout": 0.0, "targets": ("attention", "routed_experts")}
    recipe = scale.training_recipe(phase).model_copy(update={"adapter": AdapterRecipe(**adapter), "dtype": "bfloat16"})
    with torch.device("meta"):
        rows_RI, counts_E = torch.empty(32, 64, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int32)
        halves = [torch.empty(4, *shape, dtype=torch.bfloat16) for shape in ((rank, 64), (64, rank))]
    try:
        assert grouped_linear(grouped_linear(rows_RI, halves[0], counts_E), halves[1], counts_E).shape == (32, 64)
        is_taken = True
    except RuntimeError as error:
        assert "multiple of 16 bytes" in str(error)
        is_taken = False
    on_gpu, on_cpu = (phase.resources.model_copy(update={"device": device}) for device in ("cuda", "cpu"))
    named = f"adapter.rank {rank} on routed experts"
    assert (named in "; ".join(unavailable_training(recipe, on_gpu))) is not is_taken
    assert named not in "; ".join(unavailable_training(recipe, on_cpu))
    beside = recipe.model_copy(update={"adapter": AdapterRecipe(**{**adapter, "targets": ("attention",)})})
    assert named not in "; ".join(unavailable_training(beside, on_gpu))


def test_memory_of_one_rank_is_the_whole_model_and_of_many_its_part():
    scale = load_scale("recipes/glm4_15b_a3b")
    recipe = recipe_of(scale)
    with torch.device("meta"):
        model = Glm4Moe(recipe.model)
    total = sum(parameter.numel() for parameter in model.parameters())
    # Under Muon these have two moments; router biases are float32 and not trained.
    adam_updated = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or "embed_tokens" in name
    )
    biases = sum(buffer.numel() for buffer in model.buffers())
    alone = scale.phases[0].resources.model_copy(
        update={"num_ranks": 1, "pipeline_parallel": 1, "expert_parallel": 1, "zero_stage": 0}
    )
    memory = rank_memory(recipe, alone)
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        2 * total + 4 * biases,
        4 * total,
        8 * total + 4 * adam_updated,
    )
    adam = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"kind": "adamw"})})
    assert rank_memory(adam, alone).optimizer == 12 * total
    eight = alone.model_copy(update={"num_ranks": 8, "zero_stage": 3})
    divided = rank_memory(recipe, eight)
    assert 8 * (divided.weights - 4 * biases) == pytest.approx(2 * total, abs=64)
    assert 8 * divided.gradients == pytest.approx(4 * total, abs=64)
    assert rank_memory(recipe, eight.model_copy(update={"zero_stage": 1})).gradients == 4 * total
    offloaded = rank_memory(recipe, eight.model_copy(update={"offload_optimizer": "cpu"}))
    assert (
        offloaded.optimizer == 0 and offloaded.host_optimizer == divided.optimizer and offloaded.device < divided.device
    )
    in_fp32 = rank_memory(recipe.model_copy(update={"dtype": "float32"}), alone)
    assert (in_fp32.weights, in_fp32.optimizer) == (4 * total + 4 * biases, 4 * total + 4 * adam_updated)


def test_a_pass_over_pairs_holds_both_rows():
    """A pass over pairs has two rows where one or three are configured."""
    phase = next(phase for phase in FULL.phases if phase.recipe.objective.kind == "reward")
    recipe = FULL.training_recipe(phase)
    of_rows = {
        rows: rank_memory(recipe, phase.resources.model_copy(update={"micro_batch_sequences": rows}))
        for rows in (1, 2, 3, 4)
    }
    assert of_rows[1] == of_rows[2] == of_rows[3] and of_rows[4].activations > 1.9 * of_rows[1].activations


def test_recomputation_shrinks_activations_and_more_stages_divide_the_weights():
    recipe, resources = recipe_of(PRETRAIN_355B), PRETRAIN_355B.phases[0].resources
    kept = [
        rank_memory(recipe, resources.model_copy(update={"recompute": name})).activations
        for name in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2]
    wide = resources.model_copy(update={"pipeline_parallel": 2, "expert_parallel": 16})
    assert (
        rank_memory(recipe, wide).weights
        > 1.8 * rank_memory(recipe, resources.model_copy(update={"expert_parallel": 16})).weights
    )


def test_what_does_not_fit_is_a_warning_with_both_sizes():
    scale = load_scale("recipes/glm45_air_sft")
    resources = scale.phases[0].resources.model_copy(update={"offload_optimizer": "none"})
    plan = plan_training(
        scale.model_copy(update={"phases": (scale.phases[0].model_copy(update={"resources": resources}),)})
    )
    (warning,) = plan.phases[0].warnings
    assert re.match(r"the fullest rank needs 9\d\.\d GB of 80\.0 GB", warning)


def test_frozen_weights_cost_two_thirds_and_kv_cache_is_planned_only_for_answers():
    lora = plan_training(load_scale("recipes/glm45_air_lora")).phases[0]
    full = plan_training(load_scale("recipes/glm45_air_sft")).phases[0]
    assert (lora.trains_mtp, full.trains_mtp) == (False, True) and lora.num_tokens == full.num_tokens
    model = load_scale("recipes/glm45_air_sft").model.recipe
    for phase, frozen in ((lora, True), (full, False)):
        per_token = training_flops_per_token(model, phase.attended_tokens, frozen, trains_mtp=phase.trains_mtp)
        assert phase.training_flops == per_token * phase.num_tokens
    assert 0.66 < training_flops_per_token(model, 1000, True) / training_flops_per_token(model, 1000) < 0.7
    sampling, served = (
        plan_training(load_scale(name)).phases[-1] for name in ("scaled_down", "recipes/glm45_air_grpo")
    )
    assert lora.rank_memory.kv_cache == served.rank_memory.kv_cache == 0 < sampling.rank_memory.kv_cache


def test_a_policys_adapter_copies_no_frozen_weights_for_sampling_nor_for_a_reference():
    scale = load_scale("recipes/glm45_air_grpo_lora")
    recipe = sampling_itself(recipe_of(scale))
    resources = scale.phases[0].resources.model_copy(update={"num_ranks": 1, "pipeline_parallel": 1})
    resources = resources.model_copy(update={"expert_parallel": 1})
    whole = recipe.model_copy(update={"adapter": recipe.adapter.model_copy(update={"kind": "none"})})
    ppo = PpoObjective.model_validate(recipe.objective.model_dump() | CRITIC | {"kind": "ppo"})
    trained = count_trained(recipe.model, recipe.adapter).total(recipe.model)
    own, full = (rank_memory(each, resources) for each in (recipe, whole))
    assert own.sampling_weights == 2 * trained and own.weights == full.weights
    assert full.sampling_weights > 30 * own.sampling_weights
    beside, beside_full = (
        rank_memory(each.model_copy(update={"objective": ppo}), resources) for each in (recipe, whole)
    )
    critic, reference = beside.weights - own.weights, full.weights
    assert beside_full.weights - full.weights == critic + reference
    assert beside.optimizer - own.optimizer == beside_full.optimizer - full.optimizer > own.optimizer


def test_attention_is_counted_inside_documents_where_rows_hold_whole_ones():
    for phase, section in zip(plan_training(FULL).phases, FULL.phases, strict=True):
        recipe, assumed = section.recipe, section.resources.assumed_document_tokens
        whole = recipe.packing == "best_fit" and not recipe.samples_answers
        assert phase.attended_tokens == (min(assumed, recipe.sequence_length) if whole else recipe.sequence_length), (
            phase.name
        )
    sft, described = plan_training(FULL).phases[5], plan_training(FULL).describe()
    over_rows = training_flops_per_token(FULL.model.recipe, sft.sequence_length) * sft.num_tokens
    assert over_rows / sft.training_flops == pytest.approx(4.76, abs=0.01), (
        "documents of 4,000 tokens in rows of 131,072"
    )
    assert "131,072   4,000" in described and "assumed_document_tokens" in described


@pytest.mark.parametrize("name", ["tiny", "nightly", "air_lora"])
def test_the_plan_shows_the_first_the_highest_and_the_last_learning_rate(name):
    scale = load_scale(name)
    for phase, section in zip(plan_training(scale).phases, scale.phases, strict=True):
        recipe = scale.training_recipe(section)
        rates = [learning_rate_at(recipe.course, recipe.course_num_tokens, step.end_tokens) for step in walked(recipe)]
        assert (phase.first_learning_rate, phase.last_learning_rate) == (rates[0], rates[-1])
        assert max(rates) <= phase.peak_learning_rate < 1.01 * max(rates)
    assert "2e-06 .. 0.0001 .. 0 " in plan_training(load_scale("air_lora")).describe()


def test_a_phase_whose_mtp_loss_weighs_nothing_does_not_count_it():
    scale = load_scale("tiny")
    recipe, resources = recipe_of(scale), scale.phases[0].resources
    resting = recipe.model_copy(
        update={
            "course": recipe.course.model_copy(update={"mtp_loss_weight": recipe_of(scale, 6).course.mtp_loss_weight})
        }
    )
    mtp = count_parameters(recipe.model).mtp_layers
    with_mtp, without = rank_memory(recipe, resources), rank_memory(resting, resources)
    biases = recipe.model.n_routed_experts
    assert without.weights == with_mtp.weights and with_mtp.gradients - without.gradients == 4 * (mtp - biases)
    assert without.activations < with_mtp.activations and without.optimizer < with_mtp.optimizer
    # The partitions of ZeRO hold what does not run as well.
    divided = resources.model_copy(update={"zero_stage": 1, "num_ranks": 2})
    assert rank_memory(resting, divided).gradients == rank_memory(recipe, divided).gradients


def test_every_reason_is_given_and_memory_on_the_host_is_shown():
    scale = load_scale("recipes/glm45_355b_gspo")
    (phase,) = scale.phases
    resources = phase.resources.model_copy(update={"rollout_server": ""})
    phase = phase.model_copy(update={"recipe": sampling_itself(phase.recipe), "resources": resources})
    plan = plan_training(scale.model_copy(update={"phases": (phase,)}))
    described = plan.describe()
    reasons = ("tensor_parallel 8", "pipeline_parallel 4", "context_parallel 2", "expert_parallel 16")
    assert len(plan.phases[0].not_available) == len(reasons) and all(
        f"does not run yet, {reason}" in described for reason in reasons
    )
    memory = plan.phases[0].rank_memory
    assert memory.optimizer == 0 < memory.host_optimizer and f"{memory.host_optimizer / 1e9:,.1f} GB" in described


def test_answers_take_no_more_than_their_budget():
    """A step of scaled_down's policy phase has 512 answers of 8,192 positions: 200 GB of keys and values, of these one
    batch is held."""
    scale = load_scale("scaled_down")
    recipe = scale.training_recipe(scale.phases[-1])
    alone = scale.phases[-1].resources.model_copy(
        update={"num_ranks": 1, "tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1, "zero_stage": 0}
    )
    assert 512 * answer_cache_bytes(recipe, alone) > 200e9
    held = rank_memory(recipe, alone).kv_cache
    assert 0.9 * alone.rollout_cache_bytes < held <= alone.rollout_cache_bytes
    assert answers_at_once(recipe, alone, 512) == held // answer_cache_bytes(recipe, alone)
    assert (
        answers_at_once(recipe, alone, 4) == 4
        and answers_at_once(recipe, alone.model_copy(update={"rollout_cache_bytes": 1}), 4) == 1
    )


PUBLISHED = {
    # S4, "Parallelism Configurations": TP, PP, EP, GPUs; context parallel is not named.
    "glm45_355b_pretrain": (2, 8, 1, 16, 256),
    "glm45_355b_sft": (2, 8, 1, 16, 256),
    "glm45_355b_lora": (2, 4, 1, 4, 32),
    "glm45_355b_dora": (2, 4, 1, 4, 32),
    "glm45_air_pretrain": (1, 4, 1, 8, 32),
    "glm45_air_sft": (1, 4, 1, 8, 32),
    "glm45_air_lora": (1, 2, 1, 4, 8),
    "glm45_air_dora": (1, 2, 1, 4, 8),
    # S3, 5.1: TP, PP, CP, EP, GPUs.
    "glm45_355b_grpo": (4, 8, 2, 8, 64),
    "glm45_355b_gspo": (8, 4, 2, 16, 64),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_topologies(name):
    resources = load_scale(f"recipes/{name}").phases[0].resources
    axes = (
        resources.tensor_parallel,
        resources.pipeline_parallel,
        resources.context_parallel,
        resources.expert_parallel,
    )
    assert (*axes, resources.num_ranks) == PUBLISHED[name]


def test_the_plan_says_who_evaluates_and_what_one_device_must_hold():
    full, tiny = plan_training(FULL), plan_training(load_scale("tiny")).evaluation
    weights = f"{size(4 * count_parameters(load_scale('tiny').model.recipe).total)} of weights in float32"
    assert tiny == f"has one whole model on one device (cpu; {weights}) after each phase"
    assert full.release.startswith("is compared with one whole model on one device (cpu; 1.4 TB of weights in float32)")
    asked = "is asked of http://rollouts:30000 by sglang after each phase; no device here holds it all"
    assert full.evaluation == asked and f"  evaluation   {full.evaluation}" in full.describe()


def test_the_plan_says_what_changes_in_which_phase():
    """The sentences against the schedules, read at every step's start of a walk."""
    for name in ("tiny", "nightly"):
        scale = load_scale(name)
        plan = plan_training(scale)
        for number, (phase, section) in enumerate(zip(plan.phases, scale.phases, strict=True)):
            recipe = scale.training_recipe(section)
            start = scale.start_of(section)
            before = recipe.rope_theta if start is None else start.recipe.rope_theta
            assert phase.schedule.startswith(f"starts from {phase.start}; " if number else "tokens 0 ..")
            assert (" -> " in phase.schedule.split("RoPE base ")[1].split(";")[0]) == (before != recipe.rope_theta)
            for label, waypoints in (
                ("router bias rate", recipe.course.router_bias_rate),
                ("MTP weight", recipe.course.mtp_loss_weight),
            ):
                values = [value_at(waypoints, recipe.course_num_tokens, step.start_tokens) for step in walked(recipe)]
                stated = phase.schedule.split(f"{label} ")[1].split(";")[0]
                assert [float(part.split(" ")[0]) for part in stated.split(", then ")] == list(dict.fromkeys(values))
            batches = [step.num_rows * recipe.sequence_length for step in walked(recipe)][:-1]
            assert ("batch grows" in phase.schedule) == (len({batch // 1024 for batch in batches}) > 1)
            assert phase.schedule in plan.describe()


def test_a_plan_says_that_its_hours_leave_out_what_samples_answers():
    """Only a run measures sampling; no plan counts the GPUs of a server."""
    sampling, before = (f"hours and cost leave out {what}" for what in ("the sampling of answers", "the answers that"))
    tiny = load_scale("tiny")
    policy = MeasuredPhase("a" * 64, recipe_of(tiny, -1).model_dump(mode="json"), 1, 1000, 2.0, 250, 256, 1, 1.0)
    measured = plan_training(tiny, measured=[policy]).phases[-1]
    assert measured.known_by.startswith("run") and measured.not_counted == ()
    assert plan_training(tiny).phases[-1].not_counted == (sampling,)
    full = plan_training(FULL)
    for phase, section in zip(full.phases, FULL.phases, strict=True):
        said, recipe = " ".join(phase.not_counted), section.recipe
        assert (sampling in said, before in said) == (recipe.samples_answers, recipe.asks_models), phase.name
        assert ("server that samples answers (http://rollouts:30000)" in said) == bool(said)
    assert f"  rl_reasoning, rl_agentic, rl_alignment: {sampling}" in full.describe().splitlines()
    assert compare_plans([full]).scales[0].without_sampling == 4


def test_a_measurement_tells_hours_and_memory_of_its_kind_of_phase_and_of_no_other():
    tiny = load_scale("tiny")
    own = MeasuredPhase(
        "a" * 64, recipe_of(tiny).model_dump(mode="json"), 1, 1000, 2.0, 250, 256, 10**9, committed_at=1.0
    )
    code = recipe_of(tiny, 1).model_dump(mode="json")
    newer = MeasuredPhase("b" * 64, code, 1, 1000, 4.0, 500, 256, 2 * 10**9, committed_at=2.0)
    first, second, longer, *_, policy = plan_training(tiny, measured=[own, newer]).phases
    assert (first.known_by, first.measured_memory) == (f"run {'a' * 12}", 10**9), "of the phase itself, though older"
    assert first.hours * 3600 == pytest.approx(2.0 * first.num_tokens / 1000)
    assert second.hours * 3600 == pytest.approx(4.0 * second.num_tokens / 1000)
    assert plan_training(tiny, measured=[own]).phases[1].known_by == first.known_by, "of the same kind"
    full = plan_training(tiny, measured=[dataclasses.replace(own, num_positions=1000)]).phases[0]
    assert full.mfu == pytest.approx(4 * first.mfu), "padding is no work"
    assert full.hours == first.hours, "but takes its time"
    for other in (longer, policy):
        assert (other.known_by, other.measured_memory, other.mfu) == ("assumed", 0, 0.12)
    two_ranks = dataclasses.replace(own, num_ranks=2)
    assert plan_training(tiny, measured=[two_ranks]).phases[0].known_by == "assumed"
    assert {phase.known_by for phase in plan_training(FULL, measured=[own]).phases if not phase.impossible} == {
        "derived"
    }
