"""A candidate that is worse in one thing ends `glm46 run` with exit code 3, and the aliases stay where they were: once
per bound, and once per failure and release that comes in between."""

from __future__ import annotations

import pytest

from tests.support.refused_releases import ALL, CASES, LAST_WORK, REIGNING, REWARD, aliases_of, ended_runs

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return ended_runs(tmp_path_factory.mktemp("refusals"), ALL)


@pytest.mark.parametrize("name", CASES)
def test_a_worse_candidate_ends_the_run_with_exit_code_3_and_the_aliases_stay(ended, name):
    run = ended[name]
    assert (run["code"], run["promoted"], run["alias"]) == (3, False, "")
    assert any(reason.startswith(CASES[name].bound) for reason in run["reasons"]), run["reasons"]
    assert aliases_of(run) == REIGNING
    trained_none = CASES[name].from_stage == REWARD
    assert bool(run["report"]) is not trained_none, "a refused run with a language model has its report"


@pytest.mark.parametrize("name", LAST_WORK)
def test_what_fails_after_the_gates_leaves_the_aliases_where_they_were(ended, name):
    assert ended[name]["code"] == 1 and aliases_of(ended[name]) == REIGNING


def test_margins_do_not_add_up_and_no_bound_but_the_anchors_sees_it(ended):
    assert [reason.split(" by ")[0] for reason in ended["below the anchor"]["reasons"]] == [
        "bits_per_byte differs from the anchor's"
    ]


def test_an_undecided_comparison_is_refused_as_such(ended):
    assert all(": undecided, about " in reason for reason in ended["undecided"]["reasons"])


def test_a_release_that_another_one_overtakes_is_compared_with_the_winner_and_refused(ended):
    run = ended["overtaken by a release"]
    winner = run["aliases"]["champion"]
    assert (run["code"], run["promoted"]) == (3, False) and winner not in ("2", run["version"])
    assert run["reasons"][0].startswith("bits_per_byte differs from the champion's by +0.5000")
    assert run["aliases"]["previous"] == "2" and run["aliases"]["candidate"] == run["version"]
    assert aliases_of(run) == REIGNING | {"champion": winner, "anchor_bits_per_byte": winner}


def test_a_release_that_a_rollback_overtakes_is_compared_with_the_restored_champion(ended):
    run = ended["overtaken by a rollback"]
    assert (run["code"], run["promoted"], run["reasons"]) == (0, True, [])
    assert (run["aliases"]["champion"], run["aliases"]["previous"]) == (run["version"], "2")
    assert run["aliases"]["anchor_bits_per_byte"] == run["version"] and "candidate" not in run["aliases"]
    assert [stage["name"] for stage in run["stages"]].count("gate champion") == 2


def test_a_rolled_back_version_is_refused_with_who_when_and_why(ended):
    run, winner = ended["rolled back"], ended["overtaken by a release"]["aliases"]["champion"]
    assert (run["code"], run["promoted"], run["version"]) == (3, False, winner)
    assert run["reasons"][-1].startswith(f"version {winner} was rolled back on ")
    assert "(it was too good to be true): to allow it again, delete its tag" in run["reasons"][-1]
    assert aliases_of(run) == aliases_of(ended["overtaken by a rollback"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [("refused by a person", "Ada refused the release on "), ("nobody answers", "nobody approved the release within ")],
)
def test_a_release_that_no_person_approved_is_refused_and_the_aliases_stay(ended, name, reason):
    run, before = ended[name], ended["rolled back"]
    assert (run["code"], run["promoted"], aliases_of(run)) == (3, False, aliases_of(before))
    assert [sentence.startswith(reason) for sentence in run["reasons"]] == [True]


def test_a_person_sees_figures_and_bounds_and_the_answer_stays_with_the_release(ended):
    run = ended["approved by a person"]
    assert (run["code"], run["promoted"], run["aliases"]["champion"]) == (0, True, run["version"])
    (answer,) = [stage["reason"] for stage in run["stages"] if stage["name"] == "ask for approval"]
    assert answer.startswith("Ada approved the release on ")
    assert (
        "| pass@1 in conversation | 0.9000 [" in answer
        and "| held | accuracy of benchmark needle | champion |" in answer
    )
    again = ended["approved again"]
    assert (again["code"], again["promoted"]) == (0, True), "the champion is not asked about again"
    decisions = [
        stage["digest"] for each in (run, again) for stage in each["stages"] if stage["name"] == "gate promotion"
    ]
    assert decisions[0] == decisions[1], "the second run keeps the answer of the first"
    assert not [stage for stage in again["stages"] if stage["name"] == "ask for approval"]
