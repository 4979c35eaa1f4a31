"""The Slurm launcher: scripts and records without Slurm; jobs on a real Slurm of two nodes (long)."""

from __future__ import annotations

import os
import shlex
import signal
import time
from dataclasses import replace

import pytest

from configs.schema import QueueResources
from infra.jobs.launchers import Job, JobFailedError, JobHandle, JobLostError
from infra.jobs.open_launcher import launcher_of
from infra.jobs.scheduled_jobs import ScheduledLauncher, SchedulerRecord
from infra.jobs.scheduled_jobs import end_of as end_of_job
from infra.jobs.slurm_jobs import Slurm, job_script, parse_accounting, parse_record
from infra.jobs.supervisor import JobFile, read_job_file
from tests.infra.test_launcher import is_alive, starts, wait_for
from tests.support.cluster.default_queue import DEFAULT_QUEUE
from tests.support.cluster.slurm import missing_programs, slurm_cluster

KEY = "0123abcd"
SHOWN = (
    "JobId=7 JobName=glm46-0123 UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
    "JobState={} Reason={} Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "NodeList={} BatchHost=node1 NumNodes=2 TimeLimit=00:10:00"
)
"""As `scontrol show job --oneliner` of Slurm 22.05 prints it."""


def job(tmp_path, deed: str, num_ranks: int = 2, queue: QueueResources = DEFAULT_QUEUE) -> Job:
    return Job(KEY, "tests.support.toy_job", (str(tmp_path / KEY), deed), num_ranks, {"TOY": "1"}, 2, queue)


def test_the_script_asks_for_what_the_resources_say(tmp_path):
    queue = DEFAULT_QUEUE.model_copy(update={"partition": "gpu", "account": "team", "time_limit_minutes": 90})
    lines = job_script(job(tmp_path, "succeed", 16, queue), tmp_path / "a b").splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=team",
        "#SBATCH --time=90",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --no-requeue",
    } <= set(lines)
    per_node = shlex.split(shlex.split(lines[-1])[-1])
    assert per_node[-4:] == ["infra.jobs.node_supervisor", str(tmp_path / "a b"), "$SLURM_JOB_ID", "$SLURM_NODEID"]
    without = job_script(job(tmp_path, "succeed"), tmp_path)
    assert not [line for line in without.splitlines() if "partition" in line or "gpus" in line]
    with_gpus = job_script(replace(job(tmp_path, "succeed", 16), device="cuda"), tmp_path)
    assert "#SBATCH --gpus-per-node=8" in with_gpus.splitlines()


def test_records_of_controller_and_accounting_are_read():
    shown = parse_record(SHOWN.format("PENDING", "Resources", "(null)"))
    assert shown == SchedulerRecord("queued", "Resources")
    assert parse_record(SHOWN.format("PENDING", "PartitionTimeLimit", "(null)")).state == "stuck"
    assert parse_record(SHOWN.format("COMPLETING", "None", "node[1-2]")).state == "running"
    assert parse_accounting("CANCELLED by 0|None|node[1-2]\n") == SchedulerRecord("cancelled")
    assert parse_accounting("\n") is None


@pytest.mark.parametrize(
    ("slurm", "exit_code", "state", "reason"),
    [
        ("COMPLETED", 0, "succeeded", ""),
        ("FAILED", 7, "failed", ""),
        ("FAILED", -signal.SIGKILL, "lost", ""),
        ("NODE_FAIL", None, "lost", "its node failed (node2)"),
        ("NODE_FAIL", 1, "lost", "its node failed (node2)"),
        ("PREEMPTED", None, "lost", "a job of higher priority took its nodes (node2)"),
        ("OUT_OF_MEMORY", -signal.SIGKILL, "lost", "a node's memory ran out (node2)"),
        ("TIMEOUT", None, "lost", "its time limit came (node2)"),
        ("FAILED", os.EX_TEMPFAIL, "lost", "its time limit came near, and it was asked to save"),
        ("FAILED", None, "lost", "the supervisor of its first node was killed"),
        ("CANCELLED", None, "interrupted", "it was cancelled"),
    ],
)
def test_every_end_has_a_state_and_a_reason(slurm, exit_code, state, reason):
    record = parse_record(SHOWN.format(slurm, "None", "node2"))
    failing_rank = None if exit_code is None else 1
    written = JobFile(1, 0.0, 1, 1, "7", exit_code=exit_code, failing_rank=failing_rank)
    assert end_of_job(record, written, is_cancelled=False) == (state, reason)


def test_a_job_that_ended_before_it_began_is_a_failed_one_unless_it_was_taken():
    for slurm, state in [("FAILED", "failed"), ("NODE_FAIL", "lost"), ("CANCELLED", "interrupted")]:
        assert end_of_job(parse_record(SHOWN.format(slurm, "None", "node2")), None, is_cancelled=False)[0] == state


