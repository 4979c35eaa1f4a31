"""Phases as a graph: which starts, courses and names a configuration may have, and which of them a run can train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from configs.load import load_scale
from configs.schema import PHASE_TEMPLATES, Scale
from flows.stages import choose_stages
from tests.conftest import ROOT


def phase_of(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The phase of this name."""
    return next(phase for phase in tree["phases"] if phase["name"] == name)


def add_phase(
    tree: dict[str, Any], name: str, *, like: str, before: str | None, start: str | None, **recipe: Any
) -> dict[str, Any]:
    """Insert a copy of a phase, in a course of its own, before another one or at the end; `recipe` are its changes."""
    phase = copy.deepcopy(phase_of(tree, like)) | {"name": name, "start": start}
    phase["recipe"] |= recipe
    course = copy.deepcopy(next(each for each in tree["courses"] if like in each["recipe"]["phases"]))
    course["recipe"] |= {"name": name, "phases": [name]}
    for section, added, names in (
        (tree["phases"], phase, [each["name"] for each in tree["phases"]]),
        (tree["courses"], course, [each["recipe"]["phases"][0] for each in tree["courses"]]),
    ):
        section.insert(len(section) if before is None else names.index(before), added)
    return phase


@pytest.fixture
def tree() -> dict[str, Any]:
    """micro without its branch: pretrain_general, mid_reasoning, sft, rl_reasoning."""
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    tree["phases"].remove(phase_of(tree, "reward_model"))
    tree["courses"] = [course for course in tree["courses"] if course["recipe"]["name"] != "reward_model"]
    phase_of(tree, "rl_reasoning")["start"] = None
    return tree


def scale_of(tree: dict[str, Any], tmp_path) -> Scale:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return load_scale(str(path))


def with_branch(tree: dict[str, Any]) -> dict[str, Any]:
    """A reward model after sft, which leaves the others' path as it is."""
    gate = phase_of(tree, "sft")["recipe"]["gate"] | {"own_figure": "none"}
    changes = {"objective": {"kind": "reward", "own_model": None}, "gate": gate}
    add_phase(tree, "reward_model", like="sft", before="rl_reasoning", start="sft", **changes)
    phase_of(tree, "rl_reasoning")["start"] = "sft"
    return tree


def test_a_phase_starts_from_the_one_before_it_or_from_the_one_that_it_names(tree, tmp_path):
    scale = scale_of(with_branch(tree), tmp_path)
    starts = {phase.name: scale.start_of(phase) for phase in scale.phases}
    assert {name: start and start.name for name, start in starts.items()} == {
        "pretrain_general": None,
        "mid_reasoning": "pretrain_general",
        "sft": "mid_reasoning",
        "reward_model": "sft",
        "rl_reasoning": "sft",
    }
    assert scale.released_phase is scale.phases[-1]
    last = scale.model_copy(update={"phases": scale.phases[:-1]})
    assert last.released_phase is not None and last.released_phase.name == "sft", "a reward model is not released"


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        (
            "sft",
            "rl_reasoning",
            "phase sft: start rl_reasoning is no earlier phase: set it to pretrain_general or mid_",
        ),
        ("sft", "sft", "phase sft: start sft is no earlier phase"),
        ("sft", "mid_domain", "phase sft: start mid_domain is no earlier phase"),
        ("pretrain_general", "sft", "phase pretrain_general: start sft is no earlier phase: set it to null"),
        ("rl_reasoning", None, "phase rl_reasoning starts from reward_model, a reward model, which does not answer"),
        ("rl_reasoning", "reward_model", "set its start to the phase that reward_model starts from"),
    ],
)
def test_a_wrong_start_is_refused_with_the_fix(name, start, message, tree, tmp_path):
    phase_of(with_branch(tree), name)["start"] = start
    with pytest.raises(ValueError, match=message):
        scale_of(tree, tmp_path)


def test_a_course_is_a_path(tree, tmp_path):
    add_phase(tree, "mid_domain", like="mid_reasoning", before="sft", start="pretrain_general")
    assert scale_of(tree, tmp_path).start_of is not None, "a branch with a course of its own"
    own = next(course for course in tree["courses"] if course["recipe"]["phases"] == ["mid_domain"])
    tree["courses"].remove(own)
    tree["courses"][0]["recipe"]["phases"].append("mid_domain")
    message = (
        "phase mid_domain continues the schedule of mid_reasoning, but starts from pretrain_general: set its start"
    )
    with pytest.raises(ValueError, match=message):
        scale_of(tree, tmp_path)


