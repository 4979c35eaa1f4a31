"""Rates and epochs that the source documents name stand in the recipes."""

from __future__ import annotations

import re

import pytest

from configs.load import load_scale, scale_names
from configs.schema import PolicyObjective
from tasks.training.plan.topology import impossible_topology
from tests.conftest import ROOT

RATES = {
    # S4: peak and end of the phase's rate.
    "glm45_355b_pretrain": (1e-4, 1e-5),
    "glm45_air_pretrain": (1e-4, 1e-5),
    "glm45_355b_sft": (5e-6, 0.0),
    "glm45_air_sft": (5e-6, 0.0),
    "glm45_355b_lora": (1e-4, 0.0),
    "glm45_air_lora": (1e-4, 0.0),
    "glm45_355b_dora": (1e-4, 0.0),
    "glm45_air_dora": (1e-4, 0.0),
    # S1: AdamW for all weights.
    "s1_355b_adamw": (3e-4, 3e-5),
}


@pytest.mark.parametrize("name", RATES)
def test_recipes_have_the_published_rates(name):
    scale = load_scale(f"recipes/{name}")
    for phase in scale.phases:
        course = scale.training_recipe(phase).course
        assert (course.peak_learning_rate, course.final_learning_rate) == RATES[name]


@pytest.mark.parametrize("name", ["s0_355b_muon", "s0_64xh100_muon"])
def test_s0s_matrices_train_at_muons_rate_and_the_rest_at_adamws(name):
    scale = load_scale(f"recipes/{name}")
    for phase in scale.phases:
        rate = scale.training_recipe(phase).course.peak_learning_rate
        assert rate == 0.02 and rate * phase.recipe.optimizer.adam_rate_ratio == pytest.approx(3e-4)


def test_s1s_biases_move_by_the_imbalance_within_a_bound_and_the_reports_by_its_sign():
    """S1 names 0.001 and a clamp of 5; its two rates are the peak and adam_rate_ratio of the recipes above."""
    s1, report = (load_scale(name).courses[0].recipe for name in ("recipes/s1_355b_adamw", "full"))
    assert (s1.router_bias_rule.kind, s1.router_bias_rule.max_bias, s1.router_bias_rate[0].value) == (
        "ratio",
        5.0,
        1e-3,
    )
    assert (report.router_bias_rule.kind, report.router_bias_rule.max_bias) == ("sign", 0.0)


TOKENS_PER_GPU = 16_384
"""S3: --max-tokens-per-gpu."""
DEBUG = {"num_ranks": 32, "tensor_parallel": 4, "pipeline_parallel": 1, "context_parallel": 1, "expert_parallel": 4}


@pytest.mark.parametrize(
    ("name", "axes", "changes"),
    [
        ("glm45_355b_gspo", (8, 4, 2, 16), {}),
        ("glm45_355b_grpo", (4, 8, 2, 8), {}),
        ("glm45_355b_grpo", (4, 1, 1, 4), DEBUG),
    ],
)
def test_s3s_topologies_fit_the_model_and_its_micro_batches_the_token_budget(name, axes, changes):
    """S3 names tensor, pipeline, context and expert parallelism; the last is its launcher's for up to 32 GPUs."""
    scale = load_scale(f"recipes/{name}")
    (phase,) = scale.phases
    own = phase.resources.model_copy(update=changes)
    assert (own.tensor_parallel, own.pipeline_parallel, own.context_parallel, own.expert_parallel) == axes
    assert [*impossible_topology(scale.training_recipe(phase), own)] == []
    assert own.micro_batch_tokens == TOKENS_PER_GPU
    assert (own.offload_optimizer, phase.recipe.optimizer.kind) == ("cpu", "adamw")
    objective = phase.recipe.objective
    assert isinstance(objective, PolicyObjective) and objective.importance.kind == "truncated"
    if objective.kind == "gspo":
        assert (objective.clip_low, objective.clip_high) == (1e-4, 2e-4)


def test_full_has_s0s_sft():
    scale = load_scale("full")
    sft = next(phase for phase in scale.phases if phase.name == "sft")
    assert (scale.training_recipe(sft).course.peak_learning_rate, sft.recipe.max_epochs) == (2e-5, 3.0)


def test_comments_on_the_ranks_of_a_phase_state_its_axes():
    """For example `# 8 = DP 4 x PP 2`; an axis that is not named is 1. They stand above `num_ranks`."""
    num_comments = 0
    for name in scale_names():
        lines = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8").split("\n")
        phases = load_scale(name).phases
        for number, line in enumerate(lines):
            for stated in re.findall(r"# .* = ([DTPC]P \d+ x [^,.:;]*\d)", line):
                above = sum(before.startswith("      num_ranks:") for before in lines[:number])
                own = phases[above].resources
                axes = {"TP": own.tensor_parallel, "PP": own.pipeline_parallel, "CP": own.context_parallel}
                axes["DP"] = own.num_ranks // (own.tensor_parallel * own.pipeline_parallel * own.context_parallel)
                named = {axis: int(size) for axis, size in (part.split() for part in stated.split(" x "))}
                assert {"DP": 1, "TP": 1, "PP": 1, "CP": 1} | named == axes, f"{name}, line {number + 1}"
                num_comments += 1
    assert num_comments > 10
