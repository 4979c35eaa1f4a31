"""rl_alignment by PPO through the real command line to a promoted model, which the suite of requests is then asked."""

from __future__ import annotations

import json

import pytest

from tests.conftest import ROOT
from tests.support.pipeline import glm46

pytestmark = pytest.mark.long


def test_ppo_on_requests_goes_through_to_promotion_and_the_suite_is_asked(tmp_path):
    home, results = tmp_path / "home", tmp_path / "safety.json"
    run = glm46("run", "recipes/micro_alignment", "--json", home=home)
    assert run.exit_code == 0 and run.outcome["promoted"], run.stderr[-4000:]
    gates = {stage["name"] for stage in run.outcome["stages"]}
    assert {"train rl_alignment", "gate rl_alignment"} <= gates
    data = str(ROOT / "configs" / "suites" / "safety_requests")
    asked = ["--suite", "safety", "--data", data, "--limit", "20", "--output", str(results)]
    evaluated = glm46("eval", "champion", "--scale", "recipes/micro_alignment", *asked, home=home)
    assert evaluated.exit_code == 0, evaluated.stderr[-4000:]
    figures = {each["name"]: each["figures"][0]["value"] for each in json.loads(results.read_text())["benchmarks"]}
    assert set(figures) == {"refusal", "over_refusal"} and min(figures.values()) >= 0.5
