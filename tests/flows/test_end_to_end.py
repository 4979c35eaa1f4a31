"""The micro run from raw documents to a promoted, served model, by the real command line; then what must be cached and
what must not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import threading
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml

from configs.load import load_scale
from flows.cli.evidence.speedrun import differences, record_phase, record_target
from flows.show.outcome import RunOutcome
from infra.home import Home
from infra.storage.local_store import LocalStore
from tasks.training.measured_phases import measured_phases
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


def test_the_machine_is_watched_while_a_phase_trains(micro):
    _, home = micro
    with sqlite3.connect(home / "mlflow" / "mlflow.db") as database:
        logged = {name for (name,) in database.execute("SELECT DISTINCT key FROM metrics WHERE key LIKE 'system/%'")}
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= logged
    assert "system/disk_usage_percentage" in logged


def test_a_second_run_computes_nothing_and_imports_nothing_heavy(micro):
    first, home = micro
    again = glm46("run", "micro", "--json", home=home, PYTHONPROFILEIMPORTTIME="1")
    assert again.exit_code == 0, again.stderr
    assert again.computed == []
    trend = (home / "reports" / "micro-trend.html").read_text()
    assert "<b>1</b><span>runs</span>" in trend, "a run from the store is no other night"
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


def test_a_speedruns_record_has_the_runs_digests_and_finds_what_a_second_run_has_otherwise(micro):
    finished, home = micro
    outcome = RunOutcome.model_validate(finished.outcome)
    record = record_target(outcome, Home(home), "micro", target=0.0)
    first = load_scale("micro").phases[0].name
    assert (record.phase, record.target) == (first, 0.0), "every lower end reaches 0, so the first phase does"
    assert 0 < record.seconds < outcome.seconds
    assert {stage: step.digest for stage, step in record.steps.items()}.items() <= finished.digests.items()
    assert {"ingest_documents", f"train {first}", f"evaluate {first}"} <= set(record.steps)
    assert "train sft" not in record.steps
    assert differences(record, record_phase(outcome, Home(home), "micro", 0.0, first)) == []

    changed = record.steps["ingest_documents"].model_copy(update={"digest": "0" * 64})
    steps = {**record.steps, "ingest_documents": changed}
    other = record.model_copy(update={"data": "1" * 64, "steps": steps})
    assert [line.partition(":")[0] for line in differences(other, record)] == ["data", "ingest_documents"]
    with pytest.raises(ValueError, match=r"no phase of micro reached pass@1 1\.1 .* train longer, or lower --target"):
        record_target(outcome, Home(home), "micro", target=1.1)
    begun = outcome.model_copy(update={"stages": outcome.stages[:1], "reasons": ["disk full"]})
    with pytest.raises(ValueError, match="the run of micro ended without an evaluation: disk full"):
        record_target(begun, Home(home), "micro", target=0.0)


@pytest.mark.long
def test_a_speedrun_is_verified_from_the_store_and_refuses_one_that_is_used(micro, tmp_path):
    finished, home = micro
    path = tmp_path / "record.json"
    record = record_target(RunOutcome.model_validate(finished.outcome), Home(home), "micro", target=0.0)
    path.write_text(record.model_dump_json())
    assert glm46("speedrun", "micro", "--verify", str(path), home=home).exit_code == 0
    path.write_text(record.model_copy(update={"pass_at_1": 0.5}).model_dump_json())
    differs = glm46("speedrun", "micro", "--verify", str(path), home=home)
    assert differs.exit_code == 1 and "DIFFERS: pass@1: 0.5 in the record" in differs.stdout
    used = glm46("speedrun", "micro", "--output", str(tmp_path / "new.json"), home=home)
    assert used.exit_code == 2 and "set GLM46_HOME to a new directory" in used.stderr


def test_the_plan_of_a_scale_that_ran_is_what_the_run_measured(micro):
    _, home = micro
    planned = json.loads(glm46("plan", "micro", "--json", home=home).stdout)["phases"]
    measured = {
        each.recipe["phase"]: each for each in measured_phases(LocalStore(home / "store", Home(home)), pytest.fail)
    }
    for phase in planned:
        seen = measured[phase["name"]]
        assert phase["known_by"] == f"run {seen.key[:12]}"
        assert phase["measured_memory"] == seen.memory_bytes > phase["rank_memory"]["weights"]
        assert phase["hours"] * 3600 == pytest.approx(seen.seconds, rel=0.1), "attention is counted over other lengths"
        assert 0 <= phase["mfu"] < 0.9, "a share of the peak"
        assert 0 <= seen.num_positions <= seen.num_tokens
        assert (phase["mfu"] > 0) == (seen.num_positions > 0), "answers of equal rewards cost no pass"


@pytest.mark.long
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
def test_a_run_after_a_take_down_trains_on_none_of_it(micro, tmp_path):
    """One document that was trained by itself, and one file inside a repository."""
    home = tmp_path / "home"
    shutil.copytree(micro[1], home)

    def traced(*of: str) -> dict:
        return json.loads(glm46("lineage", *of, "--json", home=home).stdout)

    def records() -> pd.DataFrame:
        path = tmp_path / "records.parquet"
        path.unlink(missing_ok=True)
        glm46("lineage", "model", "mid_reasoning", "--scale", "micro", "--records", str(path), home=home)
        return pd.read_parquet(path)

    before = records()
    alone = before.id[before.source.str.startswith("packages/")].iloc[0]
    repository = before.id[before.source.str.startswith("repository/")].iloc[0]
    part = traced("document", repository)["parts"][0]
    phases = {each: {use["key"] for use in traced("document", each)["trained"]} for each in (alone, part)}
    assert all(phases.values())
    for each in (alone, part):
        assert glm46("forget", each, "--scale", "micro", "--apply", home=home).exit_code == 0
    run = glm46("run", "micro", "--until", "mid_reasoning", "--json", home=home)
    assert run.exit_code == 0, run.stderr
    assert "train mid_reasoning" in run.computed and "deduplicate_documents" not in run.computed
    after = records()
    assert alone in set(before.id) and not {alone, part} & set(after.id)
    for each in (alone, part):
        document = traced("document", each)
        assert {use["key"] for use in document["trained"]} == phases[each], "only the phases before the take-down"
        assert "blocked" in {drop["reason"] for drop in document["dropped"]}


@pytest.mark.long
def test_evaluation_and_release_as_jobs_by_ssh_have_the_digests_of_this_machine_also_after_a_kill(micro, tmp_path):
    """What they had computed is taken from the store before; where they run enters no key."""
    if reason := missing_programs():
        pytest.skip(reason)
    first, home = micro
    by_name = {"convert_to_gguf", "evaluate_gguf", "generate_reference"}
    steps = {"evaluate_checkpoint", "quantize_checkpoint", "evaluate_quantized", *by_name}
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
    formats = load_scale("micro").release.recipe.quantized_formats
    named = {name for name in first.digests if name.startswith(("evaluate ", "quantize "))} - {
        "evaluate pairs reward_model"
    }
    assert set(again.computed) == named | by_name and len(named) == 4 + 2 * len(formats)
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
