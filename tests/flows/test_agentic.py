"""rl_agentic through the real command line to a promoted model, which solves more held-out tasks with its tool than
before, beyond the interval."""

from __future__ import annotations

import pytest

from configs.load import load_scale
from infra.home import Home
from infra.storage.local_store import LocalStore
from tasks.evaluation.decide_gate import START, GateDecision
from tasks.training.plan.launch_rules import refuse_impossible_training
from tasks.training.plan.plan_training import plan_training
from tests.support.pipeline import glm46

SCALE = "recipes/micro_agentic"


def test_the_recipe_plans_and_its_gate_demands_more_solved_tasks():
    scale = load_scale(SCALE)
    phases = {phase.name: phase.recipe for phase in scale.phases}
    assert [phase.name for phase in plan_training(scale).phases] == ["pretrain_general", "sft", "rl_agentic"]
    for phase in scale.phases:
        refuse_impossible_training(scale.training_recipe(phase), phase.resources)
    agentic = phases["rl_agentic"]
    assert agentic.mixture == {"agentic": 1.0} and agentic.objective.kind == "grpo"
    for recipe in (phases["sft"], agentic):
        assert (recipe.gate.own_figure, recipe.gate.must_gain) == ("agentic_success", True)
    assert scale.evaluation.recipe.tasks is not None, "held-out tasks are played as training plays its own"
    assert scale.evaluation.recipe.tasks.episodes == agentic.objective.episodes
    assert scale.evaluation.recipe.tasks.max_new_tokens == agentic.objective.max_new_tokens
    assert scale.evaluation.recipe.temperature == agentic.objective.temperature


@pytest.mark.long
def test_episodes_with_a_calculator_raise_the_success_beyond_the_interval_to_a_promoted_model(tmp_path):
    home = tmp_path / "home"
    run = glm46("run", SCALE, "--json", home=home)
    assert run.exit_code == 0 and run.outcome["promoted"], run.stderr[-4000:]
    decisions = {
        manifest.digest: GateDecision.model_validate(manifest.record)
        for manifest in LocalStore(home / "store", Home(home)).iterate_manifests()
        if manifest.step == "decide_gate"
    }
    (bound,) = (
        bound for bound in decisions[run.digests["gate rl_agentic"]].bounds if bound.is_own and bound.against == START
    )
    assert bound.figure == "agentic_success" and bound.value is not None and bound.interval is not None
    assert bound.interval[0] > 0 and bound.value > bound.noise_floor, bound.sentence
