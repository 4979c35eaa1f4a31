"""A phase as a job on two nodes, of Slurm or reached by ssh, one of which goes down in mid-phase."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.jobs.launchers import JobLostError
from infra.jobs.supervisor import read_job_file
from tasks.training.state.checkpoints import latest_step
from tests.support.cluster import slurm, ssh_hosts
from tests.support.cluster.default_queue import DEFAULT_QUEUE
from tests.support.model_recipes import GLM46, with_every_expert
from tests.support.training_inputs import NUM_STEPS, RESOURCES, TrainingInputs, metrics_of, small_recipe
from tests.training.test_zero import LOSS_TOLERANCE

TWO_RANKS = RESOURCES.model_copy(
    update={"num_ranks": 2, "ranks_per_node": 1, "micro_batch_sequences": 1, "save_interval_steps": 1}
)
CLUSTERS = {
    "slurm": (slurm.missing_programs, slurm.slurm_cluster, "job.sbatch"),
    "ssh": (ssh_hosts.missing_programs, ssh_hosts.ssh_hosts, "ssh.json"),
}


def hostfile(launcher: str, root: Path) -> str:
    """Only ssh has one."""
    return str(root / "ssh" / "hostfile") if launcher == "ssh" else ""


@contextmanager
def at_a_checkpoint(work_dir: Path, step: int, action: Callable[[], object]) -> Iterator[list[int]]:
    """Do something as soon as a checkpoint of this step or a later one is there; yields the step at which it was
    done."""
    done: list[int] = []

    def watch() -> None:
        while (saved := latest_step(work_dir)) < step:
            time.sleep(0.002)
        action()
        done.append(saved)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield done
    watcher.join(timeout=60)


@pytest.mark.long
@pytest.mark.parametrize("launcher", CLUSTERS)
def test_a_phase_that_loses_a_node_continues_and_has_the_digest_of_this_machine(launcher, tmp_path):
    missing_programs, start_cluster, submitted = CLUSTERS[launcher]
    if reason := missing_programs():
        pytest.skip(reason)
    recipe = small_recipe()
    here = TrainingInputs(tmp_path / "here")
    expected = here.train(here.arguments(recipe, TWO_RANKS))
    there = TrainingInputs(tmp_path / "there")
    queue = DEFAULT_QUEUE.model_copy(update={"hostfile": hostfile(launcher, tmp_path)})
    arguments = there.arguments(recipe, TWO_RANKS.model_copy(update={"launcher": launcher, "queue": queue}))
    with start_cluster(tmp_path / launcher) as cluster:
        with (
            at_a_checkpoint(there.work_dir(arguments), 1, lambda: cluster.kill_node("node2")) as killed_at,
            pytest.raises(JobLostError, match="continues from the checkpoint of step"),
        ):
            there.train(arguments)
        assert killed_at[0] < NUM_STEPS
        cluster.start_node("node2")
        trained = there.train(arguments)
    assert trained.digest == expected.digest
    assert trained.path(submitted).read_text()


def announce_time_limit(work_dir: Path) -> None:
    """As a scheduler does: the ranks save and end."""
    job = read_job_file(work_dir)
    assert job is not None
    os.kill(job.pid, signal.SIGTERM)


@pytest.mark.long
@pytest.mark.parametrize("launcher", CLUSTERS)
def test_a_phase_goes_on_without_a_node_and_uses_it_again_when_it_is_back(launcher, tmp_path):
    missing_programs, start_cluster, _ = CLUSTERS[launcher]
    if reason := missing_programs():
        pytest.skip(reason)
    # Deep, so that its steps last long enough for signals between them.
    deep = with_every_expert(GLM46).model_copy(update={"num_hidden_layers": 16})
    recipe = small_recipe(model=deep.model_dump())
    here = TrainingInputs(tmp_path / "here")
    expected = here.train(here.arguments(recipe, TWO_RANKS))
    there = TrainingInputs(tmp_path / "there")
    queue = DEFAULT_QUEUE.model_copy(
        update={"hostfile": hostfile(launcher, tmp_path), "max_missing_nodes": 1, "patience_minutes": 0.3}
    )
    arguments = there.arguments(recipe, TWO_RANKS.model_copy(update={"launcher": launcher, "queue": queue}))
    work_dir, reports, said = there.work_dir(arguments), [], []
    with start_cluster(tmp_path / launcher) as cluster:
        with at_a_checkpoint(work_dir, 1, lambda: cluster.kill_node("node2")), pytest.raises(JobLostError):
            there.train(arguments)
        with (
            at_a_checkpoint(work_dir, latest_step(work_dir) + 1, lambda: announce_time_limit(work_dir)),
            pytest.raises(JobLostError, match="its time limit came near, and it was asked to save"),
        ):
            there.train(arguments, report=reports.append, say=said.append)
        cluster.start_node("node2")
        trained = there.train(arguments)
    worlds = [json.loads(line) for line in trained.path("worlds.jsonl").read_text().splitlines()]
    if launcher == "slurm":  # which takes a job for nodes that are down, and lets it wait
        del worlds[1]
    assert [world["num_ranks"] for world in worlds] == [2, 1, 2]
    assert 0 == worlds[0]["after_step"] < worlds[1]["after_step"] < worlds[2]["after_step"] < NUM_STEPS
    assert [worlds[0]["why"], worlds[2]["why"]] == ["all nodes"] * 2
    assert {"ssh": "host node2 does not answer", "slurm": "waited for 0.3 minutes"}[launcher] in worlds[1]["why"]
    assert any("goes on with 1 of 2 nodes: " in message for message in said)
    assert any(report.message.endswith("1 of 2 ranks") for report in reports)
    assert trained.key == expected.key
    for ours, theirs in zip(
        metrics_of(trained.path("metrics.jsonl")), metrics_of(expected.path("metrics.jsonl")), strict=True
    ):
        assert ours["lm"] == pytest.approx(theirs["lm"], rel=LOSS_TOLERANCE["muon"])
