"""A candidate that is worse in one thing ends `glm46 run` with exit code 3, and the aliases stay where they were."""

from __future__ import annotations

import re

import pytest

from configs.load import load_scale
from configs.schema import ApprovalRequest
from flows.cli.run_pipeline import refuse_unanswerable_release
from infra.home import Home
from tests.support.refused_releases import CASES, FEW, FORMAT, REIGNING, TAKEN_DOWN, aliases_of, ended_runs


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


@pytest.mark.parametrize("name", [name for name in FEW if name in CASES])
def test_prefects_ui_shows_every_reason_and_the_bound_that_refused(ended, name):
    """The first is refused by the gate of its phase already: its release is not judged."""
    run = ended[name]
    verdict, gates = (run["shown"][f"refused-{table}"] for table in ("verdict", "release-gates"))
    assert [(row["verdict"], row["reason"]) for row in verdict] == [("refused", reason) for reason in run["reasons"]]
    if name == "bits per byte too high":
        return
    broken = [row["remark"] for row in gates if row["verdict"] != "held" and row["remark"] in run["reasons"]]
    assert broken == run["reasons"], "every reason is a bound of these gates"
    assert {row["gate"] for row in gates} == {"comparison", "suite", "quantization", "contamination"}


def test_a_text_that_is_taken_down_while_a_run_goes_on_refuses_its_release(ended):
    """It has trained on the text: documents were filtered before."""
    run = ended[TAKEN_DOWN]
    assert (run["code"], run["promoted"]) == (3, False) and aliases_of(run) == REIGNING
    assert re.fullmatch(r"the block list \S+blocked_documents.txt was changed after .*: run again.*", *run["reasons"])


def test_prefects_ui_shows_that_a_release_was_accepted_or_refused_by_a_person(ended):
    assert ended["second"]["shown"]["refused-verdict"] == [{"verdict": "accepted", "reason": ""}]
    refused = ended["refused by a person"]
    assert [row["reason"] for row in refused["shown"]["refused-verdict"]] == refused["reasons"]


def test_the_champion_run_again_stays_champion(ended):
    again = ended["champion again"]
    assert (again["code"], again["promoted"], again["version"]) == (0, True, "2") and aliases_of(again) == REIGNING


def test_a_release_that_a_person_refused_is_refused_and_the_aliases_stay(ended):
    run = ended["refused by a person"]
    assert (run["code"], run["promoted"], aliases_of(run)) == (3, False, REIGNING)
    assert [sentence.startswith("Ada refused the release on ") for sentence in run["reasons"]] == [True]


def test_what_the_formats_of_the_champion_lost_can_be_asked_later(ended):
    """Q8_0 answers as F32 does, and F32 as the checkpoint, of which nine in ten answers are right. The run of the
    champion again also measured FP8_DYNAMIC, for real, and its sound scales lose little."""
    compared = ended[FEW[-1]]["formats"]
    assert compared["target"] == "glm46-refused version 2"
    *planned, measured = compared["formats"]
    assert [(each["name"], each["bits_per_byte_change"]) for each in planned] == [("F32", None), ("Q8_0", 0)]
    assert measured["name"] == FORMAT and 0 < abs(measured["bits_per_byte_change"]) < 0.02
    for each in planned:
        assert {figure: made["value"] for figure, made in each["figures"].items()} == {
            "pass_at_1": 0.9,
            "arithmetic_accuracy": 1.0,
        }
        assert each["figures"]["pass_at_1"]["change"] == 0
        low, high = each["figures"]["pass_at_1"]["change_interval"]
        assert low < 0 < high


def test_a_release_that_asks_a_person_is_refused_before_it_begins_where_no_servers_stay(tmp_path):
    scale = load_scale("micro")
    refuse_unanswerable_release(Home(tmp_path), scale)
    release = scale.release.model_copy(update={"approval": ApprovalRequest(timeout_hours=24)})
    with pytest.raises(
        ValueError, match=r"asks a person in Prefect's UI, and no servers of .* start them with `glm46 up`"
    ):
        refuse_unanswerable_release(Home(tmp_path), scale.model_copy(update={"release": release}))
