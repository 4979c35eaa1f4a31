"""The micro run from raw documents to a promoted, served model, by the real command line; then what must be cached and
what must not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import psutil
import pytest
import yaml

from configs.load import load_scale
from tests.conftest import ROOT
from tests.infra.test_launcher import wait_for
from tests.support.cluster.ssh_hosts import missing_programs, ssh_hosts
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


def test_the_champions_evidence_is_what_the_store_holds(micro, tmp_path):
    _, home = micro
    evidence = tmp_path / "evidence"
    written = glm46("evidence", "champion", "--scale", "micro", "--output", str(evidence), home=home)
    assert written.exit_code == 0, written.stderr
    verified = glm46("verify", str(evidence), "--json", home=home)
    found = json.loads(verified.stdout)
    assert (verified.exit_code, found["problems"], found["recomputed"]) == (0, [], []), verified.stderr
    assert found["num_subjects"] > 10 and found["num_steps"] > 30


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


@pytest.mark.long
def test_a_stranger_who_runs_the_scale_again_gets_the_digests_of_the_statement(micro, tmp_path):
    _, home = micro
    evidence = tmp_path / "evidence"
    glm46("evidence", "champion", "--scale", "micro", "--output", str(evidence), home=home)
    verified = glm46("verify", str(evidence), "--rebuild", "micro", home=home)
    assert verified.exit_code == 0, verified.stdout + verified.stderr
    lines = [line for line in verified.stdout.splitlines() if line.endswith("same digest")]
    assert len(lines) > 25 and sum(line.startswith("train_phase ") for line in lines) == 4


@pytest.mark.long
def test_evaluation_and_release_as_jobs_by_ssh_have_the_digests_of_this_machine_also_after_a_kill(micro, tmp_path):
    """What they had computed is taken from the store before; where they run enters no key."""
    if reason := missing_programs():
        pytest.skip(reason)
    first, home = micro
    steps = {"evaluate_checkpoint", "convert_to_gguf", "evaluate_gguf", "generate_reference"}
    for path in (home / "store" / "manifests").glob("*.json"):
        if json.loads(path.read_text())["identity"]["step"] in steps:
            path.unlink()
    with ssh_hosts(tmp_path / "ssh") as hosts:
        tree = load_scale("micro").model_dump(mode="json")
        for section in ("evaluation", "release"):
            tree[section]["resources"] |= {"launcher": "ssh"}
            tree[section]["resources"]["queue"]["hostfile"] = str(hosts.hostfile)
        scale = tmp_path / "micro.yaml"
        scale.write_text(yaml.safe_dump(tree))
        killed = threading.Thread(target=kill_first_rank, args=(home / "work",))
        killed.start()
        again = glm46("run", str(scale), "--json", home=home)
        killed.join()
    assert again.exit_code == 0, again.stderr
    evaluated = {name for name in first.digests if name.startswith("evaluate ")}
    assert set(again.computed) == evaluated | steps - {"evaluate_checkpoint"} and len(evaluated) == 4
    assert "was lost: rank 0 was killed (SIGKILL)" in again.stdout + again.stderr
    assert again.digests == {name: digest for name, digest in first.digests.items() if name in again.digests}
    assert again.outcome["digest"] == first.outcome["digest"]


def kill_first_rank(work_root: Path) -> None:
    """As when memory runs out, as soon as a step's job has a rank."""
    ranks = wait_for(
        lambda: [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if "infra.jobs.step_jobs" in (command := process.info["cmdline"] or [])
            and command[-1].startswith(str(work_root))
        ],
        seconds=300,
    )
    os.kill(ranks[0], signal.SIGKILL)
