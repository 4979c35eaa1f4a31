"""The micro run from raw documents to a promoted, served model, by the real command line; then what must be cached and
what must not."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.conftest import ROOT
from tests.support.pipeline import glm46


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    """One finished micro run on the embedded default and the home it was made in."""
    home = tmp_path_factory.mktemp("micro") / "home"
    finished = glm46("run", "micro", "--json", home=home)
    assert finished.exit_code == 0, finished.stderr
    return finished, home


def test_the_micro_run_ends_in_a_promoted_model(micro):
    finished, home = micro
    outcome = finished.outcome
    assert (outcome["promoted"], outcome["alias"], outcome["version"]) == (True, "champion", "4"), (
        "one version per phase"
    )
    assert len(outcome["digest"]) == 64
    assert all({"name", "seconds", "cached", "digest"} <= set(stage) for stage in outcome["stages"])
    report = home / "reports" / "micro.html"
    assert outcome["report"] == str(report)
    text = report.read_text()
    assert all(f">{phase}<" in text for phase in ("pretrain_general", "mid_reasoning", "sft", "rl_reasoning"))
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text), "a report makes no outside request"


def test_a_second_run_computes_nothing_and_imports_nothing_heavy(micro):
    first, home = micro
    again = glm46("run", "micro", "--json", home=home, PYTHONPROFILEIMPORTTIME="1")
    assert again.exit_code == 0, again.stderr
    assert again.computed == []
    assert again.outcome["digest"] == first.outcome["digest"]
    assert again.outcome["version"] == "4"
    assert again.digests == {name: digest for name, digest in first.digests.items() if name in again.digests}
    imported = {
        line.rsplit("|", 1)[-1].strip() for line in again.stderr.splitlines() if line.startswith("import time:")
    }
    assert not imported & {"torch", "great_expectations", "deepspeed"}
    # pyspark is in sys.modules all the same: mlflow's own client imports the package (mlflow/types/schema.py); no JVM
    # starts


def test_the_promoted_model_answers(micro):
    _, home = micro
    answer = glm46("chat", "--scale", "micro", "--prompt", "What is 12 + 7?", "--max-tokens", "16", home=home)
    assert answer.exit_code == 0, answer.stderr


def test_the_champion_is_traced_to_its_sources_without_a_server(micro):
    _, home = micro
    traced = glm46("lineage", "model", "champion", "--scale", "micro", "--json", home=home)
    assert traced.exit_code == 0, traced.stderr
    assert [phase["name"] for phase in json.loads(traced.stdout)["phases"]] == [
        "pretrain_general",
        "mid_reasoning",
        "sft",
        "rl_reasoning",
    ]


def test_doctor_reads_every_file_of_the_store(micro):
    _, home = micro
    result = glm46("doctor", "--deep", "--json", home=home)
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["passed"]


def test_an_edited_comment_is_cached_and_an_edited_helper_runs_its_dependents_only(micro, tmp_path):
    first, home = micro
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", ".glm46", "__pycache__", "*.egg-info"))
    helper = tree / "tasks" / "data" / "filtering" / "heuristics.py"
    helper.write_text("# a comment\n" + helper.read_text())
    commented = glm46("run", "micro", "--until", "prepare_data", "--json", home=home, tree=tree)
    assert commented.exit_code == 0, commented.stderr
    assert commented.computed == []

    helper.write_text(helper.read_text() + "\n\nADDED_BY_THE_TEST = 1\n")
    edited = glm46("run", "micro", "--until", "prepare_data", "--json", home=home, tree=tree)
    assert edited.exit_code == 0, edited.stderr
    assert "filter_documents" in edited.computed
    assert not {"ingest_documents", "deduplicate_documents", "split_documents"} & set(edited.computed)
    reasons = {stage["name"]: stage["reason"] for stage in edited.outcome["stages"]}
    assert reasons["filter_documents"] == "code changed"
    assert edited.digests["filter_documents"] == first.digests["filter_documents"], (
        "the same output has the same digest"
    )
