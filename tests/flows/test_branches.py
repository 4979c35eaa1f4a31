"""A run whose phases branch, by the real command line, and what it says where no sampled answer is right."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.configs.test_phase_graph import SAMPLING, add_phase
from tests.conftest import ROOT
from tests.support.pipeline import glm46

pytestmark = pytest.mark.long
SAMPLES = {**SAMPLING, "samples_per_prompt": 32, "max_kept_per_prompt": 4, "dropped_shortest_share": 0.0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """micro with a cold start beside sft, then rejection sampling from sft, whose model is never right."""
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    tree["scale"] = "branches"
    cold = {"num_tokens": 4096, "mixture": {"chat": 1.0}}
    add_phase(tree, "rl_cold_start", like="sft", before="rl_reasoning", start="mid_reasoning", **cold)
    sampled = {"objective": SAMPLES, "num_tokens": 2048, "mixture": {"chat": 0.5, "web": 0.5}, "max_epochs": 32.0}
    add_phase(tree, "rl_rejection_sampling", like="sft", before="rl_reasoning", start="sft", **sampled)
    del tree["phases"][-1], tree["courses"][-1]
    for phase in tree["phases"]:
        phase["recipe"]["gate"]["own_figure"] = "none"
    home = tmp_path_factory.mktemp("branches")
    scale = home / "branches.yaml"
    scale.write_text(yaml.safe_dump(tree, sort_keys=False))
    return glm46("run", str(scale), "--json", home=home / "home"), scale, home / "home"


@pytest.mark.parametrize("branch", ["sft", "rl_cold_start"])
def test_each_branch_has_its_own_path(branch, finished):
    _, scale, home = finished
    traced = glm46("lineage", "model", branch, "--scale", str(scale), "--json", home=home)
    assert [phase["name"] for phase in json.loads(traced.stdout)["phases"]] == [
        "pretrain_general",
        "mid_reasoning",
        branch,
    ]


def test_without_a_right_answer_the_run_stops_with_the_figures_and_samples_nothing_again(finished):
    run, scale, home = finished
    said = "phase rl_rejection_sampling: 0 of 3840 answers to 120 prompts are right (pass@1 0.0000"
    assert run.exit_code == 1 and said in run.stderr, run.stderr[-2000:]
    again = glm46("run", str(scale), "--json", home=home)
    assert again.exit_code == 1 and said in again.stderr
    (line,) = [line for line in again.stderr.splitlines() if line.startswith("sample rl_rejection_sampling ")]
    assert " cached " in line