@pytest.fixture
def cluster(tmp_path):
    if reason := missing_programs():
        pytest.skip(reason)
    with slurm_cluster(tmp_path / "slurm") as started:
        yield started


@pytest.fixture
def launcher(cluster, tmp_path):
    return ScheduledLauncher(tmp_path, Slurm(look_seconds=0.2))


def end_of(launcher, handle):
    return wait_for(
        lambda: None if (status := launcher.poll(handle)).state in ("queued", "running") else status, seconds=120
    )


@pytest.mark.long
def test_jobs_run_fail_stop_and_are_lost_on_a_real_slurm(cluster, launcher, tmp_path):
    """One cluster for all: it takes a while to come up."""
    handle = launcher.submit(job(tmp_path, "succeed"))
    assert launcher_of(KEY, tmp_path).find(KEY) == handle
    assert end_of(launcher, handle).state == "succeeded"
    port = read_job_file(tmp_path / KEY).master_port
    assert [starts(tmp_path, rank)[0][1:] for rank in (0, 1)] == [["1", "2", str(port)]] * 2

    status = end_of(launcher, launcher.submit(job(tmp_path, "fail", num_ranks=4)))
    assert (status.state, status.exit_code, status.failing_rank) == ("failed", 7, 1)
    assert "rank 1 ended with exit code 7" in str(JobFailedError("training", status))

    status = end_of(launcher, launcher.submit(job(tmp_path, "lose a rank")))
    assert (status.state, status.exit_code, status.failing_rank) == ("lost", -signal.SIGKILL, 1)

    with pytest.raises(ValueError, match=r"Slurm refuses the job: .*partition"):
        launcher.submit(job(tmp_path, "succeed", queue=DEFAULT_QUEUE.model_copy(update={"partition": "nowhere"})))

    launcher.submit(job(tmp_path, "succeed", queue=DEFAULT_QUEUE.model_copy(update={"time_limit_minutes": 600})))
    status = end_of(launcher, handle)
    assert status.state == "failed" and "does not start job" in str(JobFailedError("training", status))
    assert "(PartitionTimeLimit): change queue" in status.reason
    stuck = launcher._name(KEY)

    before = len(starts(tmp_path))
    launcher.submit(job(tmp_path, "stop on request"))
    wait_for(lambda: len(starts(tmp_path)) == before + 1 and len(starts(tmp_path, 1)) > before, seconds=60)
    assert launcher.submit(job(tmp_path, "stop on request")) == handle, "a running job is attached to"
    assert Slurm().look(stuck, tmp_path).state == "cancelled"
    launcher.cancel(handle, grace_seconds=60)
    assert launcher.poll(handle).state == "interrupted"
    assert len(starts(tmp_path)) == before + 1

    queued = queued_behind(launcher, tmp_path)
    launcher.cancel(queued, grace_seconds=60)
    status = launcher.poll(queued)
    assert (status.state, status.exit_code) == ("interrupted", None), "not how the start before it ended"


def queued_behind(launcher, tmp_path) -> JobHandle:
    """A job of the same key whose nodes another job holds."""
    holder = Job("ffff0000", "tests.support.toy_job", (str(tmp_path / "ffff0000"), "sleep"), 2, {}, 2, DEFAULT_QUEUE)
    launcher.submit(holder)
    wait_for(lambda: launcher.poll(JobHandle(holder.key)).state == "running", seconds=60)
    handle = launcher.submit(job(tmp_path, "succeed"))
    wait_for(lambda: launcher.poll(handle).reason in ("Resources", "Priority"), seconds=60)
    return handle


@pytest.mark.long
def test_a_node_that_goes_down_is_a_lost_job_which_runs_again_on_the_node_that_came_back(cluster, launcher, tmp_path):
    handle = launcher.submit(job(tmp_path, "sleep"))
    pids = [int(wait_for(lambda rank=rank: starts(tmp_path, rank), seconds=60)[0][0]) for rank in (0, 1)]
    cluster.kill_node("node2")
    status = end_of(launcher, handle)
    assert status.state == "lost", status
    message = str(JobLostError("training", status, 12))
    assert "continues from the checkpoint of step 12" in message
    wait_for(lambda: not any(map(is_alive, pids)), seconds=60)
    cluster.start_node("node2")
    launcher.submit(job(tmp_path, "succeed"))
    assert end_of(launcher, JobHandle(KEY)).state == "succeeded"
    time.sleep(0.1)
    assert [start[1] for start in starts(tmp_path)] == ["1", "2"]
