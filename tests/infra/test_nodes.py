"""What the supervisors of a job's nodes do about each other, without a scheduler."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from infra.code_digest import ROOT, code_digest
from infra.jobs.launchers import JobHandle
from infra.jobs.node_files import BEAT_SECONDS, SILENT_SECONDS, NodeFiles
from infra.jobs.node_supervisor import SAVE_AFTER_VARIABLE, START_VARIABLE
from infra.jobs.rank_processes import RanksEnd
from infra.jobs.scheduled_jobs import ScheduledLauncher, SchedulerRecord
from infra.jobs.supervisor import read_job_file
from tests.infra.test_launcher import is_alive, starts, wait_for

KEY = "0123abcd"


@pytest.fixture
def run_node(tmp_path):
    """Starts the supervisor of a node of a job with two."""
    (tmp_path / KEY).mkdir()
    started = []

    code = code_digest(("tests.support.toy_job",))

    def run(node: int, deed: str, work_dir=tmp_path / KEY, code=code, name="7", **environment: str) -> subprocess.Popen:
        command = {"module": "tests.support.toy_job", "arguments": [str(tmp_path / KEY), deed], "num_ranks": 2}
        text = json.dumps({**command, "num_nodes": 2, "environment": {}, "code": code})
        (tmp_path / KEY / "command.json").write_text(text)
        arguments = [sys.executable, "-m", "infra.jobs.node_supervisor", str(work_dir), name, str(node)]
        started.append(
            subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("is_there", [False, True], ids=["no directory", "one of its own"])
def test_a_node_without_the_work_directory_says_so_and_the_job_fails_with_the_fix(is_there, run_node, tmp_path):
    """A directory of its own may hold the same files: a copy of a home that nodes do not share."""
    leader = run_node(0, "sleep", **{START_VARIABLE: "2"})
    if is_there:
        (tmp_path / "elsewhere").mkdir()
        shutil.copyfile(tmp_path / KEY / "command.json", tmp_path / "elsewhere" / "command.json")
    other = run_node(1, "sleep", work_dir=tmp_path / "elsewhere", **{START_VARIABLE: "2"})
    said = " ".join(other.communicate(timeout=20)[1].split())
    assert re.search(r"GLM46_HOME (is not )?on a directory that all nodes mount", said), said
    assert (other.returncode, leader.wait(timeout=20)) == (1, 1)
    job = read_job_file(tmp_path / KEY)
    assert (job.exit_code, job.failing_rank) == (1, None)
    assert job.reason.startswith("in 2 s the job did not begin on node 1: see the log there and put GLM46_HOME on")


@pytest.mark.parametrize("age", [SILENT_SECONDS + 5, -3600])
def test_a_node_that_is_silent_is_a_lost_job_and_a_silent_leader_ends_the_others(age, run_node, tmp_path):
    """A sign of the future is one from before the clock was set back."""
    leader, other = run_node(0, "sleep"), run_node(1, "sleep")
    wait_for(lambda: starts(tmp_path, 0) and starts(tmp_path, 1))
    other.send_signal(signal.SIGSTOP)
    files = NodeFiles(tmp_path / KEY, 1)
    os.utime(tmp_path / KEY / "nodes" / "1-1.beat", (time.time() - age, time.time() - age))
    assert leader.wait(timeout=20) == 1
    job = read_job_file(tmp_path / KEY)
    assert (job.exit_code, job.reason) == (-signal.SIGKILL, f"no sign of life of {os.uname().nodename} (node 1)")
    assert files.ordered() == "KILL"
    other.send_signal(signal.SIGCONT)
    assert other.wait(timeout=20) == 1, "it obeys when it comes back"


@pytest.mark.parametrize("age", [3600, -3600])
def test_a_clock_that_is_set_makes_no_node_silent(age, tmp_path):
    """Both signs are from before; one node goes on."""
    files = NodeFiles(tmp_path, 1)
    for node in (0, 1):
        files.begin(node, "a node")
        os.utime(tmp_path / "nodes" / f"1-{node}.beat", (time.time() - age,) * 2)
    beat = threading.Timer(BEAT_SECONDS, files.beat, [0])
    beat.start()
    assert files.silent_nodes([0, 1], time.time()) == [1]
    assert files.live_nodes() == [0] and not beat.is_alive()


def test_ends_of_nodes_are_in_the_order_of_the_file_system_and_not_of_the_clocks_of_nodes(tmp_path, monkeypatch):
    files = NodeFiles(tmp_path, 1)
    files.begin(0, "a node")
    for node, by_its_clock in ((2, 9000.0), (0, 100.0), (1, 5.0)):
        monkeypatch.setattr(time, "time", lambda at=by_its_clock: at)
        files.write_end(node, RanksEnd(node, failing_rank=node))
    assert list(files.ends(3)) == [2, 0, 1]


def test_ranks_save_before_the_time_limit_that_no_scheduler_announces(run_node, tmp_path):
    leader = run_node(0, "stop on request", **{SAVE_AFTER_VARIABLE: "4"})
    other = run_node(1, "stop on request")
    assert (leader.wait(timeout=30), other.wait(timeout=30)) == (0, 0)
    assert read_job_file(tmp_path / KEY).exit_code == os.EX_TEMPFAIL


def test_a_node_with_other_code_refuses(run_node, tmp_path):
    node = run_node(0, "succeed", code="0")
    assert f"has other code of the project in {ROOT}" in node.communicate(timeout=20)[1]
    assert node.returncode == 1 and read_job_file(tmp_path / KEY) is None


def test_a_second_job_in_a_work_directory_ends_at_once(run_node, tmp_path):
    run_node(0, "sleep")
    wait_for(lambda: starts(tmp_path, 0))
    second = run_node(0, "sleep")
    assert "finds another job in" in second.communicate(timeout=20)[1] and second.returncode == 3
    assert len(starts(tmp_path, 0)) == 1


def test_a_start_of_a_requeued_job_ends_the_earlier_one_that_lives_on(run_node, tmp_path):
    """A controller that was killed may believe that it had ended."""
    before = [run_node(node, "sleep") for node in (0, 1)]
    wait_for(lambda: starts(tmp_path, 0) and starts(tmp_path, 1))
    for node in (0, 1):
        run_node(node, "sleep", name="7+1")
    assert [node.wait(timeout=20) for node in before] == [1, 1]
    wait_for(lambda: len(starts(tmp_path, 0)) == len(starts(tmp_path, 1)) == 2, seconds=20)
    assert [is_alive(int(starts(tmp_path, rank)[0][0])) for rank in (0, 1)] == [False, False]
    assert read_job_file(tmp_path / KEY).scheduler_job == "7+1"


def test_ranks_that_a_scheduler_no_longer_knows_are_ended_before_their_job_is_over(run_node, tmp_path):
    nodes = [run_node(node, "sleep") for node in (0, 1)]
    wait_for(lambda: starts(tmp_path, 0) and starts(tmp_path, 1))
    (tmp_path / KEY / "submission.json").write_text('{"scheduler": "slurm", "job": "7"}')
    forgetful = SimpleNamespace(
        name="slurm",
        look_seconds=0.0,
        look=lambda *job: SchedulerRecord("cancelled"),
        log_path=lambda *job: tmp_path / "-",
    )
    launcher = ScheduledLauncher(tmp_path, forgetful)
    assert launcher.poll(JobHandle(KEY)).state == "running", "they live"
    assert [node.wait(timeout=20) for node in nodes] == [1, 1]
    status = launcher.poll(JobHandle(KEY))
    assert (status.state, status.reason) == ("interrupted", "it was cancelled")
