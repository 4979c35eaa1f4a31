"""The report's second way through the real command line: experts from sft, one model that joins them, general RL."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from configs.load import load_scale
from infra.home import Home
from infra.storage.local_store import LocalStore
from tasks.training.plan.launch_rules import refuse_impossible_training
from tasks.training.plan.plan_training import plan_training
from tests.support.pipeline import glm46

SCALE = "recipes/micro_experts"
EXPERTS = {"rl_reasoning": "synthetic", "rl_agentic": "agentic"}


def test_the_recipe_plans_branches_that_a_distillation_joins():
    scale, phases = load_scale(SCALE), {phase.name: phase for phase in plan_training(load_scale(SCALE)).phases}
    starts = {name: phase.start for name, phase in phases.items()}
    assert starts == {
        "pretrain_general": "",
        "sft": "pretrain_general",
        **dict.fromkeys((*EXPERTS, "reward_model", "distillation"), "sft"),
        "rl_alignment": "distillation",
    }
    for phase in scale.phases:
        refuse_impossible_training(scale.training_recipe(phase), phase.resources)
    named = (
        "right answers of rl_reasoning (synthetic), rl_agentic (agentic), sampled before it on one device: 10.7 MB of"
    )
    assert named in phases["distillation"].mixture, "weights twice, as they are and packed for sampling"
    distilled, general = (phase.recipe for phase in scale.phases[-2:])
    assert (distilled.gate.own_figure, general.gate.own_figure) == ("pass_at_1", "pass_at_1")
    assert general.reward_model == "reward_model" and set(general.mixture) == {*EXPERTS.values()}


@pytest.mark.long
def test_two_experts_are_joined_by_distillation_and_general_rl_follows_to_a_promoted_model(tmp_path):
    home = tmp_path / "home"
    run = glm46("run", SCALE, "--json", home=home)
    assert run.exit_code == 0 and run.outcome["promoted"], run.stderr[-4000:]
    store = LocalStore(home / "store", Home(home))
    made = {manifest.digest: manifest for manifest in store.iterate_manifests()}
    solutions = made[run.digests["sample distillation"]]
    experts = {name: run.digests[f"train {name}"] for name in EXPERTS}
    assert experts.items() <= solutions.identity["inputs"].items()
    answered = {(each["phase"], each["domain"]): each["num_kept"] for each in solutions.record["domains"]}
    assert set(answered) == {*EXPERTS.items()} and all(answered.values()), answered
    chats = pq.read_table(store.local_path(solutions, "chats/part-00000.parquet")).to_pylist()
    for name, digest in experts.items():
        own = [chat for chat in chats if chat["source"] == f"solutions/{name}/{digest[:12]}"]
        assert {chat["collection"] for chat in own} == {f"solutions/{EXPERTS[name]}"}
        asked_tools = {"tool" in [message["role"] for message in json.loads(chat["messages"])] for chat in own}
        assert asked_tools == {False} if name == "rl_reasoning" else True in asked_tools
    traced = glm46("lineage", "model", "champion", "--scale", SCALE, "--json", home=home)
    names = [phase["name"] for phase in json.loads(traced.stdout)["phases"]]
    assert names == ["pretrain_general", "sft", *EXPERTS, "distillation", "rl_alignment"]
