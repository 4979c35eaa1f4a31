"""What a plan says beside memory and time: cost, losses, sizes, the smallest world, and scales side by side."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from configs.load import load_prices, load_scale
from flows.cli.command import app
from tasks.training.plan.compare_plans import compare_plans
from tasks.training.plan.machine import H800, HOURS_TO_FAILURE, MEMORY_USED, RESTART_SECONDS
from tasks.training.plan.phase_needs import smallest_world
from tasks.training.plan.plan_training import plan_training
from tasks.training.plan.search import least_memory

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


def test_scales_side_by_side_end_with_the_official_weights():
    plans = [plan_training(load_scale(name)) for name in ("scaled_down", "recipes/glm45_355b_sft")]
    compared = compare_plans(plans)
    assert [each.name for each in compared.scales] == ["scaled_down", "glm45_355b_sft", "official weights"]
    assert compared.scales[0].total == plans[0].cost.total
    assert (compared.scales[2].total, compared.scales[2].weights_bytes) == (0, compared.scales[1].weights_bytes)
    done = glm46("plan", "--compare", "tiny", "micro", "--json")
    assert done.exit_code == 0 and len(json.loads(done.stdout)["scales"]) == 3
    for refused in (glm46("plan", "tiny", "micro"), glm46("plan")):
        assert refused.exit_code == 2 and "scales: give one, as glm46 plan tiny, or --compare" in refused.stderr


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


def test_an_impossible_configuration_ends_with_exit_code_2_and_the_reason(tmp_path):
    made = glm46("config", "scaled_down", "--set", "phases.sft.resources.expert_parallel=3")
    assert made.exit_code == 0
    (tmp_path / "mine.yaml").write_text(made.stdout)
    done = glm46("plan", str(tmp_path / "mine.yaml"))
    assert (
        done.exit_code == 2
        and "impossible, n_routed_experts (32) does not divide by expert_parallel (3)" in done.stdout
    )