def test_phases_are_listed_in_the_order_in_which_they_are_trained(tree, tmp_path):
    for section in (tree["phases"], tree["courses"]):
        section[-2:] = section[:-3:-1]
    scale_of(copy.deepcopy(tree), tmp_path)
    phase_of(tree, "sft")["kind"] = "mid_training"
    with pytest.raises(ValueError, match="list them in the order pretraining, mid_training, post_training"):
        scale_of(tree, tmp_path)


@pytest.mark.parametrize("template", PHASE_TEMPLATES)
def test_a_name_and_an_objective_that_disagree_are_refused(template, tree):
    """Every name with every objective, as the post-training phase of a scale."""
    known = [phase["recipe"]["objective"] for phase in tree["phases"]]
    policy = known[-1]
    objectives = [
        {"kind": "pretrain"},
        {"kind": "sft"},
        SAMPLING,
        {**DISTILLATION, "experts": [{"phase": "pretrain_general", "domains": ["synthetic"]}]},
        {"kind": "reward", "own_model": None},
        {"kind": "dpo", "beta": 0.1, "reference": None},
        *({**policy, "kind": kind, "loss_mean": "answers"} for kind in ("grpo", "gspo")),
        {**policy, **CRITIC, "kind": "ppo"},
    ]
    for objective in objectives:
        section = copy.deepcopy(phase_of(tree, "sft")) | {"name": f"{template}_again"}
        gate = section["recipe"]["gate"] | {"own_figure": "none"}
        section["recipe"] |= {"objective": objective, "sequence_length": 128, "gate": gate}
        values = {**tree, "phases": [tree["phases"][0], section], "courses": copy.deepcopy(tree["courses"][:2])}
        for course, phase in zip(values["courses"], values["phases"], strict=True):
            course["recipe"]["phases"] = [phase["name"]]
        if objective["kind"] in PHASE_TEMPLATES[template]:
            assert Scale(**values).phases[1].recipe.objective.kind == objective["kind"]
        else:
            kinds = " or ".join(PHASE_TEMPLATES[template])
            with pytest.raises(ValueError, match=f"has objective {kinds}, not {objective['kind']}: set the objective"):
                Scale(**values)


CRITIC = {
    "discount": 1.0,
    "gae_lambda": 0.95,
    "kl_coefficient": 0.02,
    "value_clip": 0.2,
    "critic_rate_ratio": 1.0,
    "reference": None,
}
"""What PPO adds to the settings of GRPO."""
SAMPLING = {
    "kind": "rejection_sampling",
    "samples_per_prompt": 4,
    "max_kept_per_prompt": 1,
    "dropped_shortest_share": 0.0,
    "max_new_tokens": 8,
    "temperature": 1.0,
    "enable_thinking": False,
    "rollouts": "in_process",
}

DIFFICULTY = {"samples_per_prompt": 8, "min_pass_rate": 0.125, "max_pass_rate": 0.875, "order": "easy_first"}


DISTILLATION = {
    **SAMPLING,
    "kind": "distillation",
    "experts": [{"phase": "rl_reasoning", "domains": ["synthetic"]}, {"phase": "rl_agentic", "domains": ["agentic"]}],
    "episodes": {"max_turns": 3, "max_turn_tokens": 8, "max_observation_chars": 32, "tool_seconds": {"others": 60.0}},
}


def with_experts(tree: dict[str, Any]) -> dict[str, Any]:
    """A second expert from sft beside rl_reasoning, and a phase at the end that joins both."""
    phase_of(tree, "rl_reasoning")["start"] = "sft"
    add_phase(tree, "rl_agentic", like="rl_reasoning", before=None, start="sft", mixture={"agentic": 1.0})
    add_phase(tree, "distillation", like="sft", before=None, start="sft", objective=copy.deepcopy(DISTILLATION))
    return tree


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": "stream"}, "packing must be best_fit where the objective is rejection_sampling"),
        ({"mixture": {"web": 1.0}}, r"mixture has no chat, which are the right answers .*: add it"),
        ({"mixture": {"chat": 0.0, "web": 1.0}}, "mixture has no chat"),
        ({"objective": {**SAMPLING, "samples_per_prompt": 513}}, "samples_per_prompt: .*less than or equal to 512"),
        ({"objective": {**SAMPLING, "samples_per_prompt": 1}}, "samples_per_prompt: .*greater than or equal to 2"),
        ({"objective": {**SAMPLING, "max_new_tokens": 128}}, r"max_new_tokens \(128\) must stay below sequence_length"),
    ],
)
def test_wrong_rejection_sampling_is_refused_with_the_fix(changes, message, tree, tmp_path):
    add_phase(tree, "rl_rejection_sampling", like="sft", before="rl_reasoning", start=None, objective=SAMPLING)
    assert scale_of(tree, tmp_path).phases[3].recipe.samples_solutions
    phase_of(tree, "rl_rejection_sampling")["recipe"].update(changes)
    with pytest.raises(ValueError, match=message):
        scale_of(tree, tmp_path)


