"""Long: runs of the real command line on a real Slurm with two nodes: a phase on two nodes, one and two again; tiny as
jobs, with everything that happens to jobs, against tiny on this machine. And tiny twice.

Run by `make test-long`. What is printed are the figures of docs/cluster.md.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from pathlib import Path

import psutil
import pytest
import yaml

from infra.jobs.supervisor import read_job_file
from tests.flows.test_kills import assert_nothing_is_left
from tests.support.cluster.slurm import missing_programs, slurm_cluster
from tests.support.cluster.slurm_runs import (
    Disturbances,
    run_disturbed,
    shown_job,
    slurm_job,
    wait_for_value,
    write_slurm_scale,
)
from tests.support.pipeline import Finished, glm46
from tests.support.training_inputs import metrics_of
from tests.training.test_zero import LOSS_TOLERANCE

RUN_SECONDS = 3600
TWO_NODES = {"num_ranks": 2, "ranks_per_node": 1, "save_interval_steps": 1}
pytestmark = pytest.mark.long
needs_slurm = pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())


def evidence(home: Path, name: str) -> Path:
    """A file of the evidence of the first phase."""
    (path,) = home.glob(f"store/objects/*/*/{name}")
    return path


def messages_in_prefect(home: Path) -> str:
    """The log of the flow runs, as Prefect's UI shows it."""
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        return "\n".join(message for (message,) in database.execute("select message from log order by timestamp"))


def local_scale(scale: Path) -> Path:
    """The same on this machine, the first phase in as many ranks."""
    tree = yaml.safe_load(scale.read_text())
    for section in (tree["phases"][0], tree["evaluation"]):
        section["resources"] |= {"launcher": "local"}
    tree["phases"][0]["resources"]["queue"] |= {"max_missing_nodes": 0}
    path = scale.with_name("local.yaml")
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@needs_slurm
def test_a_phase_goes_on_with_one_node_of_two_and_uses_both_when_the_lost_one_is_back(tmp_path):
    queue = {"max_missing_nodes": 1, "patience_minutes": 0.2}
    scale = write_slurm_scale("micro", tmp_path / "micro.yaml", **TWO_NODES, queue=queue)
    phase, until = "train pretrain_general", ("--until", "pretrain_general", "--json")
    here, there = tmp_path / "here", tmp_path / "there"
    alone = glm46("run", str(local_scale(scale)), *until, home=here, timeout=RUN_SECONDS)
    assert alone.exit_code == 0, alone.stderr
    shutil.copytree(here / "store", there / "store")
    for path in (there / "store" / "manifests").glob("*.json"):
        if json.loads(path.read_text())["identity"]["step"] == "train_phase":
            path.unlink()
    shutil.rmtree(evidence(there, "metrics.jsonl").parent)
    with slurm_cluster(tmp_path / "slurm") as cluster:
        happens, jobs = Disturbances(there, cluster), []

        def disturb() -> None:
            work_dir = happens.after_step(phase, 3)
            jobs.append(slurm_job(work_dir))
            cluster.lose_node("node2", "disk failed")
            wait_for_value(lambda: slurm_job(work_dir) != jobs[0])
            jobs.append(slurm_job(work_dir))
            wait_for_value(lambda: slurm_job(work_dir) != jobs[1])
            jobs.append(slurm_job(work_dir))
            left_at = json.loads((work_dir / "worlds.jsonl").read_text().splitlines()[-1])["after_step"]
            happens.after_step(phase, left_at + 2, number=2)
            cluster.start_node("node2")
            happens.scancel(work_dir, "--signal=TERM")  # as Slurm announces a time limit
            wait_for_value(lambda: slurm_job(work_dir) != jobs[2])
            jobs.append(slurm_job(work_dir))

        run = run_disturbed("run", str(scale), *until, home=there, disturb=disturb)
        states = [shown_job(job).partition("JobState=")[2].partition(" ")[0] for job in jobs]
    assert run.exit_code == 0, run.stderr
    assert states == ["NODE_FAIL", "CANCELLED", "COMPLETED", "COMPLETED"], "by Slurm's own records"
    worlds = [json.loads(line) for line in evidence(there, "worlds.jsonl").read_text().splitlines()]
    assert [world["num_ranks"] for world in worlds] == [2, 2, 1, 2]
    assert 3 <= worlds[1]["after_step"] == worlds[2]["after_step"] < worlds[3]["after_step"] < 30
    expected = metrics_of(evidence(here, "metrics.jsonl"))
    for ours, theirs in zip(metrics_of(evidence(there, "metrics.jsonl")), expected, strict=True):
        assert (ours["step"], ours["tokens"]) == (theirs["step"], theirs["tokens"]), "the same batches"
        assert ours["lm"] == pytest.approx(theirs["lm"], rel=LOSS_TOLERANCE["muon"])
    assert run.digests == alone.digests, "also across worlds: a sum of two is the same in either order"
    step = worlds[1]["after_step"]
    for sentence in (
        f"{phase} was lost: its node failed: node2 is down (disk failed); it continues from the checkpoint of step "
        f"{step}",
        f"{phase}: waits in the queue: node2 is down",
        f"{phase}: goes on with 1 of 2 nodes: the job waited for 0.2 minutes in the queue (node2 is down",
        f"{phase} was lost: its time limit came near, and it was asked to save; it continues from the checkpoint",
    ):
        assert sentence in run.stderr, run.stderr
        assert sentence in messages_in_prefect(there)
    assert_nothing_is_left(there)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Finished:
    """Tiny on this machine."""
    finished = glm46("run", "tiny", "--json", home=tmp_path_factory.mktemp("tiny") / "home", timeout=RUN_SECONDS)
    assert finished.exit_code == 0 and finished.outcome["promoted"], finished.stderr
    return finished


