"""A candidate that is worse in one thing ends `glm46 run` with exit code 3, and the aliases stay where they were."""

from __future__ import annotations

import pytest

from tests.support.refused_releases import CASES, FEW, REIGNING, aliases_of, ended_runs


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return ended_runs(tmp_path_factory.mktemp("refusals"), FEW)


def test_the_first_release_reigns_and_anchors_every_figure(ended):
    first = ended["first"]
    assert (first["code"], first["promoted"], first["reasons"]) == (0, True, [])
    assert aliases_of(first) == dict.fromkeys(REIGNING, "1")


def test_a_release_takes_over_the_anchor_of_what_it_is_better_in_and_no_other(ended):
    assert (ended["second"]["code"], ended["second"]["promoted"]) == (0, True)
    assert aliases_of(ended["second"]) == REIGNING


@pytest.mark.parametrize("name", [name for name in FEW if name in CASES])
def test_a_worse_candidate_ends_the_run_with_exit_code_3_and_the_aliases_stay(ended, name):
    run = ended[name]
    assert (run["code"], run["promoted"], run["alias"]) == (3, False, "")
    assert any(reason.startswith(CASES[name].bound) for reason in run["reasons"]), run["reasons"]
    assert aliases_of(run) == REIGNING
    assert run["report"], "a refused run has its report"


def test_the_champion_run_again_stays_champion(ended):
    again = ended["champion again"]
    assert (again["code"], again["promoted"], again["version"]) == (0, True, "2") and aliases_of(again) == REIGNING