def test_right_answers_have_a_course_of_their_own_and_weights_to_come_from(tree, tmp_path):
    add_phase(tree, "rl_rejection_sampling", like="sft", before="rl_reasoning", start=None, objective=SAMPLING)
    first = copy.deepcopy(tree)
    for section in (first["phases"], first["courses"]):
        section[:] = section[-2:-1]
    with pytest.raises(ValueError, match="there are none: put a phase before it, or run with --from rl_rej"):
        choose_stages(scale_of(first, tmp_path), None, None, "rl_rejection_sampling")
    tree["courses"][1]["recipe"]["phases"].append("rl_rejection_sampling")
    del tree["courses"][2]
    with pytest.raises(ValueError, match="course sft: phase rl_rejection_sampling packs what the weights at its start"):
        scale_of(tree, tmp_path)


@pytest.mark.parametrize("idle", [{"fim_rate": 0.5}, {"bucket_weights": [1.0, 2.0]}])
def test_settings_of_documents_are_refused_where_none_are_read(idle, tree, tmp_path):
    phase_of(tree, "rl_reasoning")["recipe"].update(idle)
    (name,) = idle
    with pytest.raises(ValueError, match=f"{name} would act on packed documents, and objective grpo reads none"):
        scale_of(tree, tmp_path)


def test_prompts_are_measured_by_the_start_and_answered_in_one_turn(tree, tmp_path):
    recipe = phase_of(tree, "rl_reasoning")["recipe"]
    assert not scale_of(tree, tmp_path).phases[-1].recipe.asks_start
    measured = recipe["objective"] | {"difficulty": DIFFICULTY}
    recipe["objective"] = measured
    phase = scale_of(tree, tmp_path).phases[-1].recipe
    asked = phase.solution_recipe
    assert phase.asks_start and not asked.keeps_answers and asked.domains == ("synthetic",)
    assert (asked.objective.samples_per_prompt, asked.objective.max_new_tokens) == (8, measured["max_new_tokens"])
    other = copy.deepcopy(tree)
    phase_of(other, "rl_reasoning")["recipe"]["objective"]["difficulty"] |= {"max_pass_rate": 0.5, "order": "shuffled"}
    assert scale_of(other, tmp_path).phases[-1].recipe.solution_recipe == asked, "another band measures nothing again"
    for section in (other["phases"], other["courses"]):
        section[:] = section[-1:]
    with pytest.raises(ValueError, match="phase rl_reasoning asks the weights that it starts from, and there are none"):
        choose_stages(scale_of(other, tmp_path), None, None, "rl_reasoning")
    recipe["mixture"] = {"synthetic": 0.5, "agentic": 0.5}
    with pytest.raises(ValueError, match=r"difficulty measures prompts that are answered in one.*take agentic out"):
        scale_of(tree, tmp_path)
    measured["difficulty"] = DIFFICULTY | {"min_pass_rate": 0.9}
    with pytest.raises(ValueError, match=r"min_pass_rate \(0.9\) exceeds max_pass_rate \(0.875\), so no"):
        scale_of(tree, tmp_path)


def scored_by(objective: dict[str, Any], phase: str | None, weight: float) -> dict[str, Any]:
    """A policy objective whose answers this phase's model scores."""
    return objective | {"reward_model": phase, "rewards": objective["rewards"] | {"reward_model": weight}}


@pytest.mark.parametrize(
    ("phase", "weight", "message"),
    [
        ("sft", 1.0, "phase rl_reasoning: objective.reward_model sft is no earlier phase of objective reward"),
        ("reward_model_2", 1.0, "reward_model_2 is no earlier phase of objective reward: set it to reward_model"),
        ("reward_model", 0.0, "reward_model is reward_model, and rewards.reward_model gives its score the weight 0"),
        (None, 1.0, "rewards.reward_model weighs 1.0, and no model scores: set reward_model to the phase that trains"),
    ],
)
def test_a_reward_model_is_an_earlier_phase_with_a_weight(phase, weight, message, tree, tmp_path):
    recipe = phase_of(with_branch(tree), "rl_reasoning")["recipe"]
    objective = recipe["objective"]
    recipe["objective"] = scored_by(objective, phase, weight)
    with pytest.raises(ValueError, match=message):
        scale_of(tree, tmp_path)
    recipe["objective"] = scored_by(objective, "reward_model", 0.5)
    assert scale_of(tree, tmp_path).phases[-1].recipe.reward_model == "reward_model"
    recipe["objective"] = scored_by(objective, None, 0.0)
    assert scale_of(tree, tmp_path).phases[-1].recipe.reward_model is None