def test_the_tiny_run_twice_has_equal_digests(tiny, tmp_path):
    again = glm46("run", "tiny", "--json", home=tmp_path / "home", timeout=RUN_SECONDS)
    assert again.exit_code == 0 and again.outcome["promoted"], again.stderr
    assert again.digests == tiny.digests
    cached = glm46("run", "tiny", "--json", home=tmp_path / "home")
    seconds = [each.outcome["seconds"] for each in (tiny, again, cached)]
    print(f"\ntiny: {seconds[0]} s, again elsewhere {seconds[1]} s, cached {seconds[2]} s", flush=True)
    assert cached.computed == []


@needs_slurm
def test_tiny_as_jobs_of_slurm_has_the_digests_of_this_machine_whatever_happens_to_them(tiny, tmp_path):
    scale, home, began = write_slurm_scale("tiny", tmp_path / "tiny.yaml"), tmp_path / "home", time.monotonic()
    with slurm_cluster(tmp_path / "slurm") as cluster:
        happens = Disturbances(home, cluster)

        def disturb() -> None:
            happens.scancel(happens.after_step("train pretrain_general", 40), "--signal=TERM")  # a time limit
            work_dir = happens.after_step("train pretrain_code_reasoning", 20)
            node = shown_job(slurm_job(work_dir)).partition(" NodeList=")[2].partition(" ")[0]
            cluster.kill_node(node)
            happens.requeue(happens.after_step("train mid_reasoning", 1))
            cluster.start_node(node, idle=False)
            happens.scancel(happens.after_step("train sft", 64))

        first = run_disturbed("run", str(scale), "--json", home=home, disturb=disturb)
        assert first.exit_code == 1 and "train sft was asked to stop (it was cancelled)" in first.stderr, first.stderr

        def kill_rank() -> None:
            job = read_job_file(happens.after_step("train rl_reasoning", 5))
            assert job is not None
            (rank,) = psutil.Process(job.pid).children()
            rank.kill()

        second = run_disturbed("run", str(scale), "--json", home=home, disturb=kill_rank)
    assert second.exit_code == 0 and second.outcome["promoted"], second.stderr
    seconds = second.outcome["seconds"]
    print(f"\ntiny on Slurm: {time.monotonic() - began:.0f} s, of them {seconds} s after the scancel", flush=True)
    assert {name: second.digests[name] for name in tiny.digests} == tiny.digests
    assert second.outcome["digest"] == tiny.outcome["digest"]
    assert_nothing_is_left(home)
