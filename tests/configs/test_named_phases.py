"""What a phase may name: its experts, and a reward model of its own size."""

from __future__ import annotations

from typing import Any

import pytest

from flows.stages import choose_stages
from tasks.training.plan.plan_training import plan_training
from tests.configs.test_phase_graph import (
    DISTILLATION,
    phase_of,
    scale_of,
    scored_by,
    tree,  # noqa: F401
    with_branch,
    with_experts,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": "stream"}, "packing must be best_fit where the objective is distillation"),
        ({"mixture": {"web": 1.0}}, r"mixture has no chat, which are the right answers .* distillation: add it"),
        (["rl_alignment", "agentic"], "the expert rl_alignment of .* is no earlier phase that leaves a language model"),
        (["distillation", "agentic"], "the expert distillation of .*: name pretrain_general or mid_reasoning or sft"),
        (["reward_model", "agentic"], "the expert reward_model of objective.experts is no earlier phase that leaves"),
        (["rl_reasoning", "agentic"], "experts name the phase rl_reasoning twice: name every expert once"),
        (["rl_agentic", "synthetic"], "experts name the domain synthetic twice: name .* every domain at one expert"),
        ({"episodes": {**DISTILLATION["episodes"], "max_turn_tokens": 9}}, r"max_turn_tokens \(9\) must not exceed"),
    ],
)
def test_a_wrong_distillation_is_refused_with_the_fix(changes, message, tree, tmp_path):  # noqa: F811
    """A list is the phase and the domain of the second expert."""
    recipe = phase_of(with_experts(with_branch(tree)), "distillation")["recipe"]
    assert [expert.phase for expert in scale_of(tree, tmp_path).phases[-1].recipe.experts] == [
        "rl_reasoning",
        "rl_agentic",
    ]
    if isinstance(changes, list):
        recipe["objective"]["experts"][1] = {"phase": changes[0], "domains": [changes[1]]}
    else:
        recipe.update({name: value for name, value in changes.items() if name != "episodes"})
        recipe["objective"].update({name: value for name, value in changes.items() if name == "episodes"})
    with pytest.raises(ValueError, match=message):
        scale_of(tree, tmp_path)


def test_an_expert_is_planned_and_one_before_the_first_stage_is_refused(tree, tmp_path):  # noqa: F811
    scale = scale_of(with_experts(tree), tmp_path)
    planned = plan_training(scale).phases[-1].mixture
    assert "right answers of rl_reasoning (synthetic), rl_agentic (agentic), sampled before it on one device" in planned
    with pytest.raises(ValueError, match="distillation learns from the expert rl_reasoning, which comes before: begin"):
        choose_stages(scale, "rl_agentic", "sft", None)
    assert [phase.name for phase in choose_stages(scale, "rl_reasoning", "sft", None).phases] == [
        "rl_reasoning",
        "rl_agentic",
        "distillation",
    ]


def own_model(tree: dict[str, Any], directory, **architecture: Any) -> dict[str, Any]:  # noqa: F811
    """The reward model of a branch, half as wide as the scale's, from a directory."""
    made = tree["model"]["recipe"] | {"hidden_size": 128, "num_nextn_predict_layers": 0} | architecture
    phase = phase_of(with_branch(tree), "reward_model")
    phase["start"], phase["recipe"]["objective"]["own_model"] = (
        None,
        {"architecture": made, "checkpoint_dir": str(directory)},
    )
    return phase


def test_a_reward_model_of_its_own_size_starts_from_no_phase_and_scores_with_its_architecture(tree, tmp_path):  # noqa: F811
    phase = own_model(tree, tmp_path / "absent")
    recipe = phase_of(tree, "rl_reasoning")["recipe"]
    recipe["objective"] = scored_by(recipe["objective"], "reward_model", 1.0)
    scale = scale_of(tree, tmp_path)
    *_, judge, policy = (scale.training_recipe(section) for section in scale.phases)
    assert scale.start_of(scale.phases[-2]) is None and judge.model == policy.scorer != policy.model
    phase["recipe"]["objective"]["own_model"]["checkpoint_dir"] = "elsewhere"
    assert scale_of(tree, tmp_path).training_recipe(scale.phases[-2]) == judge, "the place enters no key"
    with pytest.raises(ValueError, match="absent is no directory: name one with config"):
        choose_stages(scale, "reward_model", "sft", None)


@pytest.mark.parametrize(
    ("start", "architecture", "message"),
    [
        ("sft", {}, "start sft with objective.own_model, whose weights it starts from: set start to null"),
        (
            None,
            {"vocab_size": 999},
            "own_model has a vocabulary of 999, the scale one of .*: it would read other tokens",
        ),
        (
            None,
            {"max_position_embeddings": 64},
            r"sequence_length \(128\) exceeds model.max_position_embeddings \(64\)",
        ),
    ],
)
def test_a_wrong_model_of_its_own_is_refused_with_the_fix(start, architecture, message, tree, tmp_path):  # noqa: F811
    own_model(tree, tmp_path, **architecture)["start"] = start
    with pytest.raises(ValueError, match=message):
        scale_of(tree, tmp_path)


def test_rows_longer_than_the_reward_model_reads_are_refused(tree, tmp_path):  # noqa: F811
    recipe = own_model(tree, tmp_path, max_position_embeddings=64)["recipe"]
    recipe |= {"sequence_length": 32, "num_tokens": 4096}
    policy = phase_of(tree, "rl_reasoning")["recipe"]
    policy["objective"] = scored_by(policy["objective"], "reward_model", 1.0)
    scale_of(tree, tmp_path)
    policy |= {"sequence_length": 128, "num_tokens": policy["num_tokens"] // 32 * 128}
    with pytest.raises(
        ValueError, match=r"rows of 128 tokens exceed the max_position_embeddings of reward_model \(64\)"
    ):
        scale_of(tree, tmp_path)