def test_a_reference_is_an_earlier_language_model_of_the_run(tree, tmp_path):
    recipe = phase_of(tree, "rl_reasoning")["recipe"]
    ppo = recipe["objective"] | CRITIC | {"kind": "ppo"}
    for named, message in (
        (
            "reward_model",
            "objective.reference reward_model is no earlier phase that leaves a language model: set it to",
        ),
        ("rl_reasoning", "objective.reference rl_reasoning is no earlier phase that leaves a language model"),
    ):
        recipe["objective"] = ppo | {"reference": named}
        with pytest.raises(ValueError, match=message):
            scale_of(tree, tmp_path)
    recipe["objective"] = ppo | {"reference": "mid_reasoning"}
    scale = scale_of(tree, tmp_path)
    assert choose_stages(scale, "mid_reasoning", "sft", None).phases[-1].recipe.reference == "mid_reasoning"
    with pytest.raises(ValueError, match="phase rl_reasoning is held to mid_reasoning, which comes before"):
        choose_stages(scale, "rl_reasoning", "sft", None)
    recipe["adapter"] = recipe["adapter"] | {"kind": "lora"}
    with pytest.raises(ValueError, match="whose reference is the policy without its adapter"):
        scale_of(tree, tmp_path)


def test_a_reward_model_before_the_first_stage_is_refused(tree, tmp_path):
    recipe = phase_of(with_branch(tree), "rl_reasoning")["recipe"]
    recipe["objective"] = scored_by(recipe["objective"], "reward_model", 1.0)
    scale = scale_of(tree, tmp_path)
    message = "--from rl_reasoning: phase rl_reasoning has its answers scored by reward_model, which comes before"
    with pytest.raises(ValueError, match=message):
        choose_stages(scale, "rl_reasoning", "sft", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flows.stages.refuse_impossible_training", lambda *arguments: None)
        assert choose_stages(scale, "reward_model", "sft", None).phases[-1].name == "rl_reasoning"


def test_the_recipe_of_the_second_way_joins_branches_of_one_start():
    """Report, section 3."""
    scale = load_scale("recipes/glm46_experts")
    joined = next(phase for phase in scale.phases if phase.name == "distillation")
    experts = [expert.phase for expert in joined.recipe.experts]
    starts = {phase.name: phase.start for phase in scale.phases}
    assert experts == ["rl_reasoning", "rl_agentic", "rl_alignment_chat"]
    assert {starts[name] for name in (*experts, "distillation")} == {"rl_cold_start"}
    assert scale.released_phase.name == "rl_alignment" and starts["rl_alignment"] == "distillation"


def test_given_weights_stand_for_what_the_first_phase_starts_from(tree, tmp_path):
    scale = scale_of(with_branch(tree), tmp_path)
    for first in ("reward_model", "rl_reasoning"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flows.stages.refuse_impossible_training", lambda *arguments: None)
            assert choose_stages(scale, first, "sft", None).phases[0].name == first
            assert not choose_stages(scale, "reward_model", "sft", "reward_model").releases
    add_phase(tree, "rl_reasoning_2", like="rl_reasoning", before=None, start="mid_reasoning")
    with pytest.raises(ValueError) as refusal:
        choose_stages(scale_of(tree, tmp_path), "rl_reasoning", "sft", None)
    assert str(refusal.value) == (
        "--from rl_reasoning: phase rl_reasoning_2 starts from mid_reasoning, which comes before, and the weights of "
        "--start stand for sft: begin with --from mid_reasoning, or end before rl_reasoning_2 with --until"
    )
    assert choose_stages(scale_of(tree, tmp_path), "rl_reasoning", "sft", "rl_reasoning").phases


def test_a_window_of_reward_models_has_nothing_to_release(tree, tmp_path):
    with_branch(tree)
    del tree["phases"][-1], tree["courses"][-1]
    scale = scale_of(tree, tmp_path)
    with pytest.raises(ValueError, match=r"leave nothing to release, .*: end with --until reward_model"):
        choose_stages(scale, "reward_model", "sft", None)
