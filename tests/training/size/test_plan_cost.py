"""What a plan says beside memory and time: cost, losses, sizes, the smallest world, and scales side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from configs.load import load_prices, load_scale
from configs.schema import Scale
from flows.cli.command import app
from model.architecture.transformer import Glm4Moe
from tasks.training.plan.choose_setting import choose_setting
from tasks.training.plan.compare_plans import compare_plans
from tasks.training.plan.machine import (
    H100,
    H800,
    HOST_COPY_BYTES_PER_SECOND,
    HOURS_TO_FAILURE,
    MEMORY_USED,
    RESTART_SECONDS,
)
from tasks.training.plan.phase_needs import smallest_world
from tasks.training.plan.plan_training import plan_training
from tasks.training.plan.save_interval import save_interval
from tasks.training.plan.search import least_memory
from tests.conftest import ROOT

SCALED = load_scale("scaled_down")


def glm46(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_cost_follows_from_hours_and_prices():
    prices = load_prices("guide")
    plan = plan_training(SCALED, prices=prices)
    hours = sum(phase.num_ranks * (phase.hours + phase.needs.lost_hours) for phase in plan.phases)
    assert plan.cost.rank_hours == pytest.approx(hours)
    assert plan.cost.ranks == pytest.approx(hours * prices.rank_hour["h100"])
    assert (plan.cost.data, plan.cost.personnel) == (10_000, 50_000), "S1's values"
    assert plan.cost.kilowatt_hours == pytest.approx(hours * prices.rank_watts["h100"] / 1000)
    dearer = prices.model_copy(update={"rank_hour": {"h100": 6.0}, "data": {}})
    assert plan_training(SCALED, prices=dearer).cost.total == pytest.approx(2 * plan.cost.ranks + 50_000)
    with pytest.raises(ValueError, match=r"no rank_hour.h800, they have h100: add it"):
        plan_training(SCALED, H800, prices=dearer)


def test_losses_follow_from_failures_and_saves_and_are_none_on_cpus():
    phase = plan_training(load_scale("full"), H800).phases[0]
    needs, interval = phase.needs, load_scale("full").phases[0].resources.save_interval_steps
    assert needs.num_failures == pytest.approx(8192 * (phase.hours + needs.save_hours) / HOURS_TO_FAILURE)
    lost_steps = interval * phase.hours * 3600 / phase.num_steps / 2
    assert needs.failure_hours == pytest.approx(needs.num_failures * (RESTART_SECONDS + lost_steps) / 3600)
    assert needs.state_bytes == pytest.approx(2857e9, rel=0.001), "as docs/scale.md has it"
    tiny = plan_training(load_scale("tiny"))
    assert all(each.needs.lost_hours == 0 and not each.needs.sent_bytes_per_second for each in tiny.phases)
    assert tiny.phases[0].needs.data_bytes == 2 * tiny.phases[0].num_tokens and tiny.cost.total == 0


def test_the_best_save_interval_loses_least():
    resources = load_scale("full").phases[0].resources.model_copy(update={"save_interval_steps": 500})
    found = save_interval(2857 * 10**9, resources, 13.2, num_steps=230_000)
    several = [
        save_interval(2857 * 10**9, resources.model_copy(update={"save_interval_steps": steps}), 13.2, 230_000)
        for steps in range(1, 40)
    ]
    least = min(several, key=lambda each: each.lost)
    assert found.best_steps == least.steps and found.least_lost == least.lost
    copies = 2857e9 / 8192 / HOST_COPY_BYTES_PER_SECOND / (500 * 13.2)
    repeated = 500 * 13.2 / 2 / (HOURS_TO_FAILURE * 3600 / 8192)
    assert found.lost == pytest.approx(copies + repeated) and not found.is_near_enough
    assert several[found.best_steps].is_near_enough, "the loss is flat there"


def test_the_best_save_interval_is_a_step_at_least_and_the_phase_at_most():
    resources = load_scale("full").phases[6].resources
    assert save_interval(4224 * 10**9, resources, 10.0, num_steps=30).best_steps == 30
    assert save_interval(4224 * 10**9, resources, 1e6, num_steps=30).best_steps == 1


def on_accelerators() -> list[str]:
    named = [
        "full",
        "scaled_down",
        "air_lora",
        *(f"recipes/{path.stem}" for path in (ROOT / "configs/recipes").glob("*")),
    ]
    return sorted(name for name in named if load_scale(name).phases[0].resources.device == "cuda")


@pytest.mark.parametrize("name", on_accelerators())
def test_no_configuration_saves_too_seldom_or_too_often(name: str):
    assert [
        each for phase in plan_training(load_scale(name)).phases for each in phase.warnings if "a save" in each
    ] == []


def test_a_save_interval_that_loses_much_is_said_and_another_is_chosen(tmp_path: Path):
    said = glm46("config", "full", "--set", "phases.mid_long_context.resources.save_interval_steps=500")
    scale = tmp_path / "seldom.yaml"
    scale.write_text(said.output)
    lines = glm46("plan", str(scale)).output.splitlines()
    (line,) = [line for line in lines if "a save every" in line]
    assert re.search(r"mid_long_context: a save every 500 steps \(\d+\.\d minutes\) loses 6\d\.\d% of the time", line)
    option = "phases.mid_long_context.resources.save_interval_steps"
    assert re.search(rf"0\.3%, and writes 5\d\.\d GB/s: --set {option}=1$", line)
    loaded = load_scale(str(scale))
    phase = loaded.phases[4]
    choice, _ = choose_setting(
        phase.name, loaded.training_recipe(phase), phase.resources, 64_000, H100, load_prices("guide")
    )
    assert choice is not None and f"{option}=1" in choice.settings


def test_the_smallest_world_holds_the_phase_and_half_of_it_does_not():
    phase = SCALED.phases[0]
    recipe, resources = SCALED.training_recipe(phase), phase.resources
    smallest = smallest_world(recipe, resources)
    most = MEMORY_USED * resources.device_memory_bytes
    worlds = [
        resources.model_copy(update={"num_ranks": size, "ranks_per_node": size}) for size in (smallest, smallest // 2)
    ]
    assert least_memory(recipe, worlds[0]) <= most < least_memory(recipe, worlds[1])
    assert smallest_world(recipe, resources.model_copy(update={"device_memory_bytes": 10**6})) == 0


FEWEST = [
    line.strip("| \n").split(" | ")
    for line in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").split("## The fewest GPUs")[1].splitlines()
    if line.startswith("| `glm45_")
]


def test_the_table_of_the_fewest_gpus_has_all_recipes_of_s4():
    kinds = [f"`glm45_{size}_{kind}`" for size in ("355b", "air") for kind in ("pretrain", "sft", "lora", "dora")]
    assert [row[0] for row in FEWEST] == kinds


@pytest.mark.parametrize(("recipe", "configured", "fewest"), FEWEST, ids=[row[0].strip("`") for row in FEWEST])
def test_the_fewest_gpus_of_s4s_recipes_are_those_of_the_docs(recipe, configured, fewest):
    scale = load_scale(f"recipes/{recipe.strip('`')}")
    phase = scale.phases[0]
    number, _, offloaded = fewest.partition(", ")
    assert phase.resources.num_ranks == int(configured)
    assert smallest_world(scale.training_recipe(phase), phase.resources) == int(number)
    assert (phase.resources.offload_optimizer == "cpu") == (offloaded == "the optimizer on the host")


def with_reward_model_last(optimizer: str = "muon") -> Scale:
    """micro with its phases in another order: a reward model is a branch, which may be the last of the list."""
    scale = load_scale("micro")
    phases = []
    for phase in sorted(scale.phases, key=lambda each: not each.recipe.trains_language_model):
        changed = phase.recipe.optimizer.model_copy(update={"kind": optimizer})
        recipe = phase.recipe.model_copy(update={"optimizer": changed})
        phases.append(phase.model_copy(update={"recipe": recipe}))
    return scale.model_copy(update={"phases": tuple(phases)})


@pytest.mark.parametrize(("optimizer", "moment_bytes"), [("adamw", 12), ("muon", 8)])
def test_a_reward_models_state_and_weights_are_those_of_its_tensors(optimizer, moment_bytes):
    scale = with_reward_model_last(optimizer)
    recipe = scale.training_recipe(scale.phases[-1])
    assert recipe.is_scored
    with torch.device("meta"):
        tensors = Glm4Moe(recipe.model, is_scored=True).state_dict()
    total = sum(tensor.numel() for tensor in tensors.values())
    embedding = tensors["model.embed_tokens.weight"].numel()
    needs = plan_training(scale).phases[-1].needs
    assert needs.state_bytes == moment_bytes * total + (4 * embedding if optimizer == "muon" else 0)
    assert needs.weights_bytes == 4 * total


def test_the_state_of_a_ppo_phase_is_that_of_two_models_one_of_which_has_a_scalar_head():
    scale = load_scale("recipes/micro_alignment")
    recipe = scale.training_recipe(scale.phases[-1])
    assert recipe.optimizer.kind == "muon"
    expected = 0
    with torch.device("meta"):
        for model in (Glm4Moe(recipe.model), Glm4Moe(recipe.critic_recipe.model, is_scored=True)):
            embedding = model.model.embed_tokens.weight.numel()
            expected += 8 * sum(tensor.numel() for tensor in model.state_dict().values()) + 4 * embedding
    assert plan_training(scale).phases[-1].needs.state_bytes == expected


def test_weights_side_by_side_are_those_of_the_language_model():
    plan = plan_training(with_reward_model_last())
    compared = compare_plans([plan])
    language = [phase for phase in plan.phases if phase.objective != "reward"]
    assert plan.phases[-1].objective == "reward"
    assert compared.scales[0].weights_bytes == language[-1].needs.weights_bytes > plan.phases[-1].needs.weights_bytes


def test_scales_side_by_side_end_with_the_official_weights():
    plans = [plan_training(load_scale(name)) for name in ("scaled_down", "recipes/glm45_355b_sft")]
    compared = compare_plans(plans)
    assert [each.name for each in compared.scales] == ["scaled_down", "glm45_355b_sft", "official weights"]
    assert compared.scales[0].total == plans[0].cost.total
    assert (compared.scales[2].total, compared.scales[2].weights_bytes) == (0, compared.scales[1].weights_bytes)
    done = glm46("plan", "--compare", "tiny", "micro", "--json")
    assert done.exit_code == 0
    unpublished = json.loads(done.stdout)
    assert ([each["name"] for each in unpublished["scales"]], unpublished["servers"]) == (["tiny", "micro"], [])
    shown = glm46("plan", "--compare", "tiny", "micro").stdout
    assert "no official weights: none of these models is published" in shown and "GLM-4" not in shown
    for refused in (glm46("plan", "tiny", "micro"), glm46("plan")):
        assert refused.exit_code == 2 and "scales: give one, as glm46 plan tiny, or --compare" in refused.stderr


@pytest.mark.parametrize(
    ("scale", "model"), [("full", "GLM-4.5 and GLM-4.6"), ("recipes/glm45_air_sft", "GLM-4.5-Air")]
)
def test_official_weights_are_named_and_are_those_of_a_published_model(scale, model):
    plans = [plan_training(load_scale(name)) for name in ("scaled_down", scale)]
    larger = plans[1].parameters.model_copy(update={"total": plans[1].parameters.total + 1})
    plans.append(plans[1].model_copy(update={"parameters": larger}))
    compared = compare_plans(plans)
    assert compared.official == model and f"official weights: {model}, public" in compared.describe()
    assert compared.scales[-1].parameters == plans[1].parameters.total, "the largest has no published weights"


def test_compare_without_names_takes_the_large_scales_and_counts_what_serves_the_official_weights():
    done = glm46("plan", "--compare", "--json")
    assert done.exit_code == 0, done.stderr
    compared = json.loads(done.stdout)
    assert [each["name"] for each in compared["scales"]] == [
        *("full", "scaled_down", "glm45_355b_sft", "official weights")
    ]
    whole, half = compared["servers"]
    assert (whole["stored_format"], whole["num_gpus"]) == ("bfloat16", 16)
    assert (half["stored_format"], half["num_gpus"]) == ("FP8_BLOCK", 8)
    official = compared["scales"][-1]
    for server in compared["servers"]:
        model = official["weights_bytes"] / 1e9 / (1 if server is whole else 2) / server["num_gpus"]
        assert model < server["gigabytes"] < 80
        assert server["cost_per_hour"] == server["num_gpus"] * load_prices("guide").rank_hour["h100"]
        assert server["context"] == load_scale("full").model.recipe.max_position_embeddings
    shown = glm46("plan", "--compare", "--machine", "h800").stdout
    assert "official weights served in FP8_BLOCK: 8 GPUs" in shown and "20.00 USD an hour" in shown


def written(path, scale: str, *settings: str) -> str:
    """A file with settings changed by the command that the plan names."""
    made = glm46("config", scale, *(word for setting in settings for word in ("--set", setting)))
    assert made.exit_code == 0, made.stderr
    path.write_text(made.stdout)
    return str(path)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("expert_parallel=3",), "impossible, n_routed_experts (32) does not divide by expert_parallel (3)"),
        (("zero_stage=3", "pipeline_parallel=4"), "zero_stage 3 with pipeline_parallel 4"),
        (("device_memory_bytes=20000000000", "micro_batch_sequences=8"), "the fullest rank needs"),
    ],
)
def test_what_cannot_be_trained_has_a_choice_that_can_and_costs_what_it_says(tmp_path, settings, why):
    """Without --search; its --set lines, taken literally, make the file that the choice describes."""
    changed = [f"phases.sft.resources.{setting}" for setting in settings]
    mine = written(tmp_path / "mine.yaml", "scaled_down", *changed)
    done = glm46("plan", mine)
    assert why in done.stdout and done.exit_code == (2 if "impossible" in done.stdout else 0)
    (lines,) = re.findall(r"^  sft: glm46 config: (.+)$", done.stdout, re.M)
    plan = json.loads(glm46("plan", mine, "--json").stdout)
    choices = {phase["name"]: phase["choice"] for phase in plan["phases"]}
    assert {name for name, choice in choices.items() if choice} == {"sft"}, "others need no search"
    mended = json.loads(glm46("plan", written(tmp_path / "better.yaml", mine, *lines.split()[1::2]), "--json").stdout)
    (sft,) = (phase for phase in mended["phases"] if phase["name"] == "sft")
    assert not sft["impossible"] and sft["rank_memory"]["total"] <= MEMORY_USED * sft["rank_memory"]["available"]
    assert sft["hours"] == pytest.approx(choices["sft"]["hours"])
    assert sft["needs"]["cost"] == pytest.approx(choices["sft"]["cost"])


@pytest.mark.parametrize("scale", ["recipes/glm45_air_sft", "micro"])
def test_a_phase_that_no_engine_can_train_has_no_hours_and_no_cost(tmp_path, scale):
    name = load_scale(scale).phases[0].name
    settings = [f"phases.{name}.resources.{axis}" for axis in ("num_ranks=7", "tensor_parallel=2")]
    done = glm46("plan", written(tmp_path / "mine.yaml", scale, *settings), "--json")
    assert done.exit_code == 2, done.output
    plan = json.loads(done.stdout)
    phase, needs = plan["phases"][0], plan["phases"][0]["needs"]
    assert phase["impossible"] and phase["known_by"] == "" and "shards.multiple_of" not in done.stdout
    assert {phase["hours"], phase["mfu"], phase["tokens_per_second"]} == {0}
    spent = ("rank_hours", "cost", "failure_hours", "save_hours", "save_bytes_per_second", "data_bytes_per_second")
    assert {needs[each] for each in spent} == {0} and needs["disk_bytes"] > 0
    others = [each["needs"]["rank_hours"] for each in plan["phases"][1:]]
    assert plan["cost"]["rank_hours"] == pytest.approx(sum(others)) and all(others)
    shown = glm46("plan", str(tmp_path / "mine.yaml")).stdout
    assert f"no engine can train {name} as configured: no hours and no cost" in shown


def test_what_no_setting_mends_and_what_runs_on_cpus_says_so(tmp_path):
    mine = written(tmp_path / "mine.yaml", "scaled_down", "phases.sft.resources.device_memory_bytes=1000000")
    done = glm46("plan", mine)
    assert "sft: no other setting: no topology of 64 ranks in nodes of 8 trains it in 90% of a rank's" in done.stdout
    searched = glm46("plan", "micro", "--search").stdout
    assert "no other setting is searched: the time of CPUs is measured or assumed" in searched
    assert "no other setting" not in glm46("plan", "micro").stdout


def test_a_search_says_where_the_configured_setting_is_the_best():
    phase = SCALED.phases[0]
    recipe, prices = SCALED.training_recipe(phase), load_prices("guide")
    slow = phase.resources.model_copy(update={"context_parallel": 2, "recompute": "full"})
    first, _ = choose_setting("pretrain_general", recipe, slow, 4096, H100, prices)
    assert first is not None and len(first.settings) == 2
    values = dict(setting.rpartition(".")[2].split("=") for setting in first.settings)
    kinds = {key: type(getattr(phase.resources, key)) for key in values}
    chosen = slow.model_copy(update={key: kinds[key](value) for key, value in values.items()})
    again, _ = choose_setting("pretrain_general", recipe, chosen, 4096, H100, prices)
    assert again is not None and again.settings == () and again.hours == first.hours
    assert again.describe("USD") == ["the configured setting is the fastest that fits"]
