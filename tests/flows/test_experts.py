"""The report's second way through the real command line to a promoted model: two experts as branches of SFT, joined by
distillation, then general RL."""

from __future__ import annotations

import pytest

from configs.load import load_scale
from infra.home import Home
from infra.storage.local_store import LocalStore
from tasks.evaluation.decide_gate import START, GateDecision
from tasks.evaluation.sample_solutions import SampledSolutions, sample_solutions
from tasks.training.plan.launch_rules import refuse_impossible_training
from tasks.training.plan.plan_training import plan_training
from tests.support.pipeline import glm46

SCALE = "recipes/micro_experts"


def test_the_recipe_plans_with_experts_as_branches_that_distillation_joins():
    scale = load_scale(SCALE)
    plan_training(scale)
    for phase in scale.phases:
        refuse_impossible_training(scale.training_recipe(phase), phase.resources)
    starts = {phase.name: phase.start for phase in scale.phases}
    assert starts["rl_agentic"] == starts["rl_alignment_chat"] == starts["distillation"] == "sft"
    assert starts["rl_alignment"] == "distillation"


@pytest.mark.long
def test_what_two_experts_learned_is_in_one_promoted_model(tmp_path):
    home = tmp_path / "home"
    run = glm46("run", SCALE, "--json", home=home)
    assert run.exit_code == 0 and run.outcome["promoted"], run.stderr[-4000:]
    store = LocalStore(home / "store", Home(home))
    keys = {stage["name"]: stage["key"] for stage in run.outcome["stages"]}
    sampled = store.find(sample_solutions, keys["sample distillation"])
    assert sampled is not None and isinstance(sampled.record, SampledSolutions)
    kept = {(each.phase, each.domain): each.num_kept for each in sampled.record.domains}
    assert kept["rl_agentic", "agentic"] > 100 and kept["rl_alignment_chat", "safety"] > 100
    decisions = {
        manifest.digest: GateDecision.model_validate(manifest.record)
        for manifest in store.iterate_manifests()
        if manifest.step == "decide_gate"
    }
    joined = {
        bound.figure: bound
        for bound in decisions[run.digests["gate distillation"]].bounds
        if bound.against == START and bound.figure in ("safe_answer_share", "agentic_success")
    }
    safe, agentic = joined["safe_answer_share"], joined["agentic_success"]
    assert safe.interval is not None and safe.interval[0] > 0, safe.sentence
    assert agentic.value is not None and agentic.value > 0, agentic.sentence
